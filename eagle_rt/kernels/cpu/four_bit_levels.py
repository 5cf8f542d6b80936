"""Which four bits stand for the numbers of a weight, found by compiled functions; needs numba."""

import numpy as np
from numba import njit, prange

from eagle_rt.kernels.cpu.cut_rows import largest_of
from eagle_rt.kernels.cpu.vectors import FLAGS, HALF, ZERO, number_of

GROUP = 32
# By how much of a step numbers may be off: they and the largest, of up to sixteen steps, may have been rounded to bfloat16 since.
ROUNDING = np.float32(0.15)


@njit(cache=True, parallel=True)
def find_steps(
    weight: np.ndarray, is_level: np.ndarray, nothing: int, sizes: np.ndarray, steps: np.ndarray, nothings: np.ndarray
) -> bool:
    """Whether every group of weight [out, groups * GROUP] lies on levels, and if so fills steps and nothings [out, groups] with the
    sizes of their steps and which levels are nothing.

    is_level: of each whole number whether it is one. nothing: which level is; -1 where it may be any. sizes: how many steps the
    largest number of a group may be.
    """
    lies = np.zeros(len(weight), dtype=np.bool_)
    for row in prange(len(weight)):
        num_found, wholes = 0, np.empty(GROUP, dtype=np.float32)
        for group in range(steps.shape[1]):
            own = weight[row, group * GROUP : (group + 1) * GROUP]
            found, steps[row, group], nothings[row, group] = steps_of_group(own, is_level, nothing, sizes, wholes)
            num_found += found
            if not found:
                break
        lies[row] = num_found == steps.shape[1]
    return bool(lies.all())


@njit(cache=True, fastmath=set(FLAGS))
def steps_of_group(
    group: np.ndarray, is_level: np.ndarray, nothing: int, sizes: np.ndarray, wholes: np.ndarray
) -> tuple[bool, np.float32, np.float32]:
    """(whether it lies on levels, the size of its steps by least squares, which level is nothing). wholes: room for as many."""
    largest = largest_of(group)
    if largest == ZERO or not largest < np.inf:
        return largest == ZERO, ZERO, ZERO
    for size in sizes:
        factor = np.float32(size) / largest
        most_off, least, products, squares = ZERO, ZERO, ZERO, ZERO
        for k in range(GROUP):
            number = number_of(group[k]) * factor
            whole = np.floor(number + HALF)
            most_off = max(most_off, abs(number - whole))
            least = min(least, whole)
            products += whole * number_of(group[k])
            squares += whole * whole
            wholes[k] = whole
        if most_off >= ROUNDING:
            continue
        own_nothing = -int(least) if nothing < 0 else nothing
        num_levels = 0
        for k in range(GROUP):
            place = int(wholes[k]) + own_nothing
            num_levels += 0 <= place < len(is_level) and is_level[place]
        if num_levels == GROUP:
            return True, products / squares, np.float32(own_nothing)
    return False, ZERO, ZERO


@njit(cache=True, parallel=True)
def find_codes(weight: np.ndarray, steps: np.ndarray, nothings: np.ndarray, nearest: np.ndarray, codes: np.ndarray) -> None:
    """Fills codes as weight [out, groups * GROUP] with those of the nearest levels, which `nearest` has by level."""
    last = np.float32(len(nearest) - 1)
    for row in prange(len(weight)):
        for group in range(steps.shape[1]):
            step = steps[row, group]
            factor = np.float32(1) / step if step > ZERO else ZERO
            for k in range(group * GROUP, (group + 1) * GROUP):
                place = np.floor(number_of(weight[row, k]) * factor + HALF) + nothings[row, group]
                codes[row, k] = nearest[int(min(max(place, ZERO), last))]
