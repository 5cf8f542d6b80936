"""Which four bits stand for the numbers of a weight; the twins are in `kernels.four_bits`."""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from eagle_rt.kernels.cpu.cut_rows import largest_of
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import FLAGS, HALF, ZERO, array_of, number_of


def find_steps(
    weight: Tensor, group: int, levels: tuple[int, ...], sizes: tuple[int, ...], nothing: int | None, rounding: float
) -> tuple[Tensor, Tensor] | None:
    """(how large the steps are, which level is nothing) [out, groups], if every group of weight [out, groups * group] lies on
    levels, off by so much of a step at most."""
    use_torch_threads()
    steps, nothings = (torch.empty(len(weight), weight.shape[1] // group) for _ in range(2))
    is_level = np.isin(np.arange(max(levels) + 1), levels)
    options = is_level, -1 if nothing is None else nothing, np.array(sizes), np.float32(rounding)
    return (steps, nothings) if _find_steps(array_of(weight), *options, steps.numpy(), nothings.numpy()) else None


def find_codes(weight: Tensor, steps: Tensor, nothings: Tensor, nearest: Tensor) -> Tensor:
    """uint8 as weight [out, inputs of all groups]: those of the nearest levels, which `nearest` has by level."""
    use_torch_threads()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    _find_codes(array_of(weight), steps.numpy(), nothings.numpy(), nearest.numpy(), codes.numpy())
    return codes


@njit(cache=True, parallel=True)
def _find_steps(
    weight: np.ndarray,
    is_level: np.ndarray,
    nothing: int,
    sizes: np.ndarray,
    rounding: np.float32,
    steps: np.ndarray,
    nothings: np.ndarray,
) -> bool:
    """Whether all groups lie on levels, and if so fills steps and nothings.

    is_level: of each whole number whether it is one. nothing: which level is; -1 where it may be any. sizes: how many steps the
    largest number of a group may be.
    """
    lies = np.zeros(len(weight), dtype=np.bool_)
    size = weight.shape[1] // steps.shape[1]
    for row in prange(len(weight)):
        num_found, wholes = 0, np.empty(size, dtype=np.float32)
        for group in range(steps.shape[1]):
            own = weight[row, group * size : (group + 1) * size]
            found, steps[row, group], nothings[row, group] = steps_of_group(own, is_level, nothing, sizes, rounding, wholes)
            num_found += found
            if not found:
                break
        lies[row] = num_found == steps.shape[1]
    return bool(lies.all())


@njit(cache=True, fastmath=set(FLAGS))
def steps_of_group(
    group: np.ndarray, is_level: np.ndarray, nothing: int, sizes: np.ndarray, rounding: np.float32, wholes: np.ndarray
) -> tuple[bool, np.float32, np.float32]:
    """(whether it lies on levels, the size of its steps by least squares, which level is nothing). wholes: room for as many."""
    largest = largest_of(group)
    if largest == ZERO or not largest < np.inf:
        return largest == ZERO, ZERO, ZERO
    for size in sizes:
        factor = np.float32(size) / largest
        most_off, least = ZERO, ZERO
        for k in range(len(group)):
            number = number_of(group[k]) * factor
            whole = np.floor(number + HALF)
            most_off = max(most_off, abs(number - whole))
            least = min(least, whole)
            wholes[k] = whole
        if most_off >= rounding:
            continue
        own_nothing = -int(least) if nothing < 0 else nothing
        num_levels = 0
        for k in range(len(group)):
            place = int(wholes[k]) + own_nothing
            num_levels += 0 <= place < len(is_level) and is_level[place]
        if num_levels == len(group):
            products, squares = ZERO, ZERO
            for k in range(len(group)):
                products += wholes[k] * number_of(group[k])
                squares += wholes[k] * wholes[k]
            return True, products / squares, np.float32(own_nothing)
    return False, ZERO, ZERO


@njit(cache=True, parallel=True)
def _find_codes(weight: np.ndarray, steps: np.ndarray, nothings: np.ndarray, nearest: np.ndarray, codes: np.ndarray) -> None:
    last, size = np.float32(len(nearest) - 1), weight.shape[1] // steps.shape[1]
    for row in prange(len(weight)):
        for group in range(steps.shape[1]):
            step = steps[row, group]
            factor = np.float32(1) / step if step > ZERO else ZERO
            for k in range(group * size, (group + 1) * size):
                place = np.floor(number_of(weight[row, k]) * factor + HALF) + nothings[row, group]
                codes[row, k] = nearest[int(min(max(place, ZERO), last))]
