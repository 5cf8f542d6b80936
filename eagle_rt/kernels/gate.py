"""The gates of feed-forward parts: SwiGLU and what is like it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_rt.kernels.silu_and_mul import silu_and_mul


class Gate(NamedTuple):
    """gate * sigmoid(alpha * gate) * (up + shift), of a gate of at most `limit` and an up of at most that size (gpt-oss model card,
    OpenAI, 2025, section 2.3)."""

    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0


SWIGLU = Gate()


def gated(gate_and_up: Tensor, gate: Gate) -> Tensor:
    """[T, 2 * I], gates and ups side by side, to [T, I]; rounded once, but for a SwiGLU."""
    if gate == SWIGLU:
        return silu_and_mul(gate_and_up)
    gates, ups = gate_and_up.float().chunk(2, dim=-1)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    return (gates * torch.sigmoid(gate.alpha * gates) * (ups + gate.shift)).to(gate_and_up.dtype)
