"""Products of rows with a weight of four bits on a CPU, compiled by numba; needs numba.

A quarter of the bytes of bfloat16, and what belongs to each group of inputs: the size of its steps, and which of them is nothing.
The numbers of a row are rounded to eight bits, by a scale of each such group: that is no further from the exact than bfloat16 is,
about, and twice as fast as sixteen bits. A row comes out the same whatever is multiplied beside it.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import types
from numpy.typing import NDArray

from eagle_rt.kernels.cpu.cut_rows import HAS_BYTE_DOT, SMALLEST, largest_of
from eagle_rt.kernels.cpu.product import (
    I64,
    LANES,
    MANY_TILES,
    NUM_VECTORS,
    PANEL,
    SUMS,
    WORDS,
    Parts,
    add_word,
    arrays_in,
    call,
    cases_of,
    spread,
    store_sums,
    vectors_at,
)
from eagle_rt.kernels.cpu.vectors import ZERO, number_of, operation
from eagle_rt.kernels.cpu.whole_numbers import (
    BYTES,
    HALVES,
    add_byte_products,
    add_bytes_to_halves,
    add_half_products,
    build_groups,
    looked_up,
)
from eagle_rt.kernels.four_bits import GROUP

# Rows whose sums are in registers at a time.
MOST_ROWS = 8 if HAS_BYTE_DOT else 5
# Inputs that are in one word of a weight, and in one of a row.
IN_WORD, IN_ROW_WORD = 8, 4
WORDS_OF_GROUP = GROUP // IN_WORD
# Of how many steps the largest number of a group of a row is above nothing, and what makes all of them positive; halves are rounded
# up.
MOST_STEPS, OFFSET = np.float32(127), np.float32(128.5)
# Of so many words of a group the products have room in sixteen bits: 2 * 2 * 2 * 127 * 24 of the largest levels that there are.
WORDS_WITH_ROOM = 2
HALF_FLOATS, SMALL, SIXTEEN = ir.VectorType(ir.HalfType(), LANES), *(ir.VectorType(ir.IntType(8), size) for size in (LANES, 16))
# Whether four products of bytes are added to a word at once.
ADDS_WORDS = HAS_BYTE_DOT


class Int4Weights(NamedTuple):
    """W [out, in] in panels, and a bias: an input of a group g counts scales * ratios[g] * (levels[its four bits] - nothings[g]).

    words: [N / PANEL, K, PANEL] uint32 of eight inputs: the first four in the lower halves of the bytes, the others in the upper
    ones. ratios: [N / PANEL, G, PANEL] uint16 that are float16, and nothings as many uint8; levels: [16] uint8, at most 24; scales,
    bias: [N] float32.
    """

    words: NDArray[np.uint32]
    ratios: NDArray[np.uint16]
    nothings: NDArray[np.uint8]
    levels: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bias: NDArray[np.float32]


@operation
def multiply_cut(
    _: Any, x: Any, x_scales: Any, x_totals: Any, first: Any, num_rows: Any, weights: Any, panel: Any, outputs: Any
) -> Any:
    """Fills a panel of outputs [T, N] for num_rows of the rows, `first` and those after it, 1 to MOST_ROWS.

    x, x_scales, x_totals: of `cut_groups`.
    """

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x_array, x_scales_array, totals_array, outputs_array = (
            context.make_array(signature.args[i])(context, builder, values[i]) for i in (0, 1, 2, 7)
        )
        parts = arrays_in(context, builder, weights, values[5])
        first, num_rows, panel = values[3], values[4], values[6]
        size, num_groups = (builder.extract_value(parts[name].shape, 1) for name in ("words", "ratios"))
        width, column = builder.extract_value(outputs_array.shape, 1), builder.mul(panel, I64(PANEL))
        x_data = builder.gep(x_array.data, [builder.mul(first, builder.mul(size, I64(IN_WORD // IN_ROW_WORD)))])
        weight_data = builder.gep(parts["words"].data, [builder.mul(column, size)])
        levels = repeated(builder, builder.load(builder.bitcast(parts["levels"].data, SIXTEEN.as_pointer()), align=1))

        def panel_of(name: str, kind: Any, index: Any) -> list[Any]:
            return [builder.load(place, align=1) for place in vectors_at(builder, parts[name].data, index, kind)]

        def number_at(array: Any, row: int, group: Any) -> Any:
            index = builder.add(builder.mul(builder.add(first, I64(row)), num_groups), group)
            return spread(builder, builder.load(builder.gep(array.data, [index]), align=4), SUMS)

        def cut(builder: Any, word: Any, _: Any) -> Parts:
            four_bits = ir.Constant(WORDS, [0x0F0F0F0F] * LANES)
            upper = builder.lshr(word, ir.Constant(WORDS, [4] * LANES))
            return tuple((looked_up(builder, builder.and_(own, four_bits), levels),) for own in (word, upper))

        def with_group(first_word: Any, _: Any, sums: list[Any]) -> list[Any]:
            num_rows = len(sums) // NUM_VECTORS
            x_group = builder.gep(x_data, [builder.mul(first_word, I64(num_rows * IN_WORD // IN_ROW_WORD))])
            weight_group = builder.gep(weight_data, [builder.mul(first_word, I64(PANEL))])
            group = builder.sdiv(first_word, I64(WORDS_OF_GROUP))
            place = builder.add(builder.mul(column, num_groups), builder.mul(group, I64(PANEL)))
            found = group_products(builder, x_group, weight_group, len(sums), cut)
            ratios = [builder.fpext(own, SUMS) for own in panel_of("ratios", HALF_FLOATS, place)]
            less = [builder.fneg(builder.uitofp(own, SUMS)) for own in panel_of("nothings", SMALL, place)]
            results = []
            for row in range(num_rows):
                scale, total = (number_at(array, row, group) for array in (x_scales_array, totals_array))
                for vector in range(NUM_VECTORS):
                    number = row * NUM_VECTORS + vector
                    steps = fma(builder, less[vector], total, builder.sitofp(found[number], SUMS))
                    results.append(fma(builder, ratios[vector], builder.fmul(scale, steps), sums[number]))
            return results

        scales, bias = (panel_of(name, SUMS, column) for name in ("scales", "bias"))
        for count in cases_of(builder, num_rows, MOST_ROWS):
            starts = [ir.Constant(SUMS, [0] * LANES)] * (count * NUM_VECTORS)
            sums = build_groups(builder, size, WORDS_OF_GROUP, starts, with_group)
            for row in range(count):
                own = sums[row * NUM_VECTORS : (row + 1) * NUM_VECTORS]
                results = [fma(builder, *triple) for triple in zip(own, scales, bias, strict=True)]
                place = builder.add(builder.mul(builder.add(first, I64(row)), width), column)
                store_sums(builder, results, outputs_array.data, place)
        return context.get_dummy_value()

    return types.void(x, x_scales, x_totals, types.intp, types.intp, weights, types.intp, outputs), build


def repeated(builder: Any, sixteen: Any) -> Any:
    """Sixteen bytes, again and again."""
    places = ir.Constant(ir.VectorType(WORDS.element, BYTES.count), [*range(16)] * (BYTES.count // 16))
    return builder.shuffle_vector(sixteen, ir.Constant(SIXTEEN, ir.Undefined), places)


def group_products(builder: Any, x: Any, weight: Any, count: int, cut: Any) -> list[Any]:
    """The `count` sums of a group's products as words, of bytes of a weight that have no sign and such of x that have one."""
    sums = [ir.Constant(WORDS, [0] * LANES)] * count
    if ADDS_WORDS:
        for k in range(WORDS_OF_GROUP):
            sums = add_word(builder, I64(k), x, weight, sums, add_signed_bytes, cut)
        return sums
    ones = builder.bitcast(ir.Constant(HALVES, [1] * HALVES.count), WORDS)
    for first in range(0, WORDS_OF_GROUP, WORDS_WITH_ROOM):
        halves = [ir.Constant(WORDS, [0] * LANES)] * count
        for k in range(first, first + WORDS_WITH_ROOM):
            halves = add_word(builder, I64(k), x, weight, halves, add_bytes_to_halves, cut)
        sums = [add_half_products(builder, total, own, ones) for total, own in zip(sums, halves, strict=True)]
    return sums


def add_signed_bytes(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """As `add_byte_products`, but those of x have a sign, and those of weights have none."""
    return add_byte_products(builder, sums, x, weights)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(builder, f"llvm.fma.v{LANES}f32", SUMS, a, b, c)


@njit(cache=True)
def cut_groups(x: np.ndarray, first: int, last: int, words: np.ndarray, scales: np.ndarray, totals: np.ndarray) -> None:
    """Fills what is theirs of words [T * in / 4], as [in / 4, last - first] of four bytes, with the rows from first to last of x
    [T, in] in steps of each group, and of scales and totals [T, G] with the sizes of these and with sums of bytes."""
    num_rows, size = last - first, x.shape[1] // IN_ROW_WORD
    steps_of_row = np.empty(x.shape[1], dtype=np.int8)
    for row in range(num_rows):
        for group in range(scales.shape[1]):
            own = x[first + row, group * GROUP : (group + 1) * GROUP]
            most, total = largest_of(own), np.int32(0)
            has_numbers = most < np.inf
            steps = MOST_STEPS / most if has_numbers and most > SMALLEST else ZERO
            for k in range(GROUP):
                number = np.int32(number_of(own[k]) * steps + OFFSET) - np.int32(128)
                steps_of_row[group * GROUP + k] = number
                total += number
            scales[first + row, group] = most / MOST_STEPS if has_numbers else np.float32(np.nan)
            totals[first + row, group] = total
        place = first * size + row
        for word in steps_of_row.view(np.uint32):
            words[place] = word
            place += num_rows


@njit(cache=True, parallel=True)
def int4_product(x: np.ndarray, weights: Int4Weights, outputs: np.ndarray) -> None:
    """Fills outputs [T, N] with x [T, in] times the weights, and their bias.

    x, outputs: as `vectors.array_of`, float32 or uint16 that are bfloat16.
    """
    num_rows, num_tiles, num_groups = len(x), (len(x) + MOST_ROWS - 1) // MOST_ROWS, weights.ratios.shape[1]
    words = np.empty(num_rows * num_groups * GROUP // IN_ROW_WORD, dtype=np.uint32)
    scales, totals = np.empty((num_rows, num_groups), dtype=np.float32), np.empty((num_rows, num_groups), dtype=np.float32)
    if num_tiles < MANY_TILES:
        for tile in range(num_tiles):
            cut_groups(x, num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles, words, scales, totals)
    else:
        for tile in prange(num_tiles):
            cut_groups(x, num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles, words, scales, totals)
    for panel in prange(len(weights.words)):
        for tile in range(num_tiles):
            first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            multiply_cut(words, scales, totals, first, last - first, weights, panel, outputs)
