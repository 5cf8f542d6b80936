"""The products of gate and up and the gate itself in one kernel, for a few rows; the twin is `silu_and_mul` of `wide_product`."""

import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import rounded
from eagle_rt.kernels.triton.silu_and_mul import gated
from eagle_rt.kernels.triton.wide_product import BLOCK_OUT, sums_of, tiling


@triton.jit
def halves_of(
    x,
    weight,  # [2 * size, in_size], gates first
    bias,  # [2 * size], read if HAS_BIAS
    tile,
    rows,
    is_row,
    in_size,
    size,
    dtype: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """(the columns of a tile [BLOCK_OUT / 2], its gates [columns, rows], and its ups), rounded to `dtype`, in float32; of rows as
    `sums_of` takes them."""
    half: tl.constexpr = BLOCK_OUT // 2
    start, places = tile * half, tl.arange(0, BLOCK_OUT)
    # A tile is of as many gates as ups, those of the same outputs; past the end it reads the first ones again.
    outs = (start + places % half) % size + places // half * size
    sums = sums_of(x, weight, outs, rows, is_row, in_size, BLOCK_IN, IN_FLOAT32)
    if HAS_BIAS:
        sums += tl.load(bias + outs).to(tl.float32)[:, None]
    sums = rounded(sums, dtype).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(sums, [2, half, rows.shape[0]]), (1, 2, 0)))
    return start + tl.arange(0, half), gate, up


@triton.jit(do_not_specialize=["num_rows"])
def _gated_product(
    x,  # [num_rows, in_size]
    weight,  # [2 * size, in_size], gates first
    output,  # [num_rows, size]
    num_rows,
    in_size,
    size,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    dtype = output.dtype.element_ty
    columns, gate, up = halves_of(
        x, weight, weight, tl.program_id(0), rows, is_row, in_size, size, dtype, False, BLOCK_OUT, BLOCK_IN, IN_FLOAT32
    )
    is_wanted = is_row[None, :] & (columns < size)[:, None]
    tl.store(output + rows[None, :].to(tl.int64) * size + columns[:, None], gated(gate, up, dtype), mask=is_wanted)


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """[R, I] silu(gate) * up from x [R, in] of at most WIDE_ROWS rows and weight [2 * I, in], `in` a multiple of BLOCK_IN."""
    num_rows, in_size = x.shape
    size = len(weight) // 2
    output = x.new_empty(num_rows, size)
    _gated_product[(triton.cdiv(size, BLOCK_OUT // 2),)](
        x.contiguous(), weight, output, num_rows, in_size, size, **tiling(num_rows)
    )
    return output
