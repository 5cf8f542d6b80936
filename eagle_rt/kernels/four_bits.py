"""Weights of four bits: what each stands for, and how a weight becomes one; needs numba."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.cpu.four_bit_levels import GROUP, find_codes, find_steps
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of

# What four bits stand for: whole numbers, or those of E2M1 in halves, from the least on (OCP Microscaling Formats 1.0, 2023).
WHOLE = tuple(range(16))
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
# How many steps the largest of a group may be, the likeliest first, since quantizers have it at an end; and which level is nothing,
# where it is always the same.
LEVELS = (
    (WHOLE, (8, 7, 15, 6, 5, 9, 10, 11, 12, 13, 14, 16, 4, 3, 2, 1), None),
    (E2M1, (12, 8, 6, 4, 3, 2, 1), E2M1[0]),
)


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
    stored = stored_four_bits(weight)
    if stored:
        return stored
    weight = in_groups(weight)
    groups = weight.unflatten(1, (-1, GROUP))
    least, most = groups.amin(2).clamp(max=0).float(), groups.amax(2).clamp(min=0).float()
    steps = (most - least) / 15
    return with_steps(weight, steps, (-least / not_zero(steps)).round_(), WHOLE)


def stored_four_bits(weight: Tensor) -> FourBits | None:
    """Of a weight [out, in] whose every group lies on sixteen levels, at most rounded to bfloat16 since; None of any other."""
    use_torch_threads()
    weight = in_groups(weight)
    for levels, sizes, nothing in LEVELS:
        is_level = np.isin(np.arange(max(levels) + 1), levels)
        steps, nothings = (torch.empty(len(weight), weight.shape[1] // GROUP) for _ in range(2))
        options = is_level, -1 if nothing is None else nothing, np.array(sizes), steps.numpy(), nothings.numpy()
        # Where most weights part, the first output already does.
        if find_steps(array_of(weight[:1]), *options) and find_steps(array_of(weight), *options):
            return with_steps(weight, steps, nothings, levels)
    return None


def with_steps(weight: Tensor, steps: Tensor, nothings: Tensor, levels: tuple[int, ...]) -> FourBits:
    """Each number of a weight [out, groups * GROUP] as the nearest of the levels of its group."""
    scales = steps.amax(1)
    ratios = (steps / not_zero(scales)[:, None]).half()
    used, codes = ratios.float() * scales[:, None], torch.empty(weight.shape, dtype=torch.uint8)
    find_codes(array_of(weight), used.numpy(), nothings.numpy(), nearest_codes(levels), codes.numpy())
    return FourBits(codes.unflatten(1, (-1, GROUP)), ratios, nothings.to(torch.uint8), levels, scales)


def nearest_codes(levels: tuple[int, ...]) -> np.ndarray:
    """[levels] by its place the code of each level, or of one that is nearest."""
    places = np.arange(max(levels) + 1)
    return np.abs(places[:, None] - np.array(levels)).argmin(1).astype(np.uint8)


def in_groups(weight: Tensor) -> Tensor:
    """[out, groups * GROUP], filled up with nothing."""
    num_more = -weight.shape[1] % GROUP
    return functional.pad(weight, (0, num_more)) if num_more else weight.contiguous()


def not_zero(values: Tensor) -> Tensor:
    return values.clamp(min=torch.finfo(torch.float32).tiny)
