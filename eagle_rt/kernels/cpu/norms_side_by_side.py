"""Two norms side by side on a CPU in one compiled function; needs numba. The twin is `rms_norm.norms_side_by_side`."""

import numpy as np
from numba import njit, prange
from torch import Tensor

from eagle_rt.kernels.cpu.add_rms_norm import norm_row
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of


def norms_side_by_side(x: Tensor, x_weight: Tensor, x_eps: float, y: Tensor, y_weight: Tensor, y_eps: float) -> Tensor:
    """[R, H + J] the norms of x [R, H] and of y [R, J]."""
    use_torch_threads()
    outputs = x.new_empty(len(x), x.shape[1] + y.shape[1])
    first, second = (array_of(x.contiguous()), array_of(x_weight)), (array_of(y.contiguous()), array_of(y_weight))
    norm_both(*first, np.float32(x_eps), *second, np.float32(y_eps), array_of(outputs))
    return outputs


@njit(cache=True, parallel=True)
def norm_both(
    x: np.ndarray,
    x_weight: np.ndarray,
    x_eps: np.float32,
    y: np.ndarray,
    y_weight: np.ndarray,
    y_eps: np.float32,
    outputs: np.ndarray,
) -> None:
    size = x.shape[1]
    for r in prange(len(x)):
        norm_row(x[r], x_weight, x_eps, outputs[r, :size])
        norm_row(y[r], y_weight, y_eps, outputs[r, size:])
