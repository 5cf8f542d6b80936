"""The gate of a SwiGLU layer on a CPU in one compiled function; needs numba. The twin is `kernels.silu_and_mul`."""

import numpy as np
from numba import njit, prange
from torch import Tensor

from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import FLAGS, LOG2_E, ONE, ZERO, array_of, exp2, number_of, stored_as


def silu_and_mul(gate_and_up: Tensor) -> Tensor:
    """silu(gate) * up, from both halves side by side: [T, 2 * I] to [T, I]."""
    use_torch_threads()
    gated = gate_and_up.new_empty(gate_and_up.shape[0], gate_and_up.shape[1] // 2)
    gate_rows(array_of(gate_and_up.contiguous()), array_of(gated))
    return gated


@njit(cache=True, parallel=True)
def gate_rows(gate_and_up: np.ndarray, gated: np.ndarray) -> None:
    for r in prange(gated.shape[0]):
        gate_row(gate_and_up[r], gated[r])


# What may divide by zero, and raise, is compiled number by number.
@njit(cache=True, fastmath=set(FLAGS), error_model="numpy")
def gate_row(gate_and_up: np.ndarray, gated: np.ndarray) -> None:
    size = len(gated)
    for i in range(size):
        gate = number_of(gate_and_up[i])
        power = exp2(-abs(gate) * LOG2_E)
        share = (ONE if gate >= ZERO else power) / (ONE + power)
        gated[i] = stored_as(gate * share * number_of(gate_and_up[size + i]), gated)
