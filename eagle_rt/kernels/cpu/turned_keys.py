"""Keys of a block turned, so that a vector holds one number of many keys, and what queries score and weigh of them; needs numba.

Nothing is then summed up within a vector, which would take as long as all products of a short key. Turning takes as long as the
scores of two to four queries, and many share a block: those of all heads and rows that see it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types

from eagle_rt.kernels.cpu.instructions import has_instructions
from eagle_rt.kernels.cpu.vectors import (
    F32,
    FLAGS,
    HALF,
    I32,
    LANES,
    LEAST,
    ONE,
    POWERS,
    VECTOR_OF,
    ZERO,
    Vector,
    add,
    add_product,
    exp2,
    halves_of,
    operation,
    pointer,
)

# Numbers of a vector of one number each of many keys: as many as a register has.
WIDE = 16 if has_instructions("avx512f") else 8
# Keys of a block.
BLOCK = 64
wide_floats = Vector("wide floats", F32, WIDE)
WHOLE = ir.VectorType(I32, WIDE)


@operation
def load_wide(_: Any, array: Any, index: Any) -> Any:
    """The vector of float32 that begins at an index of an array, counted as if it were flat."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(pointer(context, builder, array, values[0], values[1], wide_floats.llvm_type), align=4)

    return wide_floats(array, types.intp), build


@operation
def store_wide(_: Any, array: Any, index: Any, vector: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[2], pointer(context, builder, array, values[0], values[1], wide_floats.llvm_type), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, wide_floats), build


@operation
def spread_wide(_: Any, number: Any) -> Any:
    """The vector of one number, everywhere."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        first = builder.insert_element(ir.Constant(wide_floats.llvm_type, ir.Undefined), values[0], I32(0))
        return builder.shuffle_vector(first, first, ir.Constant(WHOLE, [0] * WIDE))

    return wide_floats(types.float32), build


def _folded(builder: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """What all numbers of a vector come to, everywhere."""
    distance = WIDE // 2
    while distance:
        places = ir.Constant(WHOLE, [(place + distance) % WIDE for place in range(WIDE)])
        vector = join(vector, builder.shuffle_vector(vector, vector, places))
        distance //= 2
    return vector


@operation
def larger(_: Any, a: Any, b: Any) -> Any:
    """Number by number of vectors; the second where one is no number."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *values), *values)

    return wide_floats(wide_floats, wide_floats), build


@operation
def spread_largest(_: Any, vector: Any) -> Any:
    """The largest of all numbers of a vector, everywhere; each is one."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _folded(builder, values[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return wide_floats(wide_floats), build


@operation
def first_number(_: Any, vector: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.extract_element(values[0], I32(0))

    return types.float32(wide_floats), build


@operation
def sum_of_wide(_: Any, vector: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        total = _folded(builder, values[0], lambda a, b: builder.fadd(a, b, flags=FLAGS))
        return builder.extract_element(total, I32(0))

    return types.float32(wide_floats), build


@operation
def powers_of(_: Any, x: Any) -> Any:
    """`exp2` of all numbers of a vector."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def all_of(number: int | np.float32) -> Any:
            element, own = (I32, number) if isinstance(number, int) else (F32, float(number))
            return ir.Constant(ir.VectorType(element, WIDE), [own] * WIDE)

        (given,) = values
        x = builder.select(builder.fcmp_ordered("<", given, all_of(LEAST)), all_of(LEAST), given)
        whole = builder.fptosi(builder.fsub(x, all_of(HALF)), WHOLE)
        part = builder.fsub(x, builder.sitofp(whole, wide_floats.llvm_type))
        fraction = all_of(POWERS[-1])
        for factor in (*POWERS[-2::-1], ONE):
            fraction = builder.fadd(all_of(factor), builder.fmul(part, fraction, flags=FLAGS), flags=FLAGS)
        power = builder.bitcast(builder.shl(builder.add(whole, all_of(127)), all_of(23)), wide_floats.llvm_type)
        return builder.fmul(power, fraction, flags=FLAGS)

    return wide_floats(wide_floats), build


@operation
def turn_eight(_: Any, cache: Any, keys: Any, turned: Any, place: Any) -> Any:
    """LANES pairs each of as many keys, which begin at these places, to where LANES times two rows of `turned` begin at a place."""
    pairs = VECTOR_OF[cache.dtype]

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        rows = []
        for key in range(LANES):
            index = builder.extract_value(values[1], key)
            place = pointer(context, builder, cache, values[0], index, pairs.llvm_type)
            rows.append(builder.load(place, align=cache.dtype.bitwidth // 8))
        distance = 1
        while distance < LANES:  # rows and their partners change the numbers that lie on the other's side
            low = [place if not place & distance else LANES + place - distance for place in range(LANES)]
            high = [place + distance if not place & distance else LANES + place for place in range(LANES)]
            for row in range(LANES):
                if not row & distance:
                    both = rows[row], rows[row + distance]
                    rows[row], rows[row + distance] = (
                        builder.shuffle_vector(*both, ir.Constant(ir.VectorType(I32, LANES), places)) for places in (low, high)
                    )
            distance *= 2
        for number, row in enumerate(rows):
            for half, bits in enumerate(halves_of(builder, row, pairs)):
                index = builder.add(values[3], ir.Constant(values[3].type, (2 * number + half) * BLOCK))
                builder.store(bits, pointer(context, builder, turned, values[2], index, bits.type), align=4)
        return context.get_dummy_value()

    return types.void(cache, keys, turned, types.intp), build


@njit(cache=True)
def turn_keys(cache: np.ndarray, keys: np.ndarray, turned: np.ndarray) -> None:
    """Fills the first n columns of turned [2 * P, BLOCK] with the numbers of the keys that begin at places [n] of a cache."""
    last = len(keys) - 1
    for j in range(0, len(keys), LANES):
        a, b, c, d = keys[j], keys[min(j + 1, last)], keys[min(j + 2, last)], keys[min(j + 3, last)]
        e, f, g, h = keys[min(j + 4, last)], keys[min(j + 5, last)], keys[min(j + 6, last)], keys[min(j + 7, last)]
        for i in range(0, turned.shape[0] // 2, LANES):
            turn_eight(cache, (a + i, b + i, c + i, d + i, e + i, f + i, g + i, h + i), turned, 2 * i * BLOCK + j)


@njit(cache=True, fastmath=set(FLAGS))
def score_keys(even: np.ndarray, odd: np.ndarray, turned: np.ndarray, last: int, scores: np.ndarray) -> None:
    """Fills scores [2, BLOCK] of two queries, even, odd [2, P], for the keys in columns up to the last of `turn_keys`, and more
    that mean nothing: so many at a time that a processor need not wait for a sum before it adds to it."""
    for j in range(0, last, 4 * WIDE):
        one_first = one_second = one_third = one_fourth = spread_wide(ZERO)
        other_first = other_second = other_third = other_fourth = spread_wide(ZERO)
        for i in range(even.shape[1]):
            for half in range(2):
                place = (2 * i + half) * BLOCK + j
                one, other = spread_wide(odd[0, i] if half else even[0, i]), spread_wide(odd[1, i] if half else even[1, i])
                keys = load_wide(turned, place)
                one_first, other_first = add_product(one_first, keys, one), add_product(other_first, keys, other)
                keys = load_wide(turned, place + WIDE)
                one_second, other_second = add_product(one_second, keys, one), add_product(other_second, keys, other)
                keys = load_wide(turned, place + 2 * WIDE)
                one_third, other_third = add_product(one_third, keys, one), add_product(other_third, keys, other)
                keys = load_wide(turned, place + 3 * WIDE)
                one_fourth, other_fourth = add_product(one_fourth, keys, one), add_product(other_fourth, keys, other)
        store_wide(scores, j, one_first)
        store_wide(scores, j + WIDE, one_second)
        store_wide(scores, j + 2 * WIDE, one_third)
        store_wide(scores, j + 3 * WIDE, one_fourth)
        store_wide(scores, BLOCK + j, other_first)
        store_wide(scores, BLOCK + j + WIDE, other_second)
        store_wide(scores, BLOCK + j + 2 * WIDE, other_third)
        store_wide(scores, BLOCK + j + 3 * WIDE, other_fourth)


@njit(cache=True, fastmath=set(FLAGS))
def softmax(scores: np.ndarray, most: np.float32) -> tuple[np.float32, np.float32, np.float32]:
    """Scores [n] to the base 2 become weights, still to be divided by the sum of all (Milakov and Gimelshein, 2018).

    most: of the scores before. Returns the most of all so far, what weights before are to be multiplied with, and the sum of these.
    """
    num_whole = len(scores) // WIDE * WIDE
    highest, total = most, ZERO
    for score in scores[num_whole:]:
        highest = max(highest, score)
    highests, totals = spread_wide(highest), spread_wide(ZERO)
    for j in range(0, num_whole, WIDE):
        highests = larger(load_wide(scores, j), highests)
    highests = spread_largest(highests)
    highest = first_number(highests)
    lows = spread_wide(-highest)
    for j in range(0, num_whole, WIDE):
        powers = powers_of(add(load_wide(scores, j), lows))
        store_wide(scores, j, powers)
        totals = add(totals, powers)
    for j in range(num_whole, len(scores)):
        scores[j] = exp2(scores[j] - highest)
        total += scores[j]
    return highest, exp2(most - highest), total + sum_of_wide(totals)
