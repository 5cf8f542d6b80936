"""Attention of single rows on a CPU, the cache read where it lies, compiled by numba; needs numba.

torch's kernel multiplies matrices, and a row that is decoded, or a tree of a few, is hardly one: it takes two to four times as
long for them. Here a row, and two of the heads that share a key, go through the rows that they see: no masks, no copies of rows
side by side, and what comes out for a row does not depend on which others are in the batch.

The loops spell out vectors, for which numba has no words: left to itself the compiler makes some of these loops, four times slower,
of single numbers.
"""

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.kernels.cpu.vectors import (
    FLAGS,
    LANES,
    LOG2_E,
    ONE,
    ZERO,
    add,
    add_product,
    exp2,
    first_of,
    load,
    multiply,
    second_of,
    spread,
    store,
    store_pairs,
    sum_of,
)

# Less than anything scores: beside it what is seen has all weight.
NO_SINK = np.float32(-1e30)
# Rows of a cache that go through the caches of a processor together, for all queries.
BLOCK = 64
# Heads that one thread takes along them; of more that share a key others are another's.
MOST_HEADS = 10


@njit(cache=True)
def scale_of(head_dim: int) -> np.float32:
    """That of scores, to the base 2, where keys' size says it."""
    return LOG2_E / np.sqrt(np.float32(head_dim))


@njit(cache=True, fastmath=set(FLAGS))
def softmax(scores: np.ndarray, most: np.float32) -> tuple[np.float32, np.float32, np.float32]:
    """Scores [n] to the base 2 become weights, still to be divided by the sum of all (Milakov and Gimelshein, 2018).

    most: of the scores before. Returns the most of all so far, what weights before are to be multiplied with, and the sum of these.
    """
    highest, total = most, ZERO
    for score in scores:
        highest = max(highest, score)
    for j in range(len(scores)):
        scores[j] = exp2(scores[j] - highest)
        total += scores[j]
    return highest, exp2(most - highest), total


@njit(cache=True, fastmath=set(FLAGS))
def read_query(queries: np.ndarray, place: int, scale: np.float32, even: np.ndarray, odd: np.ndarray) -> None:
    """Fills even, odd [P] with the numbers, scaled, of the pairs that begin at a place."""
    for i in range(0, len(even), LANES):
        pairs = load(queries, place + i)
        store(even, i, multiply(first_of(pairs), spread(scale)))
        store(odd, i, multiply(second_of(pairs), spread(scale)))


@njit(cache=True, fastmath=set(FLAGS))
def write_output(even: np.ndarray, odd: np.ndarray, scale: np.float32, outputs: np.ndarray, place: int) -> None:
    """The other way round."""
    for i in range(0, len(even), LANES):
        store_pairs(outputs, place + i, multiply(load(even, i), spread(scale)), multiply(load(odd, i), spread(scale)))


@njit(cache=True, fastmath=set(FLAGS))
def score_keys(even: np.ndarray, odd: np.ndarray, cache: np.ndarray, keys: np.ndarray, scores: np.ndarray) -> None:
    """Fills scores [2, n] of two queries, even, odd [2, P], for the keys that begin at places [n]: two at a time, as a processor
    adds to eight sums in the time that it takes to add to one."""
    num_pairs = even.shape[1]
    for j in range(0, len(keys) - 1, 2):
        one_even = one_odd = next_one_even = next_one_odd = spread(ZERO)
        other_even = other_odd = next_other_even = next_other_odd = spread(ZERO)
        for i in range(0, num_pairs, LANES):
            query_even, query_odd = load(even, i), load(odd, i)
            other_query_even, other_query_odd = load(even, num_pairs + i), load(odd, num_pairs + i)
            pairs, next_pairs = load(cache, keys[j] + i), load(cache, keys[j + 1] + i)
            key_even, key_odd = first_of(pairs), second_of(pairs)
            one_even, one_odd = add_product(one_even, key_even, query_even), add_product(one_odd, key_odd, query_odd)
            other_even = add_product(other_even, key_even, other_query_even)
            other_odd = add_product(other_odd, key_odd, other_query_odd)
            key_even, key_odd = first_of(next_pairs), second_of(next_pairs)
            next_one_even = add_product(next_one_even, key_even, query_even)
            next_one_odd = add_product(next_one_odd, key_odd, query_odd)
            next_other_even = add_product(next_other_even, key_even, other_query_even)
            next_other_odd = add_product(next_other_odd, key_odd, other_query_odd)
        scores[0, j], scores[0, j + 1] = sum_of(add(one_even, one_odd)), sum_of(add(next_one_even, next_one_odd))
        scores[1, j], scores[1, j + 1] = sum_of(add(other_even, other_odd)), sum_of(add(next_other_even, next_other_odd))
    if len(keys) % 2:
        last = len(keys) - 1
        one_even = one_odd = other_even = other_odd = spread(ZERO)
        for i in range(0, num_pairs, LANES):
            pairs = load(cache, keys[last] + i)
            key_even, key_odd = first_of(pairs), second_of(pairs)
            one_even, one_odd = add_product(one_even, key_even, load(even, i)), add_product(one_odd, key_odd, load(odd, i))
            other_even = add_product(other_even, key_even, load(even, num_pairs + i))
            other_odd = add_product(other_odd, key_odd, load(odd, num_pairs + i))
        scores[0, last], scores[1, last] = sum_of(add(one_even, one_odd)), sum_of(add(other_even, other_odd))


@njit(cache=True, fastmath=set(FLAGS))
def add_values(
    weights: np.ndarray, cache: np.ndarray, keys: np.ndarray, offset: int, factors: np.ndarray, even: np.ndarray, odd: np.ndarray
) -> None:
    """Multiplies even, odd [2, V] with factors [2] and adds the values, an offset behind their keys [n], by weights [2, n]."""
    num_pairs = even.shape[1]
    for i in range(0, num_pairs - LANES, 2 * LANES):
        add_two_vectors(weights, cache, keys, offset + i, factors, even, odd, i)
    if num_pairs // LANES % 2:
        add_vector(weights, cache, keys, offset + num_pairs - LANES, factors, even, odd, num_pairs - LANES)


@njit(cache=True, fastmath=set(FLAGS))
def add_vector(
    weights: np.ndarray,
    cache: np.ndarray,
    keys: np.ndarray,
    offset: int,
    factors: np.ndarray,
    even: np.ndarray,
    odd: np.ndarray,
    place: int,
) -> None:
    """`add_values` of a vector at a place, which lies at that offset from each key."""
    more = even.shape[1] + place
    one_even, one_odd = multiply(load(even, place), spread(factors[0])), multiply(load(odd, place), spread(factors[0]))
    other_even, other_odd = multiply(load(even, more), spread(factors[1])), multiply(load(odd, more), spread(factors[1]))
    for j, key in enumerate(keys):
        pairs = load(cache, key + offset)
        value_even, value_odd = first_of(pairs), second_of(pairs)
        one, other = spread(weights[0, j]), spread(weights[1, j])
        one_even, one_odd = add_product(one_even, one, value_even), add_product(one_odd, one, value_odd)
        other_even, other_odd = add_product(other_even, other, value_even), add_product(other_odd, other, value_odd)
    store(even, place, one_even)
    store(odd, place, one_odd)
    store(even, more, other_even)
    store(odd, more, other_odd)


@njit(cache=True, fastmath=set(FLAGS))
def add_two_vectors(
    weights: np.ndarray,
    cache: np.ndarray,
    keys: np.ndarray,
    offset: int,
    factors: np.ndarray,
    even: np.ndarray,
    odd: np.ndarray,
    place: int,
) -> None:
    """`add_vector` of two that lie side by side."""
    more = even.shape[1] + place
    one_even, one_odd = multiply(load(even, place), spread(factors[0])), multiply(load(odd, place), spread(factors[0]))
    other_even, other_odd = multiply(load(even, more), spread(factors[1])), multiply(load(odd, more), spread(factors[1]))
    place_b, more_b = place + LANES, more + LANES
    one_even_b, one_odd_b = multiply(load(even, place_b), spread(factors[0])), multiply(load(odd, place_b), spread(factors[0]))
    other_even_b, other_odd_b = multiply(load(even, more_b), spread(factors[1])), multiply(load(odd, more_b), spread(factors[1]))
    for j, key in enumerate(keys):
        one, other = spread(weights[0, j]), spread(weights[1, j])
        pairs, pairs_b = load(cache, key + offset), load(cache, key + offset + LANES)
        value_even, value_odd = first_of(pairs), second_of(pairs)
        one_even, one_odd = add_product(one_even, one, value_even), add_product(one_odd, one, value_odd)
        other_even, other_odd = add_product(other_even, other, value_even), add_product(other_odd, other, value_odd)
        value_even, value_odd = first_of(pairs_b), second_of(pairs_b)
        one_even_b, one_odd_b = add_product(one_even_b, one, value_even), add_product(one_odd_b, one, value_odd)
        other_even_b, other_odd_b = add_product(other_even_b, other, value_even), add_product(other_odd_b, other, value_odd)
    store(even, place, one_even)
    store(odd, place, one_odd)
    store(even, more, other_even)
    store(odd, more, other_odd)
    store(even, place_b, one_even_b)
    store(odd, place_b, one_odd_b)
    store(even, more_b, other_even_b)
    store(odd, more_b, other_odd_b)


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
    for item in prange((len(bounds) - 1) * num_kv_heads * parts_a_key):
        run, part = item // (num_kv_heads * parts_a_key), item % (num_kv_heads * parts_a_key)
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
        scores, first = np.empty((2, BLOCK), dtype=np.float32), firsts[begin]
        # What a row sees lies in order: all places up to its prefix, then those of its tree that it sees, as if these came next. So
        # blocks cut it in the same places with a tree and without, and it comes out the same bit by bit.
        seen_after, lengths = np.empty((num_rows, widths[begin:end].max()), dtype=np.int64), prefixes[begin:end].copy()
        for r in range(num_rows):
            for column in range(widths[begin + r]):
                if seen[rows[begin + r], column]:
                    place = prefixes[begin + r] + column
                    slot = first + place if first >= 0 else table[place - 1 - first]
                    seen_after[r, lengths[r] - prefixes[begin + r]] = (slot * num_parts * num_kv_heads + kv_head) * num_pairs
                    lengths[r] += 1
        for start in range(lows[begin:end].min() // BLOCK * BLOCK, lengths.max(), BLOCK):
            for place in range(start, min(start + BLOCK, prefixes[begin:end].max())):
                slot = first + place if first >= 0 else table[place - 1 - first]
                block[place - start] = (slot * num_parts * num_kv_heads + kv_head) * num_pairs
            for r in range(num_rows):
                low, high, prefix = max(lows[begin + r], start), min(lengths[r], start + BLOCK), prefixes[begin + r]
                if low >= high:
                    continue
                keys = block[low - start : high - start]
                if high > prefix:
                    keys = visible[: high - low]
                    for place in range(low, high):
                        keys[place - low] = block[place - start] if place < prefix else seen_after[r, place - prefix]
                for c in range(num_couples):
                    score_keys(query_even[r, c], query_odd[r, c], cache, keys, scores)
                    for k in range(2):
                        most[r, c, k], factors[k], added = softmax(scores[k, : len(keys)], most[r, c, k])
                        total[r, c, k] = total[r, c, k] * factors[k] + added
                    add_values(scores, cache, keys, values_offset, factors, even[r, c], odd[r, c])
        for r, c, k in np.ndindex(shape):
            place = int(heads[r, c, k] * num_value_pairs)
            write_output(even[r, c, k], odd[r, c, k], np.float32(ONE / total[r, c, k]), outputs, place)


def sinks_for(sinks: Tensor | None, num_heads: int) -> NDArray[np.float32]:
    """[heads] what is scored beside all that is seen and has no value, to the base 2; None: nothing is."""
    return np.full(num_heads, NO_SINK) if sinks is None else (sinks.float() * float(LOG2_E)).numpy()
