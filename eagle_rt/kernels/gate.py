"""The gates of feed-forward parts: SwiGLU and what is like it (Shazeer, "GLU Variants Improve Transformer", 2020)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.dispatch import kernel_for


class Gate(NamedTuple):
    """gate * sigmoid(alpha * (gate + cubic * gate^3)) * (up + shift), of a gate of at most `limit` and an up of at most that size
    (gpt-oss model card, OpenAI, 2025, section 2.3)."""

    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0
    cubic: float = 0.0


SWIGLU = Gate()
# 0.5 * (1 + tanh(x)) = sigmoid(2 x): the usual approximation of a GELU (Hendrycks and Gimpel, 2016, section 2).
GEGLU = Gate(alpha=2 * math.sqrt(2 / math.pi), cubic=0.044715)


def gated(gate_and_up: Tensor, gate: Gate = SWIGLU) -> Tensor:
    """[T, 2 * I], gates and ups side by side, to [T, I]."""
    if kernel := kernel_for("gated", gate_and_up):
        return kernel(gate_and_up, gate)
    if gate == SWIGLU:
        gates, ups = gate_and_up.chunk(2, dim=-1)
        return functional.silu(gates) * ups
    gates, ups = gate_and_up.float().chunk(2, dim=-1)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    shares = torch.sigmoid(gate.alpha * (gates + gate.cubic * gates**3))
    return (gates * shares * (ups + gate.shift)).to(gate_and_up.dtype)
