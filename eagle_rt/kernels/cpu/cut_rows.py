"""Rows as whole numbers, for products with weights of eight bits on a CPU; needs numba.

A number of a row keeps sixteen bits, so that a row whose numbers are of very different sizes comes out too. It is multiplied as two
bytes where the processor multiplies bytes, and as it is elsewhere.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import overload

from eagle_rt.kernels.cpu.instructions import has_instructions
from eagle_rt.kernels.cpu.vectors import ZERO, number_of, operation

HAS_BYTE_DOT = has_instructions("avx512vnni")
# Numbers of a row that two words hold, and of how many steps the largest is above nothing.
TOGETHER, MOST_STEPS = 4, np.float32(32767)
# Rows of smaller numbers count as nothing: the number of their steps in one would have no room.
SMALLEST = np.float32(1e-30)
# What is added to the steps of a number, so that both its bytes are positive; halves are rounded up.
OFFSET = np.float32(32768.5)
F32, I32 = ir.FloatType(), ir.IntType(32)


def words_for(size: int) -> np.ndarray:
    """What `cut_rows` fills: uint32 of four bytes, or int32 of two halves, as the processor multiplies faster."""
    raise NotImplementedError("only in compiled functions")


@overload(words_for)
def _compiled_words_for(size):  # numba wants the parameters of what it returns, and no annotations
    dtype = np.uint32 if HAS_BYTE_DOT else np.int32
    return lambda size: np.empty(size, dtype=dtype)


@operation
def size_bits(_: Any, number: Any) -> Any:
    """Of a float32 without its sign: of two numbers the larger has more, and what is no number has most."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.and_(builder.bitcast(values[0], I32), I32(0x7FFFFFFF))

    return types.int32(types.float32), build


@operation
def number_of_bits(_: Any, bits: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], F32)

    return types.float32(types.int32), build


@njit(cache=True)
def largest_of(row: np.ndarray) -> np.float32:
    """The size of the largest number of a row; infinity or no number where one of the row is that."""
    most_bits = np.int32(0)
    for k in range(len(row)):
        most_bits = max(most_bits, size_bits(number_of(row[k])))
    return number_of_bits(most_bits)


@njit(cache=True)
def cut_row(row: np.ndarray, place: int, step: int, words: np.ndarray) -> np.float32:
    """Puts the numbers of a row into words from a place on, four into two of them, `step` apart; the size of their steps, no number
    where one of the row is none."""
    most = largest_of(row)
    has_numbers = most < np.inf
    steps = MOST_STEPS / most if has_numbers and most > SMALLEST else ZERO
    halves = np.empty(len(row), dtype=np.uint16)
    for k in range(len(row)):
        halves[k] = np.int32(number_of(row[k]) * steps + OFFSET)
    for four in halves.view(np.uint64):
        put_four(four, words, place)
        place += step
    return most / MOST_STEPS if has_numbers else np.float32(np.nan)


def put_four(four: np.uint64, words: np.ndarray, place: int) -> None:
    """Halves that are 2**15 too large, at a place and the next: their upper and their lower bytes, or the even and the odd ones as
    they are, with their sign."""
    raise NotImplementedError("only in compiled functions")


@overload(put_four)
def _compiled_put_four(four, words, place):  # numba wants the parameters of what it returns, and no annotations
    def put_bytes(four, words, place):
        words[place], words[place + 1] = every_other_byte(four >> np.uint64(8)), every_other_byte(four)

    def put_halves(four, words, place):
        four ^= np.uint64(0x8000800080008000)
        words[place], words[place + 1] = every_other_half(four), every_other_half(four >> np.uint64(16))

    return put_bytes if words.dtype == types.uint32 else put_halves


@njit(cache=True)
def every_other_byte(four: np.uint64) -> np.uint32:
    """The lower bytes of four halves."""
    lower = four & np.uint64(0x00FF00FF00FF00FF)
    pairs = lower | (lower >> np.uint64(8))
    return np.uint32(pairs & np.uint64(0xFFFF)) | np.uint32((pairs >> np.uint64(16)) & np.uint64(0xFFFF0000))


@njit(cache=True)
def every_other_half(four: np.uint64) -> np.int32:
    """The first and the third of four halves."""
    return np.int32((four & np.uint64(0xFFFF)) | ((four >> np.uint64(16)) & np.uint64(0xFFFF0000)))


@njit(cache=True)
def cut_rows(x: np.ndarray, first: int, last: int, words: np.ndarray, scales: np.ndarray) -> None:
    """Fills what is theirs of words [2 * T * K], as [K, last - first, 2], and of scales [T] with the rows from first to last of x
    [T, in]."""
    num_rows, size = last - first, x.shape[1] // TOGETHER
    for row in range(num_rows):
        scales[first + row] = cut_row(x[first + row], 2 * (first * size + row), 2 * num_rows, words)
