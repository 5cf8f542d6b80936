"""Rows as whole numbers, for products with weights of few bits on a CPU; needs numba.

A number of a row keeps sixteen bits, so that a row whose numbers are of very different sizes comes out too. It is multiplied as two
bytes where the processor multiplies bytes, and as it is elsewhere.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import types
from numba.extending import overload

from eagle_rt.kernels.cpu.instructions import has_instructions
from eagle_rt.kernels.cpu.product import MANY_TILES
from eagle_rt.kernels.cpu.vectors import ZERO, number_of, operation

HAS_BYTE_DOT = has_instructions("avx512vnni")
# Numbers of a row that two words hold, and of how many steps the largest is above nothing: its upper byte may still be rounded up.
TOGETHER, MOST_STEPS = 4, np.float32(32639)
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
def cut_row(row: np.ndarray, halves: np.ndarray) -> np.float32:
    """Fills halves with the numbers of a row, 2**15 too large; the size of their steps, no number where one of the row is none."""
    most_bits = np.int32(0)
    for k in range(len(row)):
        most_bits = max(most_bits, size_bits(number_of(row[k])))
    most = number_of_bits(most_bits)
    has_numbers = most < np.inf
    steps = MOST_STEPS / most if has_numbers and most > ZERO else ZERO
    for k in range(len(row)):
        halves[k] = np.int32(number_of(row[k]) * steps + OFFSET)
    return most / MOST_STEPS if has_numbers else np.float32(np.nan)


def put_row(halves: np.ndarray, has_sign: bool, place: int, step: int, words: np.ndarray) -> None:
    """Puts the numbers of a row into words from a place on, four into two of them, `step` apart: their upper and their lower bytes,
    both of them with a sign or 128 too large, or the even and the odd ones as they are."""
    raise NotImplementedError("only in compiled functions")


@overload(put_row)
def _compiled_put_row(halves, has_sign, place, step, words):  # numba wants the parameters of what it returns, and no annotations
    def put_bytes(halves, has_sign, place, step, words):
        # A lower byte above 127 is one less of the upper one's steps.
        carry, sign = (np.uint64(0x0080008000800080), np.uint32(0x80808080)) if has_sign else (np.uint64(0), np.uint32(0))
        for four in halves.view(np.uint64):
            words[place] = every_other_byte((four + carry) >> np.uint64(8)) ^ sign
            words[place + 1] = every_other_byte(four)
            place += step

    def put_halves(halves, has_sign, place, step, words):
        for four in halves.view(np.uint64):
            four ^= np.uint64(0x8000800080008000)
            words[place], words[place + 1] = every_other_half(four), every_other_half(four >> np.uint64(16))
            place += step

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
def cut_rows(x: np.ndarray, first: int, last: int, words: np.ndarray, scales: np.ndarray, totals: np.ndarray) -> None:
    """Fills what is theirs of words [2 * T * K], as [K, last - first, 2], and of scales [T] with the rows from first to last of x
    [T, in]; and of totals [T, G] with the sums of the numbers of each group. Where there are no groups bytes have no sign."""
    (num_rows, size), num_groups = (last - first, x.shape[1]), totals.shape[1]
    halves = np.empty(size, dtype=np.uint16)
    for row in range(num_rows):
        scales[first + row] = cut_row(x[first + row], halves)
        for group in range(num_groups):
            total = np.int32(0)
            for k in range(size // num_groups):
                total += np.int32(halves[group * (size // num_groups) + k]) - np.int32(32768)
            totals[first + row, group] = total
        place = 2 * (first * (size // TOGETHER) + row)
        put_row(halves, num_groups > 0, place, 2 * num_rows, words)


@njit(cache=True, parallel=True)
def cut_in_tiles(x: np.ndarray, num_tiles: int, num_groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `cut_rows` fills, for x [T, in] in so many tiles of rows."""
    num_rows = len(x)
    words, scales = words_for(num_rows * x.shape[1] * 2 // TOGETHER), np.empty(num_rows, dtype=np.float32)
    totals = np.empty((num_rows, num_groups), dtype=np.float32)
    if num_tiles < MANY_TILES:
        for tile in range(num_tiles):
            cut_rows(x, num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles, words, scales, totals)
    else:
        for tile in prange(num_tiles):
            cut_rows(x, num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles, words, scales, totals)
    return words, scales, totals
