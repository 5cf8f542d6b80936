"""Weights of four bits: what each stands for, and how a weight becomes one."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.dispatch import HAS_NUMBA

# So many inputs side by side share the size of their steps and which level is nothing, or more of them do.
GROUP = 32
# By how much of a step numbers may be off: they and the largest, of up to sixteen steps, may have been rounded to bfloat16 since.
ROUNDING = 0.15
# The twins look at so many numbers at a time.
AT_ONCE = 1 << 24
# What four bits stand for: whole numbers, or those of E2M1 in halves, from the least on (OCP Microscaling Formats 1.0, 2023).
WHOLE = tuple(range(16))
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)


@dataclass(frozen=True)
class Levels:
    """One way to store a weight. sizes: how many steps the largest of a group may be, the likeliest first, since quantizers have it
    at an end; nothing: which level is nothing, where it is always the same."""

    numbers: tuple[int, ...]
    sizes: tuple[int, ...]
    nothing: int | None


LEVELS = (
    Levels(WHOLE, (8, 7, 15, 6, 5, 9, 10, 11, 12, 13, 14, 16, 4, 3, 2, 1), None),
    Levels(E2M1, (12, 8, 6, 4, 3, 2, 1), E2M1[0]),
)


@dataclass(frozen=True)
class FourBits:
    """W [out, in], of which a number in a group is scales * ratios * (levels[its code] - nothings).

    codes: [out, groups, of a group] uint8 below 16; ratios, nothings: [out, groups] float16 and uint8; levels: sixteen; scales:
    [out] float32.
    """

    codes: Tensor
    ratios: Tensor
    nothings: Tensor
    levels: tuple[int, ...]
    scales: Tensor

    def widened(self) -> Tensor:
        """[out, inputs of all groups] float32."""
        levels = torch.tensor(self.levels, dtype=torch.float32, device=self.codes.device)[self.codes.long()]
        steps = self.ratios.float() * self.scales[:, None]
        return ((levels - self.nothings[..., None].float()) * steps[..., None]).flatten(1)


def in_four_bits(weight: Tensor) -> FourBits:
    """A weight [out, in] in the four bits that it was stored in, if it was, or else rounded."""
    return stored_four_bits(weight) or rounded_to_four_bits(weight)


def rounded_to_four_bits(weight: Tensor) -> FourBits:
    """A weight [out, in] as the nearest of sixteen whole numbers of steps that reach from the least of its group, or 0, to the
    largest."""
    weight = in_groups(weight, GROUP)
    groups = weight.unflatten(1, (-1, GROUP))
    least, most = groups.amin(2).clamp(max=0).float(), groups.amax(2).clamp(min=0).float()
    steps = (most - least) / 15
    return with_steps(weight, steps, (-least / not_zero(steps)).round_(), WHOLE)


def stored_four_bits(weight: Tensor, group: int = GROUP) -> FourBits | None:
    """Of a weight [out, in] whose every group of so many inputs lies on sixteen levels, at most rounded to bfloat16 since; None of
    any other."""
    weight = in_groups(weight, group)
    for levels in LEVELS:
        # Where most weights part, the first output already does.
        if find_steps(weight[:1], levels, group) and (found := find_steps(weight, levels, group)):
            return with_steps(weight, *found, levels.numbers)
    return None


def with_steps(weight: Tensor, steps: Tensor, nothings: Tensor, levels: tuple[int, ...]) -> FourBits:
    """Each number of a weight [out, inputs of all groups] as the nearest of the levels of its group."""
    scales = steps.amax(1)
    ratios = (steps / not_zero(scales)[:, None]).half()
    codes = find_codes(weight, ratios.float() * scales[:, None], nothings, levels)
    return FourBits(codes.unflatten(1, (steps.shape[1], -1)), ratios, nothings.to(torch.uint8), levels, scales)


def find_steps(weight: Tensor, levels: Levels, group: int) -> tuple[Tensor, Tensor] | None:
    """(how large the steps are, which level is nothing) [out, groups] float32, if every group of a weight lies on levels."""
    if is_compiled(weight):
        from eagle_rt.kernels.cpu import four_bit_levels  # not everywhere is numba installed

        return four_bit_levels.find_steps(weight, group, levels.numbers, levels.sizes, levels.nothing, ROUNDING)
    parts = [steps_of_groups(rows.unflatten(1, (-1, group)), levels) for rows in weight.split(rows_at_once(weight))]
    if not all(lies for lies, _, _ in parts):
        return None
    return torch.cat([steps for _, steps, _ in parts]), torch.cat([nothings for _, _, nothings in parts])


def steps_of_groups(groups: Tensor, levels: Levels) -> tuple[bool, Tensor, Tensor]:
    """(whether all lie on levels, the sizes of their steps by least squares, which levels are nothing) of groups [out, groups, of a
    group]."""
    groups = groups.float()
    is_level = torch.zeros(max(levels.numbers) + 1, dtype=torch.bool, device=groups.device)
    is_level[list(levels.numbers)] = True
    largest = groups.abs().amax(2, keepdim=True)
    is_found = largest[..., 0] == 0
    steps, nothings = (torch.zeros_like(groups[..., 0]) for _ in range(2))
    for size in levels.sizes:
        wholes = (groups * (size / largest)).add_(0.5).floor_()
        most_off = (groups * (size / largest)).sub_(wholes).abs_().amax(2)
        own_nothings = -wholes.amin(2).clamp(max=0) if levels.nothing is None else torch.full_like(steps, levels.nothing)
        places = wholes + own_nothings[..., None]
        is_inside = places < len(is_level)
        lies = (most_off < ROUNDING) & (is_inside & is_level[torch.where(is_inside, places, 0).long()]).all(2) & ~is_found
        own_steps = (wholes * groups).sum(2) / (wholes * wholes).sum(2)
        steps, nothings = torch.where(lies, own_steps, steps), torch.where(lies, own_nothings, nothings)
        is_found |= lies
    return bool(is_found.all()), steps, nothings


def find_codes(weight: Tensor, steps: Tensor, nothings: Tensor, levels: tuple[int, ...]) -> Tensor:
    """uint8 as weight [out, inputs of all groups]: those of the nearest levels."""
    nearest = nearest_codes(levels)
    if is_compiled(weight):
        from eagle_rt.kernels.cpu import four_bit_levels  # not everywhere is numba installed

        return four_bit_levels.find_codes(weight, steps, nothings, nearest)
    codes, by_place = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device), nearest.to(weight.device)
    size = rows_at_once(weight)
    for own, rows, own_steps, own_nothings in zip(*(whole.split(size) for whole in (codes, weight, steps, nothings)), strict=True):
        groups = rows.float().unflatten(1, (steps.shape[1], -1))
        factors = torch.where(own_steps > 0, 1 / own_steps, 0)[..., None]
        places = (groups * factors).add_(0.5).floor_().add_(own_nothings[..., None])
        own.copy_(by_place[places.clamp_(0, len(nearest) - 1).long()].flatten(1))
    return codes


def nearest_codes(levels: tuple[int, ...]) -> Tensor:
    """[levels] uint8 by its place the code of each level, or of one that is nearest."""
    places = torch.arange(max(levels) + 1)
    return (places[:, None] - torch.tensor(levels)).abs().argmin(1).to(torch.uint8)


def is_compiled(weight: Tensor) -> bool:
    """Whether compiled functions find the levels of this weight; their twins do elsewhere."""
    return HAS_NUMBA and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


def rows_at_once(weight: Tensor) -> int:
    return max(1, AT_ONCE // weight.shape[1])


def in_groups(weight: Tensor, group: int) -> Tensor:
    """[out, inputs of all groups], filled up with nothing."""
    num_more = -weight.shape[1] % group
    return functional.pad(weight, (0, num_more)) if num_more else weight.contiguous()


def not_zero(values: Tensor) -> Tensor:
    return values.clamp(min=torch.finfo(torch.float32).tiny)
