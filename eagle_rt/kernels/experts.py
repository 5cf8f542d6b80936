"""Feed-forward parts of many experts, of which every token takes a few: which ones, and what they add (Shazeer et al., 2017, as
Mixtral, Qwen3 and gpt-oss do it: each expert is a SwiGLU, or nearly one; or DeepSeek-AI, 2024, sections 2.1.2 and 2.3.3, as GLM
and DeepSeek-V3 do: chosen by sigmoids that balance, beside experts that all tokens share; or as Llama 4 does, whose experts are
given the less the less they count)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.dispatch import triton_kernel
from eagle_rt.kernels.gate import SWIGLU, Gate, gated

# Beside sums of sigmoids, which may all be nothing.
LEAST_TOTAL = 1e-20


class Mixing(NamedTuple):
    """How rows take experts: the top_k likeliest; normalizes: what these count adds up to one. gate: within each.

    by_sigmoid: how likely one is its logit says alone, and not what part it has of all (softmax). scale: what is multiplied with
    what they count. num_shared: how many all rows take besides, behind those that are chosen; these count one, or where
    gates_shared the sigmoid of a logit behind all others. num_groups: where over 1, experts lie in so many groups of equal size, of
    which those of a row's best top_groups may be taken: by sigmoids those whose two most wanted are wanted most together, otherwise
    those of the likeliest expert. weighs_inputs: what an expert counts is multiplied with what it is given, not with what it adds.
    """

    top_k: int
    normalizes: bool
    gate: Gate = SWIGLU
    by_sigmoid: bool = False
    scale: float = 1.0
    num_shared: int = 0
    gates_shared: bool = False
    num_groups: int = 1
    top_groups: int = 1
    weighs_inputs: bool = False

    @property
    def num_taken(self) -> int:
        """By every row."""
        return self.top_k + self.num_shared


@dataclass(frozen=True)
class ExpertTensors:
    """router: [experts, H], in float32 for sigmoids; gate_and_up: [experts, 2 * I, H], gates first; down: [experts, H, I]. Either
    all have biases, with one axis less, or none has. Of shared ones, the last, the router knows nothing,
    or has a gate of them all behind the others.

    choice_bias: [experts] float32, added to how likely experts are where they are chosen, but not to what they count; share_scales:
    [experts] float32, multiplied with what they count.
    """

    router: Tensor
    gate_and_up: Tensor
    down: Tensor
    router_bias: Tensor | None = None
    gate_and_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    choice_bias: Tensor | None = None
    share_scales: Tensor | None = None

    @property
    def count(self) -> int:
        """Shared ones, too."""
        return len(self.down)

    @property
    def size(self) -> int:
        """I."""
        return self.down.shape[2]


def route(logits: Tensor, mixing: Mixing, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(how much of each counts, which experts), both [R, num_taken], float32 and whole numbers, of router logits [R, experts], with
    a gate behind them where `gates_shared`: the likeliest, the first of equal ones, then the shared.

    choice_bias: see `ExpertTensors`."""
    if kernel := triton_kernel("route", logits):
        return kernel(logits, mixing, choice_bias)
    num_routed = logits.shape[1] - mixing.gates_shared
    logits, gate = logits.float().split((num_routed, int(mixing.gates_shared)), dim=1)
    likely = logits.sigmoid() if mixing.by_sigmoid else logits.softmax(dim=-1)
    wanted = likely if choice_bias is None else likely + choice_bias
    if mixing.num_groups > 1:
        wanted = of_best_groups(wanted, mixing)
    experts = wanted.sort(dim=-1, descending=True, stable=True).indices[:, : mixing.top_k]
    shares = likely.gather(1, experts)
    if mixing.normalizes:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + LEAST_TOTAL)
    shared = torch.arange(num_routed, num_routed + mixing.num_shared, device=logits.device).expand(len(logits), -1)
    of_shared = gate.sigmoid() if mixing.gates_shared else shares.new_ones(1, 1)
    return torch.cat((shares * mixing.scale, of_shared.expand(shared.shape)), 1), torch.cat((experts, shared), 1)


def of_best_groups(wanted: Tensor, mixing: Mixing) -> Tensor:
    """How much experts are wanted [R, experts], and of other groups' not at all; the first of equal groups."""
    groups = wanted.unflatten(1, (mixing.num_groups, -1))
    of_groups = groups.topk(2 if mixing.by_sigmoid else 1, dim=2).values.sum(dim=2)
    best = of_groups.sort(dim=1, descending=True, stable=True).indices[:, : mixing.top_groups]
    is_best = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~is_best[..., None], -torch.inf).flatten(1)


def mix_experts(x: Tensor, weights: ExpertTensors, mixing: Mixing, router_x: Tensor | None = None) -> Tensor:
    """[R, H] what the experts of every row of x [R, H] add to it, each by its share. router_x: what they are chosen by, if not
    x."""
    shares, experts = routed(x if router_x is None else router_x, weights, mixing)
    if kernel := triton_kernel("mix_experts", x):
        return kernel(x, shares, experts, weights, mixing)
    return add_experts(x, shares, experts, weights, mixing)


def routed(x: Tensor, weights: ExpertTensors, mixing: Mixing) -> tuple[Tensor, Tensor]:
    """`route` of rows of x [R, H]."""
    logits = functional.linear(x.to(weights.router.dtype), weights.router, weights.router_bias)
    shares, experts = route(logits, mixing, weights.choice_bias)
    return shares if weights.share_scales is None else shares * weights.share_scales[experts], experts


def add_experts(x: Tensor, shares: Tensor, experts: Tensor, weights: ExpertTensors, mixing: Mixing) -> Tensor:
    """The same of rows that have been routed."""
    added = x.new_zeros(*experts.shape, x.shape[1], dtype=torch.float32)
    for expert in experts.unique().tolist():
        rows, places = (experts == expert).nonzero(as_tuple=True)
        biases = [None if bias is None else bias[expert] for bias in (weights.gate_and_up_bias, weights.down_bias)]
        given = x[rows] * shares[rows, places, None].to(x.dtype) if mixing.weighs_inputs else x[rows]
        activations = gated(functional.linear(given, weights.gate_and_up[expert], biases[0]), mixing.gate)
        added[rows, places] = functional.linear(activations, weights.down[expert], biases[1]).float()
    return (added if mixing.weighs_inputs else shares[..., None] * added).sum(dim=1).to(x.dtype)
