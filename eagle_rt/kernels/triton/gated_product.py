"""The products of gate and up and the gate itself in one kernel, for a few rows; the twin is `gated` of `skinny_product`."""

import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.skinny import Tile, tile_for
from eagle_rt.kernels.triton.common import rounded
from eagle_rt.kernels.triton.gated import swiglu
from eagle_rt.kernels.triton.skinny_product import sums_of, tiling


@triton.jit
def outs_of_tile(tile, size, BLOCK_OUT: tl.constexpr):
    """[BLOCK_OUT] of as many gates as ups, those of the same of `size` outputs; past the end it is the first ones again."""
    half: tl.constexpr = BLOCK_OUT // 2
    places = tl.arange(0, BLOCK_OUT)
    return (tile * half + places % half) % size + places // half * size


@triton.jit
def halves_of(sums, dtype: tl.constexpr):
    """(gates, ups) of the sums [BLOCK_OUT, rows] of a tile, rounded to `dtype`, in float32."""
    sums = rounded(sums, dtype).to(tl.float32)
    return tl.split(tl.permute(tl.reshape(sums, [2, sums.shape[0] // 2, sums.shape[1]]), (1, 2, 0)))


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
    columns = tl.program_id(0) * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2)
    outs = outs_of_tile(tl.program_id(0), size, BLOCK_OUT)
    gate, up = halves_of(sums_of(x, weight, outs, rows, is_row, in_size, BLOCK_IN, IN_FLOAT32), dtype)
    is_wanted = is_row[None, :] & (columns < size)[:, None]
    tl.store(output + rows[None, :].to(tl.int64) * size + columns[:, None], swiglu(gate, up, dtype), mask=is_wanted)


def gated_product(x: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    """[R, I] silu(gate) * up from x [R, in] and weight [2 * I, in]; rows, `in` and tile: see `skinny_product`."""
    (num_rows, in_size), size = x.shape, len(weight) // 2
    tile = tile or tile_for(len(weight))
    output = x.new_empty(num_rows, size)
    _gated_product[(triton.cdiv(2 * size, tile.outs),)](
        x.contiguous(), weight, output, num_rows, in_size, size, **tiling(num_rows, tile)
    )
    return output
