"""Weights of whole numbers of eight bits, each output's in steps of its own, and how a weight becomes one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_rt.kernels.four_bits import is_compiled, not_zero, rows_at_once

# Of how many steps the largest of an output may be, the likeliest first, since quantizers have it at an end.
SIZES = (127, 128, *range(126, 63, -1))
LEAST, MOST = -128, 127
# Outputs of fewer inputs may lie on levels by chance. The size of steps is told by some inputs, first by numbers of few steps, of
# which it is certain how many, then by larger ones too.
LEAST_INPUTS, TOLD_BY, CERTAIN = 64, 1024, (48, 96, 128)
# Of a float32 the bits that say between which powers of two it lies, and half of bfloat16's last place beside the lower of them.
EXPONENT, HALF_PLACE = 0x7F800000, 2**-8
# Bounds may seem to have changed sides by rounding.
SLACK = 1 + 2**-20


@dataclass(frozen=True)
class EightBits:
    """W [out, in] = numbers [out, in] int8 * scales [out] float32."""

    numbers: Tensor
    scales: Tensor


def rounded_to_eight_bits(weight: Tensor) -> EightBits:
    """127 steps are the largest of an output."""
    return with_steps(weight, weight.abs().amax(1).float() / MOST)


def stored_eight_bits(weight: Tensor) -> EightBits | None:
    """Of a weight [out, in] whose numbers are whole steps of their output, at most rounded to bfloat16 since; None of any other."""
    # Where most weights part, the first output already does.
    if weight.shape[1] < LEAST_INPUTS or find_steps(weight[:1]) is None:
        return None
    steps = find_steps(weight)
    return None if steps is None else with_steps(weight, steps)


def with_steps(weight: Tensor, steps: Tensor) -> EightBits:
    numbers, size = torch.empty(weight.shape, dtype=torch.int8, device=weight.device), rows_at_once(weight)
    for own, rows, sizes in zip(*(whole.split(size) for whole in (numbers, weight, not_zero(steps))), strict=True):
        own.copy_((rows.float() / sizes[:, None]).round_().clamp_(LEAST, MOST))
    return EightBits(numbers, steps)


def find_steps(weight: Tensor) -> Tensor | None:
    """[out] how large the steps of a weight [out, in] are, if all its numbers are whole steps of their output."""
    if is_compiled(weight):
        from eagle_rt.kernels.cpu import eight_bit_levels  # not everywhere is numba installed

        return eight_bit_levels.find_steps(weight, SIZES, CERTAIN, TOLD_BY, SLACK)
    found = []
    for rows in weight.split(rows_at_once(weight)):
        are_whole, steps = steps_of_rows(rows.float())
        if not are_whole:
            return None
        found.append(steps)
    return torch.cat(found)


def steps_of_rows(rows: Tensor) -> tuple[bool, Tensor]:
    """(whether all numbers of rows [R, in] are whole steps, [R] how large these are)."""
    largest, told_by = rows.abs().amax(1), rows[:, :TOLD_BY]
    found, is_found = torch.zeros_like(largest), largest == 0
    for size in SIZES:
        steps = largest / size
        for most_steps in CERTAIN:
            wholes = wholes_of(told_by, steps)
            least, most = bounds_of_steps(told_by, wholes.where(wholes.abs() <= most_steps, 0))
            steps = steps.where(most == torch.inf, (least + most) / 2)
        wholes = wholes_of(rows, steps)
        least, most = bounds_of_steps(rows, wholes)
        is_whole = ((wholes >= LEAST) & (wholes <= MOST) & ((wholes != 0) | (rows == 0))).all(1) & (least <= most * SLACK)
        # Of all sizes that rounding leaves, the one that is nearest to the numbers: exact if they were not rounded.
        nearest = ((wholes * rows).sum(1) / (wholes * wholes).sum(1)).clamp(least, most)
        found, is_found = torch.where(is_whole & ~is_found, nearest, found), is_found | is_whole
        if is_found.all():
            break
    return bool(is_found.all()), found


def wholes_of(rows: Tensor, steps: Tensor) -> Tensor:
    return (rows * (1 / steps)[:, None] + 0.5).floor_()


def bounds_of_steps(rows: Tensor, wholes: Tensor) -> tuple[Tensor, Tensor]:
    """[R] between which sizes steps are of which so many, rounded to bfloat16, are the numbers of rows; 0 of them tell nothing."""
    sizes, counts = rows.abs(), wholes.abs()
    half = (rows.view(torch.int32) & EXPONENT).view(torch.float32) * HALF_PLACE
    least, most = (sizes - half) / counts, (sizes + half) / counts
    return least.where(counts > 0, 0).amax(1), most.where(counts > 0, torch.inf).amin(1)
