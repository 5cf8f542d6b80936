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
    larger,
    largest_of,
    load,
    multiply,
    powers_of,
    second_of,
    spread,
    store,
    store_pairs,
    store_sums,
    sum_of,
)


@njit(cache=True, fastmath=set(FLAGS))
def softmax(scores: np.ndarray, most: np.float32) -> tuple[np.float32, np.float32, np.float32]:
    """Scores [n] to the base 2 become weights, still to be divided by the sum of all (Milakov and Gimelshein, 2018).

    most: of the scores before. Returns the most of all so far, what weights before are to be multiplied with, and the sum of these.
    """
    num_whole = len(scores) // LANES * LANES
    highest, total = most, ZERO
    for score in scores[num_whole:]:
        highest = max(highest, score)
    highests, totals = spread(highest), spread(ZERO)
    for j in range(0, num_whole, LANES):
        highests = larger(load(scores, j), highests)
    highest = largest_of(highests)
    lows = spread(-highest)
    for j in range(0, num_whole, LANES):
        powers = powers_of(add(load(scores, j), lows))
        store(scores, j, powers)
        totals = add(totals, powers)
    for j in range(num_whole, len(scores)):
        scores[j] = exp2(scores[j] - highest)
        total += scores[j]
    return highest, exp2(most - highest), total + sum_of(totals)


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
    """Fills scores [2, n] of two queries, even, odd [2, P], for the keys that begin at places [n]: four at a time, as a processor
    adds to eight sums in the time that it takes to add to one, and adds these up together. Those past the last one are scored as
    it is, to where scores [2, 4 * m] have room for them."""
    num_pairs, last, num_scores = even.shape[1], len(keys) - 1, scores.shape[1]
    for j in range(0, len(keys), 4):
        first, second = keys[j], keys[min(j + 1, last)]
        third, fourth = keys[min(j + 2, last)], keys[min(j + 3, last)]
        one_first = one_second = one_third = one_fourth = spread(ZERO)
        other_first = other_second = other_third = other_fourth = spread(ZERO)
        for i in range(0, num_pairs, LANES):
            one, other = (load(even, i), load(odd, i)), (load(even, num_pairs + i), load(odd, num_pairs + i))
            one_first, other_first = add_products(one_first, other_first, load(cache, first + i), one, other)
            one_second, other_second = add_products(one_second, other_second, load(cache, second + i), one, other)
            one_third, other_third = add_products(one_third, other_third, load(cache, third + i), one, other)
            one_fourth, other_fourth = add_products(one_fourth, other_fourth, load(cache, fourth + i), one, other)
        store_sums(scores, j, one_first, one_second, one_third, one_fourth)
        store_sums(scores, num_scores + j, other_first, other_second, other_third, other_fourth)


@njit(cache=True, fastmath=set(FLAGS))
def add_products(one_total: Any, other_total: Any, pairs: Any, one: tuple, other: tuple) -> tuple[Any, Any]:
    """Vectors of two queries' sums, and the products of both numbers of pairs with those, even and odd, of each query."""
    even, odd = first_of(pairs), second_of(pairs)
    one_total = add_product(add_product(one_total, even, one[0]), odd, one[1])
    return one_total, add_product(add_product(other_total, even, other[0]), odd, other[1])


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
