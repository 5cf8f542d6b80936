"""Attention of single rows on a CPU, the cache read where it lies, compiled by numba; needs numba.

torch's kernel multiplies matrices, and a row that is decoded, or a tree of a few, is hardly one: it takes two to four times as
long for them. Here a row, and two of the heads that share a key, go through the rows that they see: no masks, no copies of rows
side by side, and what comes out for a row does not depend on which others are in the batch, nor on where the nodes of its tree lie.
"""

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.kernels.cpu.turned_keys import BLOCK, score_keys, turn_keys
from eagle_rt.kernels.cpu.two_queries import add_values, read_query, write_output
from eagle_rt.kernels.cpu.vectors import LOG2_E, ONE
from eagle_rt.kernels.cpu.wide_vectors import softmax

# Less than anything scores: beside it what is seen has all weight.
NO_SINK = np.float32(-1e30)
# Heads that one thread takes along them; of more that share a key others are another's.
MOST_HEADS = 10


@njit(cache=True)
def scale_of(head_dim: int) -> np.float32:
    """That of scores, to the base 2, where keys' size says it."""
    return LOG2_E / np.sqrt(np.float32(head_dim))


@njit(cache=True)
def key_at(place: int, sequence: tuple) -> int:
    """Where the key at a place of a sequence begins: its first slot or table, see `HostRows.firsts_and_table`, the pairs of a slot,
    and those before this head's."""
    first, table, stride, offset = sequence
    return (first + place if first >= 0 else table[place - 1 - first]) * stride + offset


@njit(cache=True)
def keys_seen(seen: np.ndarray, first: int, width: int, prefix: int, sequence: tuple, keys: np.ndarray) -> int:
    """Fills the first of keys with those after the prefix that are seen, from the first on of so many; how many these are."""
    count = 0
    for column in range(first, width):
        if seen[column]:
            keys[count] = key_at(prefix + column, sequence)
            count += 1
    return count


@njit(cache=True, parallel=True)
def row_attention(
    queries: np.ndarray,
    cache: np.ndarray,
    outputs: np.ndarray,
    sinks: np.ndarray,
    scale: np.float32,
    lows: np.ndarray,
    rows: np.ndarray,
    bounds: np.ndarray,
    prefixes: np.ndarray,
    widths: np.ndarray,
    seen: np.ndarray,
    firsts: np.ndarray,
    table: np.ndarray,
) -> None:
    """Fills some rows [R] of outputs [T, heads, V], attention of queries [T, heads, P] over a cache [S, 2, kv heads, P] of keys and
    values, or [S, 1, kv heads, P] of keys that begin with their values.

    All are pairs, int32 of bfloat16 or int64 of float32. sinks: [heads] see `sinks_for`; scale: of scores, to the base 2. Of its
    sequence each of the R rows sees the places from lows to prefixes, and of `widths` places from there on those that seen [T, C]
    says. bounds: [n + 1] where runs of rows begin and end that are of one sequence: they go through its cache together, block by
    block, so that it is read from memory once. firsts, table: of the R rows' sequences, see `HostRows.firsts_and_table`.
    """
    num_heads, num_pairs, num_value_pairs = queries.shape[1], queries.shape[2], outputs.shape[2]
    num_parts, num_kv_heads = cache.shape[1:3]
    num_shared, values_offset = num_heads // num_kv_heads, (num_parts - 1) * num_kv_heads * num_pairs
    parts_a_key = (num_shared + MOST_HEADS - 1) // MOST_HEADS
    num_runs, parts_a_run = len(bounds) - 1, num_kv_heads * parts_a_key
    for item in prange(num_runs * parts_a_run):
        # Threads take neighbouring items, and of a prompt later runs see more: so the first goes beside the last, and so on.
        place, part = item // parts_a_run, item % parts_a_run
        run = num_runs - 1 - place // 2 if place % 2 else place // 2
        begin, end, kv_head, part = bounds[run], bounds[run + 1], part // parts_a_key, part % parts_a_key
        first_head = kv_head * num_shared + num_shared * part // parts_a_key
        last_head = kv_head * num_shared + num_shared * (part + 1) // parts_a_key - 1
        # Two heads of a row at a time; of an odd number the last goes with itself.
        num_rows, num_couples = end - begin, (last_head - first_head) // 2 + 1
        shape, key_shape = (num_rows, num_couples, 2), (num_rows, num_couples, 2, num_pairs)
        value_shape = (num_rows, num_couples, 2, num_value_pairs)
        query_even, query_odd = np.empty(key_shape, dtype=np.float32), np.empty(key_shape, dtype=np.float32)
        even, odd = np.zeros(value_shape, dtype=np.float32), np.zeros(value_shape, dtype=np.float32)
        heads, most = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32)
        total, factors = np.ones(shape, dtype=np.float32), np.empty(2, dtype=np.float32)
        for r, c, k in np.ndindex(shape):
            head = min(first_head + 2 * c + k, last_head)
            heads[r, c, k], most[r, c, k] = rows[begin + r] * num_heads + head, sinks[head]
            read_query(queries, int(heads[r, c, k] * num_pairs), scale, query_even[r, c, k], query_odd[r, c, k])
        block, visible = np.empty(BLOCK, dtype=np.int64), np.empty(BLOCK, dtype=np.int64)
        of_block = np.empty((2 * num_pairs, BLOCK), dtype=np.float32)
        of_visible = np.empty_like(of_block)
        scores, stride = np.empty((2, BLOCK), dtype=np.float32), num_parts * num_kv_heads * num_pairs
        # What a row sees lies in order: all places up to its prefix, then those of its tree that it sees, as if these came next. So
        # blocks cut it in the same places with a tree and without, and it comes out the same bit by bit.
        sequence = firsts[begin], table, stride, kv_head * num_pairs
        lengths, seen_after = np.empty(num_rows, dtype=np.int64), np.empty((num_rows, seen.shape[1]), dtype=np.int64)
        for r in range(num_rows):
            prefix, width = int(prefixes[begin + r]), int(widths[begin + r])
            num_unseen = max(0, int(lows[begin + r]) - prefix)
            lengths[r] = prefix + keys_seen(seen[rows[begin + r]], num_unseen, width, prefix, sequence, seen_after[r])
        lowest, longest_prefix, longest = min(lows[begin], prefixes[begin]), prefixes[begin], lengths[0]
        for r in range(1, num_rows):
            lowest, longest = min(lowest, lows[begin + r], prefixes[begin + r]), max(longest, lengths[r])
            longest_prefix = max(longest_prefix, prefixes[begin + r])
        for start in range(lowest // BLOCK * BLOCK, longest, BLOCK):
            # Of a page that is no longer seen the keys may be anybody's: their scores are not looked at.
            for place in range(start, min(start + BLOCK, longest_prefix)):
                block[place - start] = key_at(place, sequence)
            turn_keys(cache, block[: max(0, min(BLOCK, longest_prefix - start))], of_block)
            for r in range(num_rows):
                prefix = prefixes[begin + r]
                low, high = max(min(lows[begin + r], prefix), start), min(lengths[r], start + BLOCK)
                if low >= high:
                    continue
                first, last, keys, turned = int(low - start), int(high - start), block, of_block
                if high > prefix:
                    keys, turned = visible, of_visible
                    for place in range(low, high):
                        keys[place - start] = block[place - start] if place < prefix else seen_after[r, place - prefix]
                    for column in range(first):
                        keys[column] = keys[first]
                    turn_keys(cache, keys[:last], turned)
                for c in range(num_couples):
                    score_keys(query_even[r, c], query_odd[r, c], turned, last, scores)
                    for k in range(2):
                        most[r, c, k], factors[k], added = softmax(scores[k, first:last], most[r, c, k])
                        total[r, c, k] = total[r, c, k] * factors[k] + added
                    add_values(scores, first, cache, keys[first:last], values_offset, factors, even[r, c], odd[r, c])
        for r, c, k in np.ndindex(shape):
            place = int(heads[r, c, k] * num_value_pairs)
            write_output(even[r, c, k], odd[r, c, k], np.float32(ONE / total[r, c, k]), outputs, place)


def sinks_for(sinks: Tensor | None, num_heads: int) -> NDArray[np.float32]:
    """[heads] what is scored beside all that is seen and has no value, to the base 2; None: nothing is."""
    return np.full(num_heads, NO_SINK) if sinks is None else (sinks.float() * float(LOG2_E)).numpy()
