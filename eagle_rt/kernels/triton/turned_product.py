"""Queries, keys and values of a few rows, turned and written to the cache by the kernel that makes them; the twin is
`rotate_and_write` of `skinny_product`, for heads without norms of their own."""

import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.skinny import TURNED_TILE
from eagle_rt.kernels.triton.common import rounded
from eagle_rt.kernels.triton.gated_product import halves_of
from eagle_rt.kernels.triton.rotate_and_write import turned
from eagle_rt.kernels.triton.skinny_product import sums_of, tiling


@triton.jit(do_not_specialize=["num_rows"])
def _turned_product(
    x,  # [num_rows, in_size]
    weight,  # [(NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF, in_size]
    bias,  # of as many outputs, read if HAS_BIAS
    cos,  # [num_rows, 2 * HALF]
    sin,  # [num_rows, 2 * HALF]
    slots,  # [num_rows] int64
    queries,  # [num_rows, NUM_HEADS, 2 * HALF]
    storage,  # [S, 2, NUM_KV_HEADS, 2 * HALF]
    num_rows,
    in_size,
    stride_slot,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    # A tile is of some pairs of one head: of as many outputs in its first half as in its second.
    num_pairs: tl.constexpr = BLOCK_OUT // 2
    tiles_a_head: tl.constexpr = HALF // num_pairs
    head, first_pair = tl.program_id(0) // tiles_a_head, tl.program_id(0) % tiles_a_head * num_pairs
    places, rows = tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_ROWS)
    outs = head * 2 * HALF + first_pair + places % num_pairs + places // num_pairs * HALF
    is_row = rows < num_rows
    sums = sums_of(x, weight, outs, rows, is_row, in_size, BLOCK_IN, IN_FLOAT32)
    if HAS_BIAS:
        sums += tl.load(bias + outs).to(tl.float32)[:, None]
    dtype: tl.constexpr = queries.dtype.element_ty
    first, second = halves_of(sums, dtype)

    pairs, is_pair, token = (first_pair + tl.arange(0, num_pairs))[:, None], is_row[None, :], rows.to(tl.int64)[None, :]
    if head < NUM_HEADS + NUM_KV_HEADS:
        angles = token * 2 * HALF + HALF + pairs
        c = tl.load(cos + angles, mask=is_pair, other=0.0).to(tl.float32)
        s = tl.load(sin + angles, mask=is_pair, other=0.0).to(tl.float32)
        first, second = turned(first, second, c, s)
    if head < NUM_HEADS:
        target = queries + (token * NUM_HEADS + head) * 2 * HALF + pairs
    else:
        slot = tl.load(slots + rows, mask=is_row, other=0)[None, :]
        target = storage + slot * stride_slot + (head - NUM_HEADS) * 2 * HALF + pairs
    tl.store(target, rounded(first, dtype), mask=is_pair)
    tl.store(target + HALF, rounded(second, dtype), mask=is_pair)


def turned_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, cos: Tensor, sin: Tensor, storage: Tensor, slots: Tensor
) -> Tensor:
    """The turned queries [T, heads, head_dim] of x [T, in]; keys and values go to the cache.

    weight, bias: of heads + 2 * kv heads, whose size is a multiple of the tile's outputs; the others: see `rotate_and_write`.
    """
    (num_tokens, in_size), (_, _, num_kv_heads, head_dim) = x.shape, storage.shape
    queries = x.new_empty(num_tokens, num_heads, head_dim)
    _turned_product[(len(weight) // TURNED_TILE.outs,)](
        x.contiguous(), weight, weight if bias is None else bias, cos.contiguous(), sin.contiguous(), slots, queries, storage,
        num_tokens, in_size, storage.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, HAS_BIAS=bias is not None,
        **tiling(num_tokens, TURNED_TILE),
    )  # fmt: skip
    return queries
