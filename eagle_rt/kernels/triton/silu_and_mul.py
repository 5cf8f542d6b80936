"""The gate of a SwiGLU layer in one kernel; the twin is `kernels/silu_and_mul.py`."""

import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded, rounded


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 numbers that were rounded to `dtype`, as such."""
    # The gate is rounded before it is multiplied, as it is where both are operators of their own.
    return rounded(rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32) * up, dtype)


@triton.jit
def _silu_and_mul(gate_and_up, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    gate = tl.load(gate_and_up + row * 2 * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + row * 2 * SIZE + SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output + row * SIZE + columns, gated(gate, up, output.dtype.element_ty), mask=is_column)


def silu_and_mul(gate_and_up: Tensor) -> Tensor:
    """[T, 2 * I] to [T, I]."""
    gate_and_up = gate_and_up.contiguous()
    num_rows, size = gate_and_up.shape[0], gate_and_up.shape[1] // 2
    output = gate_and_up.new_empty(num_rows, size)
    block = min(1024, padded(size))
    _silu_and_mul[(num_rows, triton.cdiv(size, block))](gate_and_up, output, SIZE=size, BLOCK=block)
    return output
