"""Numbers in their order, as integers, of which compiled functions compare many at a time; needs numba."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types

from eagle_rt.kernels.cpu.vectors import number_of, operation

F32, I32 = ir.FloatType(), ir.IntType(32)
SIGN, SIZE, INFINITY, LARGEST = (I32(bits) for bits in (0x80000000, 0x7FFFFFFF, 0x7F800000, 0x7FFFFFFF))
LEAST_ORDER = np.int32(-(2**31))
# So many numbers are compared before it is asked which of them it was.
BLOCK = 1024


@operation
def order_of(_: Any, number: Any) -> Any:
    """An integer that is larger for larger float32 numbers, the same for equal ones, and the largest for what is no number."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        bits = builder.bitcast(values[0], I32)
        size = builder.and_(bits, SIZE)
        # Of negative numbers the larger ones have the fewer bits.
        order = builder.select(builder.icmp_unsigned(">=", bits, SIGN), builder.neg(size), bits)
        return builder.select(builder.icmp_unsigned(">", size, INFINITY), LARGEST, order)

    return types.int32(types.float32), build


@operation
def number_in_order(_: Any, order: Any) -> Any:
    """The float32 of such an integer; some that is no number, of the largest one."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        bits = builder.select(builder.icmp_signed("<", values[0], I32(0)), builder.or_(builder.neg(values[0]), SIGN), values[0])
        return builder.bitcast(bits, F32)

    return types.float32(types.int32), build


@njit(cache=True)
def largest_order(numbers: np.ndarray) -> np.int32:
    """Of the numbers in an `array_of`."""
    largest = LEAST_ORDER
    for place in range(len(numbers)):  # over elements it would be one by one
        largest = max(largest, order_of(number_of(numbers[place])))
    return largest
