"""Feed-forward parts of many experts, of which every token takes a few: which ones, and what they add (Shazeer et al., 2017, as
Mixtral, Qwen3 and gpt-oss do it: each expert is a SwiGLU, or nearly one)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.dispatch import triton_kernel
from eagle_rt.kernels.gate import SWIGLU, Gate, gated


class Mixing(NamedTuple):
    """How rows take experts: the top_k likeliest; normalizes: what these count adds up to one. gate: within each."""

    top_k: int
    normalizes: bool
    gate: Gate = SWIGLU


@dataclass(frozen=True)
class ExpertTensors:
    """router: [experts, H]; gate_and_up: [experts, 2 * I, H], gates first; down: [experts, H, I]. Either all have biases, with one
    axis less, or none has."""

    router: Tensor
    gate_and_up: Tensor
    down: Tensor
    router_bias: Tensor | None = None
    gate_and_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.router)

    @property
    def size(self) -> int:
        """I."""
        return self.down.shape[2]


def route(logits: Tensor, top_k: int, normalizes: bool) -> tuple[Tensor, Tensor]:
    """(how much of each counts [R, top_k] float32, which experts [R, top_k]), of router logits [R, experts]: the likeliest, the
    first of equal ones; normalizes: what they count adds up to one."""
    if kernel := triton_kernel("route", logits):
        return kernel(logits, top_k, normalizes)
    shares, experts = logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    shares, experts = shares[:, :top_k], experts[:, :top_k]
    return shares / shares.sum(dim=-1, keepdim=True) if normalizes else shares, experts


def mix_experts(x: Tensor, weights: ExpertTensors, mixing: Mixing) -> Tensor:
    """[R, H] what the experts of every row of x [R, H] add to it, each by its share."""
    shares, experts = routed(x, weights, mixing)
    if kernel := triton_kernel("mix_experts", x):
        return kernel(x, shares, experts, weights, mixing.gate)
    return add_experts(x, shares, experts, weights, mixing.gate)


def routed(x: Tensor, weights: ExpertTensors, mixing: Mixing) -> tuple[Tensor, Tensor]:
    """`route` of rows of x [R, H]."""
    return route(functional.linear(x, weights.router, weights.router_bias), mixing.top_k, mixing.normalizes)


def add_experts(x: Tensor, shares: Tensor, experts: Tensor, weights: ExpertTensors, gate: Gate) -> Tensor:
    """The same of rows that have been routed."""
    added = x.new_zeros(*experts.shape, x.shape[1], dtype=torch.float32)
    for expert in experts.unique().tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        biases = [None if bias is None else bias[expert] for bias in (weights.gate_and_up_bias, weights.down_bias)]
        activations = gated(functional.linear(x[rows], weights.gate_and_up[expert], biases[0]), gate)
        added[rows, places] = functional.linear(activations, weights.down[expert], biases[1]).float()
    return (shares[..., None] * added).sum(dim=1).to(x.dtype)
