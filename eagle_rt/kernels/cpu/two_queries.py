"""How two queries are read, what they make of some values, and how that is written, in vectors; needs numba.

The loops spell out vectors, for which numba has no words: left to itself the compiler makes some of these loops, four times slower,
of single numbers.
"""

from typing import Any

import numpy as np
from numba import njit

from eagle_rt.kernels.cpu.vectors import (
    FLAGS,
    LANES,
    add_product,
    first_of,
    load,
    multiply,
    second_of,
    spread,
    store,
    store_pairs,
)


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
def add_values(
    weights: np.ndarray,
    first: int,
    cache: np.ndarray,
    keys: np.ndarray,
    offset: int,
    factors: np.ndarray,
    even: np.ndarray,
    odd: np.ndarray,
) -> None:
    """Multiplies even, odd [2, V] with factors [2] and adds the values, an offset behind their keys [n], by weights [2, first + n],
    from the first on."""
    num_pairs = even.shape[1]
    for i in range(0, num_pairs - LANES, 2 * LANES):
        add_two_vectors(weights, first, cache, keys, offset + i, factors, even, odd, i)
    if num_pairs // LANES % 2:
        add_vector(weights, first, cache, keys, offset + num_pairs - LANES, factors, even, odd, num_pairs - LANES)


@njit(cache=True, fastmath=set(FLAGS))
def add_vector(
    weights: np.ndarray,
    first: int,
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
        one, other = spread(weights[0, first + j]), spread(weights[1, first + j])
        one_even, one_odd = add_product(one_even, one, value_even), add_product(one_odd, one, value_odd)
        other_even, other_odd = add_product(other_even, other, value_even), add_product(other_odd, other, value_odd)
    store(even, place, one_even)
    store(odd, place, one_odd)
    store(even, more, other_even)
    store(odd, more, other_odd)


@njit(cache=True, fastmath=set(FLAGS))
def add_two_vectors(
    weights: np.ndarray,
    first: int,
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
        one, other = spread(weights[0, first + j]), spread(weights[1, first + j])
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
