"""Adding and normalising rows on a CPU in one compiled function; needs numba. The twin is `RMSNorm`."""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from eagle_rt.kernels.cpu.vectors import FLAGS, ONE, ZERO, array_of, number_of, stored_as


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, the norm of that) for [R, H]; delta None adds nothing, and x comes back."""
    total, normed = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    if delta is not None:
        add_rows(array_of(x), array_of(delta), array_of(total))
    norm_rows(array_of(total), array_of(weight), np.float32(eps), array_of(normed))
    return total, normed


@njit(cache=True)
def add_rows(x: np.ndarray, delta: np.ndarray, total: np.ndarray) -> None:
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            total[r, i] = stored_as(number_of(x[r, i]) + number_of(delta[r, i]), total)


@njit(cache=True, fastmath=set(FLAGS))
def norm_rows(x: np.ndarray, weight: np.ndarray, eps: np.float32, normed: np.ndarray) -> None:
    for r in range(x.shape[0]):
        scale = scale_of(x[r], eps)
        for i in range(x.shape[1]):
            normed[r, i] = stored_as(number_of(x[r, i]) * scale * number_of(weight[i]), normed)


@njit(cache=True, fastmath=set(FLAGS))
def scale_of(row: np.ndarray, eps: np.float32) -> np.float32:
    """1 / sqrt(mean(row^2) + eps)."""
    squares = ZERO
    for element in row:
        squares += number_of(element) * number_of(element)
    return ONE / np.sqrt(squares / np.float32(len(row)) + eps)
