"""How large the steps of a weight of eight bits are; the twin is in `kernels.eight_bits`."""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from eagle_rt.kernels import eight_bits
from eagle_rt.kernels.cpu.cut_rows import largest_of, number_of_bits, size_bits
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import FLAGS, HALF, ZERO, array_of, number_of

EXPONENT, HALF_PLACE = np.int32(eight_bits.EXPONENT), np.float32(eight_bits.HALF_PLACE)
LEAST, MOST = np.float32(eight_bits.LEAST), np.float32(eight_bits.MOST)


def find_steps(weight: Tensor, sizes: tuple[int, ...], certain: tuple[int, ...], told_by: int, slack: float) -> Tensor | None:
    """[out] how large the steps of a weight [out, in] are, if all its numbers are whole steps of their output; the others: see
    `kernels.eight_bits`."""
    use_torch_threads()
    steps = torch.empty(len(weight))
    options = np.array(sizes), np.array(certain), told_by, np.float32(slack)
    return steps if _find_steps(array_of(weight), *options, steps.numpy()) else None


@njit(cache=True, parallel=True, error_model="numpy")
def _find_steps(
    weight: np.ndarray, sizes: np.ndarray, certain: np.ndarray, told_by: int, slack: np.float32, steps: np.ndarray
) -> bool:
    lies = np.zeros(len(weight), dtype=np.bool_)
    for row in prange(len(weight)):
        lies[row], steps[row] = step_of_row(weight[row], sizes, certain, told_by, slack)
    return bool(lies.all())


@njit(cache=True, fastmath=set(FLAGS), error_model="numpy")
def step_of_row(
    row: np.ndarray, sizes: np.ndarray, certain: np.ndarray, told_by: int, slack: np.float32
) -> tuple[bool, np.float32]:
    largest = largest_of(row)
    if largest == ZERO or not largest < np.inf:
        return largest == ZERO, ZERO
    for size in sizes:
        step = largest / np.float32(size)
        for most_steps in certain:
            least, most, _, _ = bounds_of_step(row[:told_by], step, np.float32(most_steps))
            if most < np.inf:
                step = (least + most) * HALF
        least, most, is_whole, nearest = bounds_of_step(row, step, np.float32(np.inf))
        if is_whole and least <= most * slack:
            return True, min(max(nearest, least), most)
    return False, ZERO


@njit(cache=True, fastmath=set(FLAGS), error_model="numpy")
def bounds_of_step(row: np.ndarray, step: np.float32, most_steps: np.float32) -> tuple[np.float32, np.float32, bool, np.float32]:
    """(the least and the largest size of steps that numbers of up to so many leave, whether all are whole steps of eight bits, the
    size that is nearest to them)."""
    least, most, products, squares, is_whole = ZERO, np.float32(np.inf), ZERO, ZERO, True
    factor = np.float32(1) / step
    for k in range(len(row)):
        number = number_of(row[k])
        whole = np.floor(number * factor + HALF)
        count, size = abs(whole), abs(number)
        is_whole &= (whole >= LEAST) & (whole <= MOST) & ((whole != ZERO) | (number == ZERO))
        products += whole * number
        squares += whole * whole
        if (count > ZERO) & (count <= most_steps):
            half = number_of_bits(np.int32(size_bits(number) & EXPONENT)) * HALF_PLACE
            least = max(least, (size - half) / count)
            most = min(most, (size + half) / count)
    return least, most, is_whole, products / squares
