"""What two queries make of some keys and values, in vectors, for compiled functions; needs numba.

The loops spell out vectors, for which numba has no words: left to itself the compiler makes some of these loops, four times slower,
of single numbers.
"""

from typing import Any

import numpy as np
from numba import njit

from eagle_rt.kernels.cpu.vectors import (
    FLAGS,
    LANES,
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
def scaled(numbers: np.ndarray, place: int, factor: np.float32) -> Any:
    """The vector at a place, times a factor."""
    return multiply(load(numbers, place), spread(factor))


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
        store_pairs(outputs, place + i, scaled(even, i, scale), scaled(odd, i, scale))


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
    one_even, one_odd = scaled(even, place, factors[0]), scaled(odd, place, factors[0])
    other_even, other_odd = scaled(even, more, factors[1]), scaled(odd, more, factors[1])
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
    one_even, one_odd = scaled(even, place, factors[0]), scaled(odd, place, factors[0])
    other_even, other_odd = scaled(even, more, factors[1]), scaled(odd, more, factors[1])
    next_place, next_more = place + LANES, more + LANES
    next_one_even, next_one_odd = scaled(even, next_place, factors[0]), scaled(odd, next_place, factors[0])
    next_other_even, next_other_odd = scaled(even, next_more, factors[1]), scaled(odd, next_more, factors[1])
    for j, key in enumerate(keys):
        one, other = spread(weights[0, j]), spread(weights[1, j])
        pairs, next_pairs = load(cache, key + offset), load(cache, key + offset + LANES)
        value_even, value_odd = first_of(pairs), second_of(pairs)
        one_even, one_odd = add_product(one_even, one, value_even), add_product(one_odd, one, value_odd)
        other_even, other_odd = add_product(other_even, other, value_even), add_product(other_odd, other, value_odd)
        value_even, value_odd = first_of(next_pairs), second_of(next_pairs)
        next_one_even, next_one_odd = add_product(next_one_even, one, value_even), add_product(next_one_odd, one, value_odd)
        next_other_even = add_product(next_other_even, other, value_even)
        next_other_odd = add_product(next_other_odd, other, value_odd)
    store(even, place, one_even)
    store(odd, place, one_odd)
    store(even, more, other_even)
    store(odd, more, other_odd)
    store(even, next_place, next_one_even)
    store(odd, next_place, next_one_odd)
    store(even, next_more, next_other_even)
    store(odd, next_more, next_other_odd)
