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
ZERO, HALF, ONE, NOTHING = np.float32(0), np.float32(0.5), np.float32(1), np.float32(-1e30)
# Rows of a cache that go through the caches of a processor together, for all queries.
BLOCK = 64
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
    """The vector that begins at an index of an array, counted as if it were flat."""

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
    """Fills scores [2, n] of two queries, even, odd [2, P], for the keys that begin at places [n]."""
    num_pairs = even.shape[1]
    for j, key in enumerate(keys):
        one = other = spread(ZERO)
        for i in range(0, num_pairs, LANES):
            pairs = load(cache, key + i)
            key_even, key_odd = first_of(pairs), second_of(pairs)
            one = add_product(add_product(one, key_even, load(even, i)), key_odd, load(odd, i))
            other = add_product(add_product(other, key_even, load(even, num_pairs + i)), key_odd, load(odd, num_pairs + i))
        scores[0, j], scores[1, j] = sum_of(one), sum_of(other)


@njit(cache=True, fastmath=set(FLAGS))
def add_values(
    weights: np.ndarray, cache: np.ndarray, keys: np.ndarray, offset: int, factors: np.ndarray, even: np.ndarray, odd: np.ndarray
) -> None:
    """Multiplies even, odd [2, P] with factors [2] and adds the values, an offset behind their keys [n], by weights [2, n]."""
    num_pairs = even.shape[1]
    for i in range(0, num_pairs, LANES):
        one_even, one_odd = multiply(load(even, i), spread(factors[0])), multiply(load(odd, i), spread(factors[0]))
        other_even = multiply(load(even, num_pairs + i), spread(factors[1]))
        other_odd = multiply(load(odd, num_pairs + i), spread(factors[1]))
        for j, key in enumerate(keys):
            pairs = load(cache, key + offset + i)
            value_even, value_odd = first_of(pairs), second_of(pairs)
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
    bounds: np.ndarray,
    lows: np.ndarray,
    prefixes: np.ndarray,
    widths: np.ndarray,
    seen: np.ndarray,
    firsts: np.ndarray,
    table: np.ndarray,
) -> None:
    """Fills some rows [R] of outputs [T, heads, P], attention of queries [T, heads, P] over a cache [S, 2, kv heads, P].

    All are pairs, int32 of bfloat16 or int64 of float32. Of its sequence each of the R rows sees the places from lows to prefixes,
    and of `widths` places from there on those that seen [T, C] says. bounds: [n + 1] where runs of rows begin and end that are of
    one sequence: they go through its cache together, block by block, so that it is read from memory once. firsts, table: of the
    R rows' sequences, see `HostRows.firsts_and_table`.
    """
    num_heads, num_kv_heads, num_pairs = queries.shape[1], cache.shape[2], cache.shape[3]
    num_shared = num_heads // num_kv_heads
    scale = LOG2_E / np.sqrt(np.float32(2 * num_pairs))
    for item in prange((len(bounds) - 1) * num_kv_heads):
        kv_head, begin, end = item % num_kv_heads, bounds[item // num_kv_heads], bounds[item // num_kv_heads + 1]
        # Two heads of a row at a time; of an odd number the last goes with itself.
        shape = (end - begin, (num_shared + 1) // 2, 2, num_pairs)
        query_even, query_odd = np.empty(shape, dtype=np.float32), np.empty(shape, dtype=np.float32)
        even, odd = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
        places, most = np.empty(shape[:3], dtype=np.int64), np.full(shape[:3], NOTHING, dtype=np.float32)
        total, factors = np.zeros(shape[:3], dtype=np.float32), np.empty(2, dtype=np.float32)
        for r, c, k in np.ndindex(shape[:3]):
            head = kv_head * num_shared + min(2 * c + k, num_shared - 1)
            places[r, c, k] = (rows[begin + r] * num_heads + head) * num_pairs
            read_query(queries, int(places[r, c, k]), scale, query_even[r, c, k], query_odd[r, c, k])
        block, visible = np.empty(BLOCK, dtype=np.int64), np.empty(BLOCK, dtype=np.int64)
        scores = np.empty((2, BLOCK), dtype=np.float32)
        first, length = firsts[begin], prefixes[end - 1] + widths[end - 1]
        for start in range(lows[begin:end].min(), length, BLOCK):
            stop = min(start + BLOCK, length)
            for place in range(start, stop):
                slot = first + place if first >= 0 else table[place - 1 - first]
                block[place - start] = (slot * 2 * num_kv_heads + kv_head) * num_pairs
            for r in range(end - begin):
                low, prefix, width, num_seen = lows[begin + r], prefixes[begin + r], widths[begin + r], 0
                for place in range(max(low, start), min(prefix + width, stop)):
                    if place < prefix or seen[rows[begin + r], place - prefix]:
                        visible[num_seen] = block[place - start]
                        num_seen += 1
                if num_seen:
                    keys = visible[:num_seen]
                    for c in range(shape[1]):
                        score_keys(query_even[r, c], query_odd[r, c], cache, keys, scores)
                        for k in range(2):
                            most[r, c, k], factors[k], added = softmax(scores[k, :num_seen], most[r, c, k])
                            total[r, c, k] = total[r, c, k] * factors[k] + added
                        add_values(scores, cache, keys, num_kv_heads * num_pairs, factors, even[r, c], odd[r, c])
        for r, c, k in np.ndindex(shape[:3]):
            write_output(even[r, c, k], odd[r, c, k], np.float32(ONE / total[r, c, k]), outputs, int(places[r, c, k]))
