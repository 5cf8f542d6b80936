"""The best token of each row on a CPU in one compiled function; needs numba. The twin is `speculate.sampler.best_token`."""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from eagle_rt.kernels.cpu.order import BLOCK, LEAST_ORDER, largest_order, order_of
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of, number_of


def best_token(logits: Tensor) -> Tensor:
    """[R] where the largest of each row of logits [R, V] is, the first of equal ones; and the first that is no number, if any is
    none."""
    use_torch_threads()
    tokens = torch.empty(len(logits), dtype=torch.int64)
    find_in_rows(array_of(logits), tokens.numpy())
    return tokens


@njit(cache=True, parallel=True)
def find_in_rows(logits: np.ndarray, tokens: np.ndarray) -> None:
    for r in prange(len(logits)):
        tokens[r] = first_of_largest(logits[r])


@njit(cache=True)
def first_of_largest(row: np.ndarray) -> int:
    largest, start = LEAST_ORDER, 0
    for first in range(0, len(row), BLOCK):
        order = largest_order(row[first : first + BLOCK])
        if order > largest:
            largest, start = order, first
    while order_of(number_of(row[start])) != largest:
        start += 1
    return start
