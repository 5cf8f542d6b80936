"""Adding and normalising rows on a CPU in one compiled function; needs numba. The twin is `RMSNorm`."""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import FLAGS, ONE, ZERO, array_of, number_of, stored_as


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, the norm of that) for [R, H]; delta None adds nothing, and x comes back."""
    use_torch_threads()
    x = x.contiguous()
    total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    if delta is not None:
        add_rows(array_of(x), array_of(delta.contiguous()), array_of(total))
    norm_rows(array_of(total), array_of(weight), np.float32(eps), array_of(normed))
    return total, normed


@njit(cache=True)
def add_rows(x: np.ndarray, delta: np.ndarray, total: np.ndarray) -> None:
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            total[r, i] = stored_as(number_of(x[r, i]) + number_of(delta[r, i]), total)


@njit(cache=True, parallel=True)
def norm_rows(x: np.ndarray, weight: np.ndarray, eps: np.float32, normed: np.ndarray) -> None:
    for r in prange(x.shape[0]):
        norm_row(x[r], weight, eps, normed[r])


@njit(cache=True, fastmath=set(FLAGS))
def norm_row(row: np.ndarray, weight: np.ndarray, eps: np.float32, normed: np.ndarray) -> None:
    scale = scale_of(row, eps)
    for i in range(len(row)):
        normed[i] = stored_as(number_of(row[i]) * scale * number_of(weight[i]), normed)


@njit(cache=True, fastmath=set(FLAGS), error_model="numpy")
def scale_of(row: np.ndarray, eps: np.float32) -> np.float32:
    """1 / sqrt(mean(row^2) + eps)."""
    squares = ZERO
    # Over elements, one by one: many at a time would be added in an order that depends on where this is compiled into.
    for element in row:
        squares += number_of(element) * number_of(element)
    return ONE / np.sqrt(squares / np.float32(len(row)) + eps)
