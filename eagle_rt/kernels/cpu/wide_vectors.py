"""Words for vectors of float32 as wide as a register, and softmax in them; needs numba."""

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
    LEAST,
    ONE,
    POWERS,
    ZERO,
    Vector,
    add,
    exp2,
    number_of,
    operation,
    pointer,
)

WIDE = 16 if has_instructions("avx512f") else 8
wide_floats = Vector("wide floats", F32, WIDE)
WHOLE = ir.VectorType(I32, WIDE)
# Exponents of a sum that are in the cache at a time.
CHUNK = 1024


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


@njit(cache=True, fastmath=set(FLAGS))
def sum_of_powers(row: np.ndarray, highest: np.float32, sharpness: np.float32) -> np.float32:
    """The sum of 2 ** (sharpness * (x - highest)) of an `array_of`, no number where one of x is none."""
    exponents, total = np.empty(CHUNK, dtype=np.float32), ZERO
    first_total = second_total = spread_wide(ZERO)
    for first in range(0, len(row), CHUNK):
        part = row[first : first + CHUNK]
        for place in range(len(part)):
            exponents[place] = (number_of(part[place]) - highest) * sharpness
        num_whole = len(part) // (2 * WIDE) * (2 * WIDE)
        for place in range(0, num_whole, 2 * WIDE):
            first_total = add(first_total, powers_of(load_wide(exponents, place)))
            second_total = add(second_total, powers_of(load_wide(exponents, place + WIDE)))
        for place in range(num_whole, len(part)):
            total += exp2(exponents[place])
    return total + sum_of_wide(add(first_total, second_total))
