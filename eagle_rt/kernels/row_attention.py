"""Attention of single rows on a CPU, the cache read where it lies, compiled by numba; needs numba.

torch's kernel multiplies matrices, and a row that is decoded, or a tree of a few, is hardly one: it takes two to four times as
long for them. Here a row, and two of the heads that share a key, go through the rows that they see: no masks, no copies of rows
side by side, and what comes out for a row does not depend on which others are in the batch.

The loops spell out vectors, for which numba has no words: left to itself the compiler makes some of these loops, four times slower,
of single numbers.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

# Numbers of a vector: those of an AVX2 register. The pairs of a row are a multiple of it.
LANES = 8
LEAST = np.float32(-126)  # the least exponent of a float32
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
LOG2_E = np.float32(1 / math.log(2))
# 2 ** x for |x| <= 1/2: Taylor's series up to the sixth power, within 1e-7.
C1, C2, C3, C4, C5, C6 = (np.float32(math.log(2) ** n / math.factorial(n)) for n in range(1, 7))
# Sums in any order; what is not a number stays so.
FLAGS = ("reassoc", "contract", "nsz", "arcp")
F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def operation(typed: Callable) -> Callable[..., Any]:
    """A word for compiled functions: `typed` gives its signature, and what builds its instructions."""
    return intrinsic(typed)


class Vector(types.Type):
    """LANES numbers in a register."""

    def __init__(self, name: str, element: ir.Type) -> None:
        self.llvm_type = ir.VectorType(element, LANES)
        super().__init__(name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm_type)


floats = Vector("floats", F32)
# Two neighbouring numbers of a row in one integer, so that all of a vector are widened at once: two bfloat16, or two float32.
pairs_of_16_bits, pairs_of_32_bits = Vector("pairs of 16 bits", I32), Vector("pairs of 32 bits", I64)
VECTOR_OF = {types.float32: floats, types.int32: pairs_of_16_bits, types.int64: pairs_of_32_bits}


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), VECTOR_OF[array_type.dtype].llvm_type.as_pointer())


@operation
def load(_: Any, array: Any, index: Any) -> Any:
    """The vector of a flat array that begins at an index."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_pointer(context, builder, array, *values), align=array.dtype.bitwidth // 8)

    return VECTOR_OF[array.dtype](array, types.intp), build


@operation
def store(_: Any, array: Any, index: Any, vector: Any) -> Any:
    """A vector of floats to where `load` finds it."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[2], _pointer(context, builder, array, *values[:2]), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, floats), build


@operation
def spread(_: Any, number: Any) -> Any:
    """The vector of one number, everywhere."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        first = builder.insert_element(ir.Constant(floats.llvm_type, ir.Undefined), values[0], I32(0))
        return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))

    return floats(types.float32), build


@operation
def add_product(_: Any, total: Any, a: Any, b: Any) -> Any:
    """total + a * b, rounded once where the processor can."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fadd(values[0], builder.fmul(values[1], values[2], flags=FLAGS), flags=FLAGS)

    return floats(floats, floats, floats), build


@operation
def multiply(_: Any, a: Any, b: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fmul(*values, flags=FLAGS)

    return floats(floats, floats), build


@operation
def sum_of(_: Any, vector: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(F32, [F32, floats.llvm_type])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
        return builder.call(reduce, [F32(0.0), values[0]], fastmath=FLAGS)

    return types.float32(floats), build


@operation
def first_of(_: Any, pairs: Any) -> Any:
    """The numbers that come first in their pairs, in the lower bits, as floats: a bfloat16 is the upper half of a float32."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if pairs is pairs_of_16_bits:
            bits = builder.shl(values[0], ir.Constant(pairs.llvm_type, [16] * LANES))
        else:
            bits = builder.trunc(values[0], pairs_of_16_bits.llvm_type)
        return builder.bitcast(bits, floats.llvm_type)

    return floats(pairs), build


@operation
def second_of(_: Any, pairs: Any) -> Any:
    """The other ones."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if pairs is pairs_of_16_bits:
            bits = builder.and_(values[0], ir.Constant(pairs.llvm_type, [0xFFFF0000] * LANES))
        else:
            upper = builder.lshr(values[0], ir.Constant(pairs.llvm_type, [32] * LANES))
            bits = builder.trunc(upper, pairs_of_16_bits.llvm_type)
        return builder.bitcast(bits, floats.llvm_type)

    return floats(pairs), build


@operation
def store_pairs(_: Any, array: Any, index: Any, evens: Any, odds: Any) -> Any:
    """Floats to where `load` finds them as pairs: each is rounded to the nearest number that has room, to an even one of two."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        bits = [builder.bitcast(value, pairs_of_16_bits.llvm_type) for value in values[2:]]
        halves = VECTOR_OF[array.dtype].llvm_type
        if array.dtype == types.int32:
            shift, one, most = (ir.Constant(halves, [number] * LANES) for number in (16, 1, 0x7FFF))
            bits = [builder.add(builder.add(own, most), builder.and_(builder.lshr(own, shift), one)) for own in bits]
            first, second = builder.lshr(bits[0], shift), builder.and_(bits[1], ir.Constant(halves, [0xFFFF0000] * LANES))
        else:
            first, upper = (builder.zext(own, halves) for own in bits)
            second = builder.shl(upper, ir.Constant(halves, [32] * LANES))
        place = _pointer(context, builder, array, *values[:2])
        builder.store(builder.or_(first, second), place, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, floats, floats), build


@operation
def power_of_two(_: Any, exponent: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(values[0], I32(127)), I32(23)), F32)

    return types.float32(types.int32), build


@njit(cache=True, fastmath=set(FLAGS))
def exp2(x: np.float32) -> np.float32:
    """2 ** x for x <= 0, within some units of the last place."""
    x = LEAST if x < LEAST else x
    whole = np.floor(x + HALF)
    part = x - whole
    fraction = ONE + part * (C1 + part * (C2 + part * (C3 + part * (C4 + part * (C5 + part * C6)))))
    return power_of_two(np.int32(whole)) * fraction


@njit(cache=True, fastmath=set(FLAGS))
def softmax(scores: np.ndarray) -> np.float32:
    """Scores [n] to the base 2 become weights, still to be divided by their sum, which is returned."""
    most, total = scores[0], ZERO
    for score in scores:
        most = max(most, score)
    for j in range(len(scores)):
        scores[j] = exp2(scores[j] - most)
        total += scores[j]
    return total


@njit(cache=True, fastmath=set(FLAGS))
def score_keys(even: np.ndarray, odd: np.ndarray, rows: np.ndarray, starts: np.ndarray, scores: np.ndarray) -> None:
    """scores [2, n] of two queries for n keys. even, odd: [2 * P] the numbers of both queries at even and at odd dimensions.
    rows: the flat pairs of a cache; starts: [n] where the keys begin there."""
    num_pairs = len(even) // 2
    for j, start in enumerate(starts):
        one = other = spread(ZERO)
        for i in range(0, num_pairs, LANES):
            key = load(rows, start + i)
            key_even, key_odd = first_of(key), second_of(key)
            one = add_product(add_product(one, key_even, load(even, i)), key_odd, load(odd, i))
            other = add_product(add_product(other, key_even, load(even, num_pairs + i)), key_odd, load(odd, num_pairs + i))
        scores[0, j], scores[1, j] = sum_of(one), sum_of(other)


@njit(cache=True, fastmath=set(FLAGS))
def add_values(weights: np.ndarray, rows: np.ndarray, starts: np.ndarray, offset: int, even: np.ndarray, odd: np.ndarray) -> None:
    """Fills even, odd [2 * P]: the values of n rows, `offset` pairs after their keys, by both weights [2, n] that each has."""
    num_pairs = len(even) // 2
    for i in range(0, num_pairs, LANES):
        one_even = one_odd = other_even = other_odd = spread(ZERO)
        for j, start in enumerate(starts):
            value = load(rows, start + offset + i)
            value_even, value_odd = first_of(value), second_of(value)
            one, other = spread(weights[0, j]), spread(weights[1, j])
            one_even, one_odd = add_product(one_even, one, value_even), add_product(one_odd, one, value_odd)
            other_even, other_odd = add_product(other_even, other, value_even), add_product(other_odd, other, value_odd)
        store(even, i, one_even)
        store(odd, i, one_odd)
        store(even, num_pairs + i, other_even)
        store(odd, num_pairs + i, other_odd)


@njit(cache=True, parallel=True)
def row_attention(
    queries: np.ndarray,
    cache: np.ndarray,
    outputs: np.ndarray,
    rows: np.ndarray,
    lows: np.ndarray,
    prefixes: np.ndarray,
    widths: np.ndarray,
    seen: np.ndarray,
    firsts: np.ndarray,
    table: np.ndarray,
) -> None:
    """Fills some rows [R] of outputs [T, heads, P], attention of queries [T, heads, P] over a cache [S, 2, kv heads, P].

    All are pairs, int32 of bfloat16 or int64 of float32. Of its sequence each of the R rows sees the places from lows to prefixes,
    and of `widths` places from there on those that seen [T, C] says. firsts: [R] the first slots of sequences whose slots lie side
    by side, and of the others -1 less where theirs begin in the table.
    """
    num_heads, num_kv_heads, num_pairs = queries.shape[1], cache.shape[2], cache.shape[3]
    num_shared = num_heads // num_kv_heads
    scale = spread(LOG2_E / np.sqrt(np.float32(2 * num_pairs)))
    flat_queries, flat_cache, flat_outputs = queries.reshape(-1), cache.reshape(-1), outputs.reshape(-1)
    for item in prange(len(rows) * num_kv_heads):
        index, kv_head = item // num_kv_heads, item % num_kv_heads
        row, prefix, first, num_seen = rows[index], prefixes[index], firsts[index], 0
        starts = np.empty(prefix + widths[index] - lows[index], dtype=np.int64)
        for place in range(lows[index], prefix + widths[index]):
            if place < prefix or seen[row, place - prefix]:
                slot = first + place if first >= 0 else table[place - 1 - first]
                starts[num_seen] = (slot * 2 * num_kv_heads + kv_head) * num_pairs
                num_seen += 1
        starts = starts[:num_seen]
        weights = np.empty((2, num_seen), dtype=np.float32)
        even, odd = np.empty(2 * num_pairs, dtype=np.float32), np.empty(2 * num_pairs, dtype=np.float32)
        last = (kv_head + 1) * num_shared - 1
        for head in range(last + 1 - num_shared, last + 1, 2):
            # Of an odd number the last goes with itself.
            both = (head, min(head + 1, last))
            for k in range(2):
                own = (row * num_heads + both[k]) * num_pairs
                for i in range(0, num_pairs, LANES):
                    query = load(flat_queries, own + i)
                    store(even, k * num_pairs + i, multiply(first_of(query), scale))
                    store(odd, k * num_pairs + i, multiply(second_of(query), scale))
            score_keys(even, odd, flat_cache, starts, weights)
            totals = (softmax(weights[0]), softmax(weights[1]))
            add_values(weights, flat_cache, starts, num_kv_heads * num_pairs, even, odd)
            for k in range(2):
                own, share = (row * num_heads + both[k]) * num_pairs, spread(ONE / totals[k])
                for i in range(0, num_pairs, LANES):
                    evens, odds = load(even, k * num_pairs + i), load(odd, k * num_pairs + i)
                    store_pairs(flat_outputs, own + i, multiply(evens, share), multiply(odds, share))
