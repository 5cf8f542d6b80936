"""Feed-forward parts of many experts, of which every token takes a few: which ones, and what they add (Shazeer et al., 2017, as
Mixtral and Qwen3 do it: each expert is a SwiGLU)."""

import torch
from torch import Tensor

from eagle_rt.kernels.dispatch import triton_kernel
from eagle_rt.kernels.silu_and_mul import silu_and_mul


def route(logits: Tensor, top_k: int, normalizes: bool) -> tuple[Tensor, Tensor]:
    """(how much of each counts [R, top_k] float32, which experts [R, top_k]), of router logits [R, experts]: the likeliest, the
    first of equal ones; normalizes: what they count adds up to one."""
    if kernel := triton_kernel("route", logits):
        return kernel(logits, top_k, normalizes)
    shares, experts = logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    shares, experts = shares[:, :top_k], experts[:, :top_k]
    return shares / shares.sum(dim=-1, keepdim=True) if normalizes else shares, experts


def mix_experts(x: Tensor, shares: Tensor, experts: Tensor, gate_and_up: Tensor, down: Tensor) -> Tensor:
    """[R, H] what the experts of every row of x [R, H] add to it, each by its share; gate_and_up: [experts, 2 * I, H], down:
    [experts, H, I]."""
    if kernel := triton_kernel("mix_experts", x):
        return kernel(x, shares, experts, gate_and_up, down)
    added = x.new_zeros(*experts.shape, x.shape[1], dtype=torch.float32)
    for expert in experts.unique().tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        added[rows, places] = (silu_and_mul(x[rows] @ gate_and_up[expert].t()) @ down[expert].t()).float()
    return (shares[..., None] * added).sum(dim=1).to(x.dtype)
