"""Experts whose weights have few bits, on a GPU."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.dispatch import triton_kernel
from eagle_rt.kernels.experts import ExpertTensors, Mixing, add_experts, routed
from eagle_rt.kernels.gate import gated
from eagle_rt.kernels.narrow import BITS, TILE, NarrowWeight, narrowed

HALF_TILE = TILE // 2


@dataclass(frozen=True)
class NarrowStack:
    """Weights [count, out, in] behind one another, whole tiles of each. in_halves: a tile is of half as many outputs of the first
    half, which are gates, and the same of the second, ups."""

    weight: NarrowWeight
    count: int
    out_size: int
    in_halves: bool
    dtype: torch.dtype

    @property
    def num_bits(self) -> int:
        return BITS[self.weight.kind]

    def unpacked(self) -> Tensor:
        """[count, out, in] copied."""
        outputs = self.weight.widened().to(self.dtype).unflatten(0, (self.count, -1))
        if self.in_halves:
            halves = outputs.unflatten(1, (-1, 2, HALF_TILE)).transpose(1, 2).flatten(2, 3)
            return halves[:, :, : self.out_size // 2].flatten(1, 2)
        return outputs[:, : self.out_size]


def narrow_stack(weights: Tensor, quantization: str, *, in_halves: bool) -> NarrowStack | None:
    """Of weights [count, out, in]; see `narrow.narrowed`."""
    count, out_size, _ = weights.shape
    if in_halves:
        halves = weights.unflatten(1, (2, -1))
        in_tiles = functional.pad(halves, (0, 0, 0, -halves.shape[2] % HALF_TILE)).unflatten(2, (-1, HALF_TILE)).transpose(1, 2)
    else:
        in_tiles = functional.pad(weights, (0, 0, 0, -out_size % TILE))
    weight = narrowed(in_tiles.flatten(0, -2), quantization)
    return weight and NarrowStack(weight, count, out_size, in_halves, weights.dtype)


class NarrowExperts:
    """`kernels.experts` of weights of few bits; the router is one of the others. apart: gates and ups, and downs, of shared experts
    that are held as they are, of which `mixing` does not know."""

    router = None

    def __init__(
        self,
        weights: ExpertTensors,
        gate_and_up: NarrowStack,
        down: NarrowStack,
        mixing: Mixing,
        apart: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.gate_and_up, self.down, self._apart = gate_and_up, down, apart
        self.gate_and_up_bias, self.down_bias = weights.gate_and_up_bias, weights.down_bias
        self.count, self.size = gate_and_up.count, weights.size
        nothing = weights.router.new_empty(0)
        self._others, self._mixing = replace(weights, gate_and_up=nothing, down=nothing), mixing

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Gates and ups, and downs, of all."""
        own = self.gate_and_up.unpacked(), self.down.unpacked()
        return (torch.cat((own[0], self._apart[0])), torch.cat((own[1], self._apart[1]))) if self._apart else own

    def __call__(self, x: Tensor, router_x: Tensor | None = None) -> Tensor:
        shares, experts = routed(x if router_x is None else router_x, self._others, self._mixing)
        if kernel := triton_kernel("mix_experts", x):
            added = kernel(x, shares, experts, self, self._mixing)
        else:
            widened = replace(self._others, gate_and_up=self.gate_and_up.unpacked(), down=self.down.unpacked())
            added = add_experts(x, shares, experts, widened, self._mixing)
        return added + self._added_apart(x) if self._apart else added

    def _added_apart(self, x: Tensor) -> Tensor:
        assert self._apart
        added, gate = torch.zeros_like(x), self._others.router[-1:]
        for gate_and_up, down in zip(*self._apart, strict=True):
            added += functional.linear(gated(functional.linear(x, gate_and_up), self._mixing.gate), down)
        return added * functional.linear(x.to(gate.dtype), gate).sigmoid().to(x.dtype) if self._mixing.gates_shared else added


def narrow_experts(weights: ExpertTensors, mixing: Mixing, quantization: str) -> NarrowExperts | None:
    """None where any weights are to be held as they are, see `narrow.narrowed`; shared ones may be."""
    count, apart = weights.count, None
    first = count - mixing.num_shared
    shared = weights.gate_and_up[first:], weights.down[first:]
    if mixing.num_shared and not all(narrowed(own.flatten(0, 1), quantization) for own in shared):
        count, apart, mixing = first, (shared[0].clone(), shared[1].clone()), mixing._replace(num_shared=0)
    gate_and_up = narrow_stack(weights.gate_and_up[:count], quantization, in_halves=True)
    down = gate_and_up and narrow_stack(weights.down[:count], quantization, in_halves=False)
    return down and gate_and_up and NarrowExperts(weights, gate_and_up, down, mixing, apart)
