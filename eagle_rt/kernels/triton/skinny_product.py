"""Products of a few rows with a weight of many outputs, which are as fast as memory gives the weight; the twin is torch's.

Within a step this takes 6 to 8 % less than cuBLAS on an H100 for 128,000 outputs, up to 3 % less for the 29,000 of a gate, and with
a few rows 2 to 8 % less for 4000 to 6000.
"""

import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.skinny import Tile, tile_for
from eagle_rt.kernels.triton.common import IS_INTERPRETED, padded, rounded


@triton.jit
def sums_of(x, weight, outs, rows, is_row, in_size, BLOCK_IN: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """[outs, rows] float32 products of rows of x [.., in_size], where is_row, and rows `outs` of weight [out_size, in_size]."""
    ins = tl.arange(0, BLOCK_IN)
    weights = weight + outs.to(tl.int64)[:, None] * in_size + ins[None, :]
    inputs = x + rows[None, :] * in_size + ins[:, None]
    # The weight on the left: its many outputs are what the matrix units want as rows.
    sums = tl.zeros([outs.shape[0], rows.shape[0]], tl.float32)
    for block in range(0, in_size, BLOCK_IN):
        w = tl.load(weights + block, eviction_policy="evict_first")
        own = tl.load(inputs + block, mask=is_row[None, :], other=0.0)
        if IN_FLOAT32:
            w, own = w.to(tl.float32), own.to(tl.float32)
        sums = tl.dot(w, own, sums)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_product(
    x,  # [num_rows, in_size]
    weight,  # [out_size, in_size]
    output,  # [num_rows, out_size]
    num_rows,
    in_size,
    out_size,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    outs, rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    # Tiles past the end read the first outputs again, so that no load of the weight is masked.
    sums = sums_of(x, weight, outs % out_size, rows, is_row, in_size, BLOCK_IN, IN_FLOAT32)
    places = output + rows[None, :].to(tl.int64) * out_size + outs[:, None]
    is_wanted = is_row[None, :] & (outs < out_size)[:, None]
    tl.store(places, rounded(sums, output.dtype.element_ty), mask=is_wanted)


def tiling(num_rows: int, tile: Tile) -> dict[str, int]:
    """How products of so many rows are cut, and run."""
    blocks = {"BLOCK_ROWS": padded(num_rows, least=16), "BLOCK_OUT": tile.outs, "BLOCK_IN": tile.ins}
    return {**blocks, "IN_FLOAT32": IS_INTERPRETED, "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def skinny_product(x: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    """[R, out] from x [R, in] and weight [out, in], of as many rows at most as its tile is for and `in` a multiple of the tile's.
    tile: other than `tile_for` says."""
    (num_rows, in_size), out_size = x.shape, len(weight)
    tile = tile or tile_for(out_size)
    output = x.new_empty(num_rows, out_size)
    _skinny_product[(triton.cdiv(out_size, tile.outs),)](
        x.contiguous(), weight, output, num_rows, in_size, out_size, **tiling(num_rows, tile)
    )
    return output
