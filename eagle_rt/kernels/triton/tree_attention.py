"""Attention of a few query rows per sequence over a paged cache, in Triton: for trees, drafts, prompts and plain decoding alike.

Every query row sees the first `prefixes[t]` rows of its sequence and, of the rows after them, those whose bit is set in its mask
words: for a tree the ancestors, for a causal text none. All lengths are read on the device, so that a captured launch serves every
step.

The query heads that share a key head are packed into the rows of one tile, so that each key is read once for all of them. The
context is cut into splits that run side by side; each leaves its part of the softmax, and a second kernel joins the parts
(FlashDecoding; Dao et al., 2023). `attention/reference.py` is the slow twin.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import IS_INTERPRETED, padded

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_SPLITS = 32
# Contexts that cannot be so long are not worth a second kernel.
LEAST_TO_SPLIT = 256
# Programs that keep a large GPU busy; more than these are not cut further.
ENOUGH_PROGRAMS = 512


@dataclass(frozen=True)
class Tiling:
    """How a launch is cut: tiles of block_m query heads and block_n rows of the cache, and splits of rows_a_split rows, from which
    on one is worth its own programs."""

    block_m: int
    block_n: int
    rows_a_split: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Uniform:
    """Every sequence has `most` queries. num_columns: of its masks, before which lies the prefix; None for a causal text, where the
    prefix is what a query sees."""

    most: int
    num_columns: int | None


@dataclass(frozen=True)
class Ragged:
    """The queries of sequence b are starts[b] : starts[b + 1], at most `most`. starts: [B + 1] int32; prefixes: [T] int32, of
    each."""

    most: int
    starts: Tensor
    prefixes: Tensor


# Compiled once whatever these are: they differ from prompt to prompt.
@triton.jit(do_not_specialize=["stride_sequence", "num_queries", "num_columns"])
def _attend(
    queries,  # [T, heads, head_dim]
    storage,  # one layer of the cache: [S, 2, kv_heads, head_dim], or [S, 1, kv_heads, head_dim] of keys that begin with values
    pages,  # [B, P] int32: the pages of each sequence
    query_starts,  # [B + 1] int32, read if RAGGED
    kv_lens,  # [B] int32
    prefixes,  # [T] int32, read if RAGGED
    masks,  # [T, NUM_WORDS] int64
    positions,  # [T] int64
    sinks,  # [heads] float32, read if HAS_SINKS
    parts,  # [T, heads, NUM_SPLITS, VALUE_DIM] float32, or the output where there is one split
    part_norms,  # [T, heads, NUM_SPLITS] float32: log2 of the softmax's denominator
    scale,  # of scores, to the base 2
    stride_query,
    stride_query_head,
    stride_slot,
    stride_sequence,
    num_queries,  # of every sequence, unless RAGGED
    num_columns,  # of the masks: what comes before is the prefix, unless RAGGED or CAUSAL
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MORE_DIM: tl.constexpr,  # by which keys are longer than values, if those are their beginnings
    PADDED_MORE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_A_SPLIT: tl.constexpr,
    RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    tile, pair, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, kv_head = pair // NUM_KV_HEADS, pair % NUM_KV_HEADS
    first_query = sequence * num_queries
    if RAGGED:
        first_query = tl.load(query_starts + sequence)
        num_queries = tl.load(query_starts + sequence + 1) - first_query
    num_rows = num_queries * GROUP
    kv_len = tl.load(kv_lens + sequence)
    if tile * BLOCK_M >= num_rows:
        return

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    query = first_query + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < VALUE_DIM
    query_places = queries + query[:, None] * stride_query + head[:, None] * stride_query_head
    q = tl.load(query_places + dims, mask=is_row[:, None] & is_dim, other=0.0)
    if IN_FLOAT32:
        q = q.to(tl.float32)
    if MORE_DIM > 0:
        more_dims = tl.arange(0, PADDED_MORE)
        q_more = tl.load(query_places + VALUE_DIM + more_dims, mask=is_row[:, None] & (more_dims < MORE_DIM), other=0.0)
        if IN_FLOAT32:
            q_more = q_more.to(tl.float32)
    if RAGGED:
        prefix = tl.load(prefixes + query, mask=is_row, other=0)
    elif CAUSAL:
        # All but the rows after one's own.
        prefix = kv_len - num_queries + 1 + rows // GROUP
    else:
        prefix = tl.full([BLOCK_M], kv_len - num_columns, tl.int32)
    # Below this every row of the tile sees everything.
    all_see = tl.min(tl.where(is_row, prefix, 2147483647))

    # As far as the launch has room for splits, they follow from the length alone, and a sum is the same in every batch.
    num_used = tl.maximum(1, tl.minimum(NUM_SPLITS, kv_len // ROWS_A_SPLIT))
    blocks_a_split = tl.cdiv(tl.cdiv(kv_len, BLOCK_N), num_used)
    start = split * blocks_a_split * BLOCK_N
    end = tl.minimum(start + blocks_a_split * BLOCK_N, kv_len)
    place = (query * (NUM_KV_HEADS * GROUP) + head).to(tl.int64) * NUM_SPLITS + split
    if (split > 0) & (start >= end):
        tl.store(part_norms + place, -float("inf"), mask=is_row)
        return

    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS and split == 0:  # as if it had been seen, and its value were nothing
        highest = tl.load(sinks + head, mask=is_row, other=0.0) * LOG2_E
        total += 1.0
    sums = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    for block in range(start, end, BLOCK_N):
        columns = block + tl.arange(0, BLOCK_N)
        is_column = columns < end
        page = tl.load(pages + sequence * stride_sequence + columns // PAGE_SIZE, mask=is_column, other=0).to(tl.int64)
        slot = page * PAGE_SIZE + columns % PAGE_SIZE
        key_places = storage + slot[:, None] * stride_slot + kv_head * (VALUE_DIM + MORE_DIM)
        is_value = is_column[:, None] & is_dim
        k = tl.load(key_places + dims, mask=is_value, other=0.0)
        if MORE_DIM > 0:
            v = k
            k_more = tl.load(key_places + VALUE_DIM + more_dims, mask=is_column[:, None] & (more_dims < MORE_DIM), other=0.0)
            if IN_FLOAT32:
                k_more = k_more.to(tl.float32)
        else:
            v = tl.load(key_places + NUM_KV_HEADS * VALUE_DIM + dims, mask=is_value, other=0.0)
        if IN_FLOAT32:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MORE_DIM > 0:
            scores = tl.dot(q_more, tl.trans(k_more), scores, input_precision="ieee")
        scores *= scale

        sees = is_row[:, None] & is_column
        if block + BLOCK_N > all_see:
            past = columns[None, :] - prefix[:, None]
            sees_past = past < 0
            for word in tl.static_range(NUM_WORDS):
                bits = tl.load(masks + query * NUM_WORDS + word, mask=is_row, other=0)
                shift = past - word * 64
                is_here = (shift >= 0) & (shift < 64)
                bit = (bits[:, None] >> tl.where(is_here, shift, 0).to(tl.int64)) & 1
                sees_past = sees_past | (is_here & (bit != 0))
            sees = sees & sees_past
        if WINDOW > 0:
            position = tl.load(positions + query, mask=is_row, other=0)
            sees = sees & (position[:, None] - columns < WINDOW)
        scores = tl.where(sees, scores, -float("inf"))

        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest

    has_seen = total > 0.0
    sums = sums / tl.where(has_seen, total, 1.0)[:, None]
    part_places = parts + place[:, None] * VALUE_DIM + dims
    tl.store(part_places, sums.to(parts.dtype.element_ty), mask=is_row[:, None] & is_dim)
    if NUM_SPLITS > 1:
        norm = tl.where(has_seen, highest + tl.log2(tl.where(has_seen, total, 1.0)), -float("inf"))
        tl.store(part_norms + place, norm, mask=is_row)


@triton.jit
def _join(
    parts,  # [R, NUM_SPLITS, VALUE_DIM] float32
    part_norms,  # [R, NUM_SPLITS] float32
    output,  # [R, VALUE_DIM]
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, PADDED_DIM)
    norms = tl.load(part_norms + row * NUM_SPLITS + splits)
    highest = tl.max(norms, 0)
    weights = tl.exp2(norms - tl.where(highest == -float("inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    places = parts + (row * NUM_SPLITS + splits[:, None]) * VALUE_DIM + dims
    values = tl.load(places, mask=(weights[:, None] > 0.0) & (dims < VALUE_DIM), other=0.0)
    joined = tl.sum(values * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(output + row * VALUE_DIM + dims, joined.to(output.dtype.element_ty), mask=dims < VALUE_DIM)


def tree_attention(
    queries: Tensor,
    storage: Tensor,
    pages: Tensor,
    kv_lens: Tensor,
    queries_of: Uniform | Ragged,
    masks: Tensor,
    positions: Tensor,
    *,
    page_size: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
    scale: float | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """[T, heads, numbers of a value] from queries [T, heads, head_dim] and one layer of the cache, [S, 2, kv_heads, head_dim], or
    [S, 1, kv_heads, head_dim] where keys begin with their values, of value_dim numbers.

    pages: [B, P] int32, the pages of page_size rows that each sequence is cached in; kv_lens: [B] int32; masks: [T, W] int64, bit j
    of word w for row 64 w + j after the prefix, which a query sees whatever its mask says; positions: [T] int64, for layers with a
    window; sinks: see `AttentionBackend.run`; scale: see `RowShape`. A query that sees nothing gets zeros. tiling: other than
    `tiling_for` says.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = storage.shape[2]
    group = num_heads // num_kv_heads
    num_rows = queries_of.most * group
    # What is not ragged needs no tensors: any stand in for them.
    starts, prefixes, num_columns = kv_lens, kv_lens, None
    if is_ragged := isinstance(queries_of, Ragged):
        starts, prefixes = queries_of.starts, queries_of.prefixes
    else:
        num_columns = queries_of.num_columns
    more_dim, value_dim = head_dim - value_dim if value_dim else 0, value_dim or head_dim
    padded_dim = padded(value_dim, least=16)
    tiling = tiling or tiling_for(num_rows, padded_dim, storage.dtype, has_values=storage.shape[1] == 2)
    num_tiles, num_pairs = triton.cdiv(num_rows, tiling.block_m), len(kv_lens) * num_kv_heads
    num_splits = splits_for(num_tiles * num_pairs, pages.shape[1] * page_size, tiling.rows_a_split)
    output = queries.new_empty(num_tokens, num_heads, value_dim)
    parts, part_norms = output, output
    if num_splits > 1:
        parts = queries.new_empty(num_tokens, num_heads, num_splits, value_dim, dtype=torch.float32)
        part_norms = queries.new_empty(num_tokens, num_heads, num_splits, dtype=torch.float32)
    _attend[num_tiles, num_pairs, num_splits](
        queries,
        storage,
        pages,
        starts,
        kv_lens,
        prefixes,
        masks,
        positions,
        positions if sinks is None else sinks,
        parts,
        part_norms,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E.value,
        queries.stride(0),
        queries.stride(1),
        storage.stride(0),
        pages.stride(0),
        queries_of.most,
        num_columns or 0,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        VALUE_DIM=value_dim,
        PADDED_DIM=padded_dim,
        MORE_DIM=more_dim,
        PADDED_MORE=padded(more_dim, least=16),
        PAGE_SIZE=page_size,
        NUM_WORDS=masks.shape[1],
        WINDOW=window or 0,
        NUM_SPLITS=num_splits,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        ROWS_A_SPLIT=tiling.rows_a_split,
        RAGGED=is_ragged,
        CAUSAL=not is_ragged and num_columns is None,
        HAS_SINKS=sinks is not None,
        IN_FLOAT32=IS_INTERPRETED,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_splits > 1:
        _join[(num_tokens * num_heads,)](
            parts, part_norms, output, VALUE_DIM=value_dim, PADDED_DIM=padded_dim, NUM_SPLITS=num_splits
        )
    return output


def tiling_for(num_rows: int, padded_dim: int, dtype: torch.dtype, *, has_values: bool) -> Tiling:
    """For so many query heads that share a key head, of this size and in this precision. has_values: beside keys."""
    # Tiles of keys and values that fit into shared memory a few times over.
    if dtype == torch.float32:
        # No matrix unit multiplies these: whatever is multiplied at once is held in registers.
        return Tiling(16, max(16, 32 * 128 // max(128, padded_dim)), num_warps=8)
    if padded_dim > 256:  # whose sums fill the registers of so many threads
        num_stages = 2 if has_values else 3
        few, many = Tiling(16, 32, num_stages=num_stages), Tiling(32, 32, num_warps=8, num_stages=num_stages)
        return few if num_rows <= 16 else many
    block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    return Tiling(block_m, max(16, 64 * 128 // max(128, padded_dim)))


def splits_for(num_programs: int, longest: int, rows_a_split: int) -> int:
    """The splits that a launch has room for: a power of two, at most what the longest context that it may meet is worth."""
    most = longest // rows_a_split if longest >= LEAST_TO_SPLIT else 1
    splits = 1
    while splits < min(MAX_SPLITS, most) and num_programs * splits < ENOUGH_PROGRAMS:
        splits *= 2
    return splits


def mask_words(tree_mask: Tensor) -> Tensor:
    """[..., W] int64 from a bool mask [..., C]: bit j of word w is column 64 w + j."""
    num_columns = tree_mask.shape[-1]
    num_words = -(-num_columns // 64)
    filled = torch.nn.functional.pad(tree_mask, (0, num_words * 64 - num_columns))
    bits = torch.ones(64, dtype=torch.int64, device=tree_mask.device) << torch.arange(64, device=tree_mask.device)
    return (filled.unflatten(-1, (num_words, 64)) * bits).sum(dim=-1)
