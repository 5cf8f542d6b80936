"""Gates of feed-forward parts on a CPU in one compiled function; needs numba. The twin is `kernels.gate`."""

import numpy as np
from numba import njit, prange
from torch import Tensor

from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import FLAGS, LOG2_E, ONE, ZERO, array_of, exp2, number_of, stored_as
from eagle_rt.kernels.gate import SWIGLU, Gate


def in_float32(gate: Gate) -> Gate:
    """As compiled functions take it."""
    return Gate(*(np.float32(number) for number in gate))  # pyright: ignore[reportArgumentType]


def gated(gate_and_up: Tensor, gate: Gate = SWIGLU) -> Tensor:
    """[T, 2 * I], gates and ups side by side, to [T, I]."""
    use_torch_threads()
    outputs = gate_and_up.new_empty(gate_and_up.shape[0], gate_and_up.shape[1] // 2)
    gate_rows(array_of(gate_and_up.contiguous()), in_float32(gate), array_of(outputs))
    return outputs


@njit(cache=True, parallel=True)
def gate_rows(gate_and_up: np.ndarray, gate: Gate, outputs: np.ndarray) -> None:
    """Fills outputs [T, I] from [T, 2 * I]. Both are an `array_of`."""
    for r in prange(outputs.shape[0]):
        gate_row(gate_and_up[r], gate, outputs[r])


# What may divide by zero, and raise, is compiled number by number.
@njit(cache=True, fastmath=set(FLAGS), error_model="numpy")
def gate_row(gate_and_up: np.ndarray, own: Gate, outputs: np.ndarray) -> None:
    size, alpha, limit, shift, cubic = len(outputs), own.alpha, own.limit, own.shift, own.cubic
    for i in range(size):
        gate, up = number_of(gate_and_up[i]), number_of(gate_and_up[size + i])
        gate = limit if gate > limit else gate  # what is no number stays so
        up = limit if up > limit else -limit if up < -limit else up
        steep = alpha * gate
        if cubic != ZERO:  # or what is infinite would be no number
            steep *= ONE + cubic * gate * gate
        power = exp2(-abs(steep) * LOG2_E)
        share = (ONE if gate >= ZERO else power) / (ONE + power)
        outputs[i] = stored_as(gate * share * (up + shift), outputs)
