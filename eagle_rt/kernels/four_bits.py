"""Weights of four bits: what each stands for, and how a weight becomes one."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Inputs that share the size of their steps.
GROUP = 32
# What four bits stand for: whole numbers, or those of E2M1 in halves, from the least on (OCP Microscaling Formats 1.0, 2023).
WHOLE = tuple(range(16))
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
# How many steps the largest of a group may be, the likeliest first: quantizers have it at an end.
WHOLE_SIZES, E2M1_SIZES = (8, 7, 15, 6, 5, 9, 10, 11, 12, 13, 14, 16, 4, 3, 2, 1), (12, 8, 6, 4, 3, 2, 1)
# By how much of a step numbers may be off: they and the largest, of up to sixteen steps, may have been rounded to bfloat16 since.
ROUNDING = 0.15
# Outputs that are looked at together.
TOGETHER = 1024


@dataclass(frozen=True)
class FourBits:
    """W [out, in], of which a number in a group is scales * ratios * (levels[its code] - nothings).

    codes: [out, groups, GROUP] uint8 below 16; ratios, nothings: [out, groups] float16 and uint8; levels: sixteen; scales: [out]
    float32.
    """

    codes: Tensor
    ratios: Tensor
    nothings: Tensor
    levels: tuple[int, ...]
    scales: Tensor

    def widened(self) -> Tensor:
        """[out, groups * GROUP] float32."""
        levels = torch.tensor(self.levels, dtype=torch.float32)[self.codes.long()]
        steps = self.ratios.float() * self.scales[:, None]
        return ((levels - self.nothings[..., None].float()) * steps[..., None]).flatten(1)


def in_four_bits(weight: Tensor) -> FourBits:
    """A weight [out, in] in the four bits that it was stored in, if it was, or else rounded to the nearest of sixteen whole numbers
    of steps that reach from the least of its group, or 0, to the largest."""
    return stored_four_bits(weight) or joined([rounded_four_bits(in_groups(part)) for part in weight.split(TOGETHER)])


def rounded_four_bits(groups: Tensor) -> FourBits:
    least, most = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    steps = (most - least) / 15
    return with_steps(groups, steps, (-least / not_zero(steps)).round_(), WHOLE)


def stored_four_bits(weight: Tensor) -> FourBits | None:
    """Of a weight [out, in] whose every group lies on sixteen levels, at most rounded to bfloat16 since; None of any other."""
    for levels, sizes in ((WHOLE, WHOLE_SIZES), (E2M1, E2M1_SIZES)):
        if not steps_of(in_groups(weight[:1]), levels, sizes):  # where most weights part
            continue
        parts = []
        for part in map(in_groups, weight.split(TOGETHER)):
            found = steps_of(part, levels, sizes)
            if not found:
                break
            parts.append(with_steps(part, *found, levels))
        else:
            return joined(parts)
    return None


def steps_of(groups: Tensor, levels: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
    """([out, groups] the sizes of steps, [out, groups] which of the levels is nothing) of groups that lie on such levels; None if
    some do not. sizes: how many steps the largest number of a group may be."""
    shape, groups = groups.shape[:2], groups.flatten(0, 1)
    largest = groups.abs().amax(1)
    steps, nothings = torch.zeros_like(largest), torch.zeros_like(largest)
    is_level = torch.zeros(2 * max(levels) + 1, dtype=torch.bool)
    is_level[torch.tensor(levels)] = True
    left = largest.nonzero().flatten()
    for size in sizes:
        own = groups[left]
        numbers = own * (size / largest[left])[:, None]
        wholes = numbers.round()
        nothing = torch.full_like(largest[left], E2M1[0]) if levels == E2M1 else -wholes.amin(1).clamp(max=0)
        places = (wholes + nothing[:, None]).clamp_(0, len(is_level) - 1).long()
        fits = ((numbers - wholes).abs() < ROUNDING).all(1) & is_level[places].all(1)
        fitting = left[fits]
        wholes, own = wholes[fits], own[fits]
        steps[fitting] = (wholes * own).sum(1) / wholes.square().sum(1)  # the least squares
        nothings[fitting] = nothing[fits]
        left = left[~fits]
        if len(left) == 0:
            return steps.view(shape), nothings.view(shape)
    return None


def with_steps(groups: Tensor, steps: Tensor, nothings: Tensor, levels: tuple[int, ...]) -> FourBits:
    """Groups [out, groups, GROUP] as the nearest of their levels."""
    scales = steps.amax(1)
    ratios = (steps / not_zero(scales)[:, None]).half()
    places = (groups / not_zero(ratios.float() * scales[:, None])[..., None]).round_() + nothings[..., None]
    nearest = nearest_codes(levels)
    codes = nearest[places.clamp_(0, len(nearest) - 1).long()]
    return FourBits(codes, ratios, nothings.to(torch.uint8), levels, scales)


def nearest_codes(levels: tuple[int, ...]) -> Tensor:
    """[levels] by its place the code of each level, or of one that is nearest."""
    places, own = torch.arange(max(levels) + 1), torch.tensor(levels)
    return (places[:, None] - own).abs().argmin(1).to(torch.uint8)


def in_groups(weight: Tensor) -> Tensor:
    """[out, groups, GROUP] float32, filled up with nothing."""
    weight = weight.float()
    return functional.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def not_zero(values: Tensor) -> Tensor:
    return values.clamp(min=torch.finfo(torch.float32).tiny)


def joined(parts: list[FourBits]) -> FourBits:
    """Of outputs, one part after the other."""
    tensors = zip(*((part.codes, part.ratios, part.nothings, part.scales) for part in parts), strict=True)
    codes, ratios, nothings, scales = map(torch.cat, tensors)
    return FourBits(codes, ratios, nothings, parts[0].levels, scales)
