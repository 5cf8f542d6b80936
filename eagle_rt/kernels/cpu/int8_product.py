"""Products of rows with a weight of eight bits on a CPU, compiled by numba; needs numba.

Half the bytes of bfloat16, which is what products of few rows cost. Only weights are rounded so coarsely, each output's by a scale
of its own: a number of a row keeps sixteen bits, as two bytes that are multiplied one by one, so that a row whose numbers are of
very different sizes comes out too. A row comes out the same whatever is multiplied beside it.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import types
from numpy.typing import NDArray

from eagle_rt.kernels.cpu.instructions import has_instructions
from eagle_rt.kernels.cpu.product import (
    F32,
    I32,
    I64,
    LANES,
    MANY_TILES,
    NUM_VECTORS,
    PANEL,
    SUMS,
    WORDS,
    build_tile,
    call,
    cases_of,
    spread,
    store_sums,
    vectors_at,
)
from eagle_rt.kernels.cpu.vectors import ZERO, number_of, operation

# Rows whose sums are in registers at a time, each of them twice.
MOST_ROWS = 6
# Numbers of a row that are multiplied at once, and of how many steps the largest is above nothing.
TOGETHER, MOST_STEPS = 4, np.float32(32767)
# What is added to the steps of a number, so that both its bytes are positive; halves are rounded up.
OFFSET = np.float32(32768.5)
HAS_BYTE_DOT = has_instructions("avx512vnni")


class Int8Weights(NamedTuple):
    """W [out, in] in panels and steps of `scales`, and a bias.

    words: [N / PANEL, K, PANEL] uint32 of four signed bytes, K words for `in`; scales, bias: [N] float32; offsets: [N] int32, what
    the upper bytes of x find too much, negated: 128 times the sum of a row of W.
    """

    words: NDArray[np.uint32]
    scales: NDArray[np.float32]
    offsets: NDArray[np.int32]
    bias: NDArray[np.float32]


def add_byte_products(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """sums + weights * x, of words that are four bytes all products: those of weights have a sign, and those of x have none."""
    if HAS_BYTE_DOT:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, sums, x, weights)
    for place in range(TOGETHER):
        left, right = (ir.Constant(WORDS, [8 * count] * LANES) for count in (TOGETHER - 1 - place, TOGETHER - 1))
        byte = builder.ashr(builder.shl(weights, left), right)
        sums = builder.add(sums, builder.mul(byte, builder.lshr(builder.shl(x, left), right)))
    return sums


@operation
def multiply_bytes(_: Any, x: Any, x_scales: Any, first: Any, num_rows: Any, weights: Any, panel: Any, outputs: Any) -> Any:
    """Fills a panel of outputs [T, N] for num_rows of the rows, `first` and those after it, 1 to MOST_ROWS.

    x: [2 * T * K] uint32 of four bytes; those rows as [K, num_rows, 2], upper bytes and lower ones; x_scales: [T].
    """

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x_array, x_scales_array, outputs_array = (
            context.make_array(signature.args[i])(context, builder, values[i]) for i in (0, 1, 6)
        )
        parts = {
            name: context.make_array(kind)(context, builder, builder.extract_value(values[4], place))
            for place, (name, kind) in enumerate(zip(weights.fields, weights.types, strict=True))
        }
        first, num_rows, panel = values[2], values[3], values[5]
        size = builder.extract_value(parts["words"].shape, 1)
        width = builder.extract_value(outputs_array.shape, 1)
        column = builder.mul(panel, I64(PANEL))
        x_data = builder.gep(x_array.data, [builder.mul(builder.mul(first, size), I64(2))])
        weight_data = builder.gep(parts["words"].data, [builder.mul(column, size)])

        def panel_of(name: str, kind: Any) -> list[Any]:
            return [builder.load(place, align=4) for place in vectors_at(builder, parts[name].data, column, kind)]

        starts = [*panel_of("offsets", WORDS), *[ir.Constant(WORDS, [0] * LANES)] * NUM_VECTORS]
        scales, bias = panel_of("scales", SUMS), panel_of("bias", SUMS)
        upper = ir.Constant(SUMS, [256.0] * LANES)
        for count in cases_of(builder, num_rows, MOST_ROWS):
            sums = build_tile(builder, size, x_data, weight_data, starts * count, add_byte_products)
            sums = [builder.sitofp(total, SUMS) for total in sums]
            for row in range(count):
                number = builder.add(first, I64(row))
                own = sums[2 * row * NUM_VECTORS : 2 * (row + 1) * NUM_VECTORS]
                x_scale = spread(builder, builder.load(builder.gep(x_scales_array.data, [number]), align=4), SUMS)
                results = [
                    builder.fadd(builder.fmul(builder.fadd(builder.fmul(high, upper), low), builder.fmul(x_scale, scale)), start)
                    for high, low, scale, start in zip(own[:NUM_VECTORS], own[NUM_VECTORS:], scales, bias, strict=True)
                ]
                store_sums(builder, results, outputs_array.data, builder.add(builder.mul(number, width), column))
        return context.get_dummy_value()

    return types.void(x, x_scales, types.intp, types.intp, weights, types.intp, outputs), build


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
def cut_row(row: np.ndarray, place: int, step: int, words: np.ndarray) -> np.float32:
    """Puts the numbers of a row into words from a place on, `step` apart, their upper bytes and beside them the lower ones; the
    size of their steps, no number where one of the row is none."""
    most_bits = np.int32(0)
    for k in range(len(row)):
        most_bits = max(most_bits, size_bits(number_of(row[k])))
    most = number_of_bits(most_bits)
    has_numbers = most < np.inf
    steps = MOST_STEPS / most if has_numbers and most > ZERO else ZERO
    halves = np.empty(len(row), dtype=np.uint16)
    for k in range(len(row)):
        halves[k] = np.int32(number_of(row[k]) * steps + OFFSET)
    for four in halves.view(np.uint64):
        words[place], words[place + 1] = every_other_byte(four >> np.uint64(8)), every_other_byte(four)
        place += step
    return most / MOST_STEPS if has_numbers else np.float32(np.nan)


@njit(cache=True)
def every_other_byte(four: np.uint64) -> np.uint32:
    """The lower bytes of four halves."""
    lower = four & np.uint64(0x00FF00FF00FF00FF)
    pairs = lower | (lower >> np.uint64(8))
    return np.uint32(pairs & np.uint64(0xFFFF)) | np.uint32((pairs >> np.uint64(16)) & np.uint64(0xFFFF0000))


@njit(cache=True)
def cut_rows(x: np.ndarray, first: int, last: int, words: np.ndarray, scales: np.ndarray) -> None:
    """Fills what is theirs of words [2 * T * K], as [K, last - first, 2], and of scales [T] with the rows from first to last of x
    [T, in]."""
    num_rows, size = last - first, x.shape[1] // TOGETHER
    for row in range(num_rows):
        scales[first + row] = cut_row(x[first + row], 2 * (first * size + row), 2 * num_rows, words)


@njit(cache=True, parallel=True)
def int8_product(x: np.ndarray, weights: Int8Weights, outputs: np.ndarray) -> None:
    """Fills outputs [T, N] with x [T, in] times the weights, and their bias.

    x, outputs: as `vectors.array_of`, float32 or uint16 that are bfloat16.
    """
    num_rows, size = x.shape[0], weights.words.shape[1]
    num_tiles = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    words, scales = np.empty(2 * num_rows * size, dtype=np.uint32), np.empty(num_rows, dtype=np.float32)
    if num_tiles < MANY_TILES:
        for tile in range(num_tiles):
            cut_rows(x, num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles, words, scales)
    else:
        for tile in prange(num_tiles):
            cut_rows(x, num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles, words, scales)
    for panel in prange(len(weights.words)):
        for tile in range(num_tiles):
            first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            multiply_bytes(words, scales, first, last - first, weights, panel, outputs)
