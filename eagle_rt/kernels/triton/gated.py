"""The gate of a feed-forward part in one kernel; the twin is `kernels/gate.py`."""

import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.gate import SWIGLU, Gate
from eagle_rt.kernels.triton.common import padded, rounded


@triton.jit
def swiglu(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 numbers that were rounded to `dtype`, as such."""
    # The gate is rounded before it is multiplied, as it is where both are operators of their own.
    return rounded(rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32) * up, dtype)


@triton.jit
def gate_of(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, CUBIC: tl.constexpr, dtype: tl.constexpr):
    """The same of any gate; what is no number stays so."""
    if ALPHA == 1.0 and float("inf") == LIMIT and SHIFT == 0.0 and CUBIC == 0.0:
        values = swiglu(gate, up, dtype)
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        steep = ALPHA * gate
        if CUBIC != 0.0:
            steep *= 1.0 + CUBIC * gate * gate
        values = rounded(gate / (1.0 + tl.exp(-steep)) * (up + SHIFT), dtype)
    return values


@triton.jit
def _gated(
    gate_and_up,
    output,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    CUBIC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    gate = tl.load(gate_and_up + row * 2 * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + row * 2 * SIZE + SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    values = gate_of(gate, up, ALPHA, LIMIT, SHIFT, CUBIC, output.dtype.element_ty)
    tl.store(output + row * SIZE + columns, values, mask=is_column)


def constants_of(gate: Gate) -> dict[str, float]:
    """As kernels take them."""
    return {name.upper(): value for name, value in gate._asdict().items()}


def gated(gate_and_up: Tensor, gate: Gate = SWIGLU) -> Tensor:
    """[T, 2 * I] to [T, I]."""
    gate_and_up = gate_and_up.contiguous()
    num_rows, size = gate_and_up.shape[0], gate_and_up.shape[1] // 2
    output = gate_and_up.new_empty(num_rows, size)
    block = min(1024, padded(size))
    _gated[(num_rows, triton.cdiv(size, block))](gate_and_up, output, SIZE=size, BLOCK=block, **constants_of(gate))
    return output
