"""Words that numba lacks for compiled functions: vectors, and numbers of sixteen bits; needs numba."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic, models, overload, register_model
from numpy.typing import NDArray
from torch import Tensor

# Numbers of a vector: those of an AVX2 register. The pairs of a row are a multiple of it.
LANES = 8
LEAST = np.float32(-126)  # the least exponent of a float32
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
LOG2_E = np.float32(1 / math.log(2))
# 2 ** x for |x| <= 1/2: Taylor's series up to the sixth power, within 1e-7.
POWERS = C1, C2, C3, C4, C5, C6 = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(1, 7))
# What is not a number stays so, and sums keep their order: a function is compiled into every other one that calls it, in each of
# them another order may be the fastest, and which of these a process takes depends on whether it compiles them or finds them kept.
FLAGS = ("contract", "nsz")
F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def operation(typed: Callable) -> Callable[..., Any]:
    """A word for compiled functions: `typed` gives its signature, and what builds its instructions."""
    return intrinsic(typed)


class Vector(types.Type):
    """Numbers in a register."""

    def __init__(self, name: str, element: ir.Type, num_lanes: int = LANES) -> None:
        self.llvm_type = ir.VectorType(element, num_lanes)
        super().__init__(name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm_type)


floats = Vector("floats", F32)
# Two neighbouring numbers of a row in one integer, so that all of a vector are widened at once: two bfloat16, or two float32.
pairs_of_16_bits, pairs_of_32_bits = Vector("pairs of 16 bits", I32), Vector("pairs of 32 bits", I64)
VECTOR_OF = {types.float32: floats, types.int32: pairs_of_16_bits, types.int64: pairs_of_32_bits}


def pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, vector: ir.Type) -> Any:
    """Where such a vector begins at an index of an array, counted as if it were flat."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return pointer(context, builder, array_type, array, index, VECTOR_OF[array_type.dtype].llvm_type)


def halves_of(builder: Any, pairs: Any, kind: Any) -> tuple[Any, Any]:
    """The two numbers of each pair as floats, first those in the lower bits: a bfloat16 is the upper half of a float32."""
    if kind is pairs_of_16_bits:
        first = builder.shl(pairs, ir.Constant(kind.llvm_type, [16] * LANES))
        second = builder.and_(pairs, ir.Constant(kind.llvm_type, [0xFFFF0000] * LANES))
    else:
        first = builder.trunc(pairs, pairs_of_16_bits.llvm_type)
        second = builder.trunc(builder.lshr(pairs, ir.Constant(kind.llvm_type, [32] * LANES)), pairs_of_16_bits.llvm_type)
    return builder.bitcast(first, floats.llvm_type), builder.bitcast(second, floats.llvm_type)


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

    return total(total, a, b), build


@operation
def add(_: Any, a: Any, b: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fadd(*values, flags=FLAGS)

    return a(a, b), build


@operation
def multiply(_: Any, a: Any, b: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fmul(*values, flags=FLAGS)

    return floats(floats, floats), build


@operation
def first_of(_: Any, pairs: Any) -> Any:
    """The numbers that come first in their pairs."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return halves_of(builder, values[0], pairs)[0]

    return floats(pairs), build


@operation
def second_of(_: Any, pairs: Any) -> Any:
    """The other ones."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return halves_of(builder, values[0], pairs)[1]

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


def array_of(x: Tensor) -> NDArray:
    """The memory of a tensor for a compiled function: bfloat16 as the integers that `number_of` and `stored_as` read and make."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def words_of(array: NDArray) -> NDArray:
    """An `array_of` as products read it: float32, or int32 of two bfloat16."""
    return array if array.dtype == np.float32 else array.view(np.int32)


def pairs_of(array: NDArray) -> NDArray:
    """An `array_of` as attention reads it: int64 of two float32, or int32 of two bfloat16."""
    return array.view(np.int64 if array.dtype == np.float32 else np.int32)


@overload(words_of)
def _compiled_words_of(array):  # numba wants the parameters of what it returns, and no annotations
    return (lambda array: array) if array.dtype == types.float32 else (lambda array: array.view(np.int32))


@overload(pairs_of)
def _compiled_pairs_of(array):  # numba wants the parameters of what it returns, and no annotations
    word = np.int64 if array.dtype == types.float32 else np.int32
    return lambda array: array.view(word)


@operation
def number_of(_: Any, element: Any) -> Any:
    """An element of an `array_of` as a float32."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if element == types.float32:
            return values[0]
        return builder.bitcast(builder.shl(builder.zext(values[0], I32), I32(16)), F32)

    return types.float32(element), build


@operation
def stored_as(_: Any, number: Any, array: Any) -> Any:
    """A float32 as such an array keeps it: rounded to the nearest number that has room, to an even one of two."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if array.dtype == types.float32:
            return values[0]
        bits = builder.bitcast(values[0], I32)
        rounded = builder.add(builder.add(bits, I32(0x7FFF)), builder.and_(builder.lshr(bits, I32(16)), I32(1)))
        return builder.trunc(builder.lshr(rounded, I32(16)), ir.IntType(16))

    return array.dtype(types.float32, array), build


@njit(cache=True, fastmath=set(FLAGS))
def exp2(x: np.float32) -> np.float32:
    """2 ** x for x <= 0, within some units of the last place."""
    x = LEAST if x < LEAST else x
    whole = np.int32(x - HALF)
    part = x - np.float32(whole)
    fraction = ONE + part * (C1 + part * (C2 + part * (C3 + part * (C4 + part * (C5 + part * C6)))))
    return power_of_two(whole) * fraction


@njit(cache=True, fastmath=set(FLAGS), error_model="numpy")
def sigmoid(x: np.float32) -> np.float32:
    power = exp2(-abs(x) * LOG2_E)
    return (ONE if x >= ZERO else power) / (ONE + power)
