"""Products of rows with a weight of eight bits on a CPU, compiled by numba; needs numba.

Half the bytes of bfloat16, which is what products of few rows cost. Only weights are rounded so coarsely, each output's by a scale
of its own. A row comes out the same whatever is multiplied beside it.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import types
from numpy.typing import NDArray

from eagle_rt.kernels.cpu.cut_rows import TOGETHER, cut_rows, words_for
from eagle_rt.kernels.cpu.product import (
    I64,
    LANES,
    MANY_TILES,
    NUM_VECTORS,
    PANEL,
    SUMS,
    WORDS,
    arrays_in,
    build_tile,
    cases_of,
    spread,
    store_sums,
    vectors_at,
)
from eagle_rt.kernels.cpu.vectors import operation
from eagle_rt.kernels.cpu.whole_numbers import add_byte_products, add_half_products, build_groups, halves_of

# Rows whose sums are in registers at a time, of bytes each of them twice.
MOST_ROWS = 6
# Of so many inputs the products of bytes have room in 32 bits.
MOST_INPUTS = 2**31 // (255 * 128)
# Of so many words the products of halves have room in 32 bits, which 128 * 32767 * 512 fill.
WORDS_WITH_ROOM = 512 // TOGETHER


class Int8Weights(NamedTuple):
    """W [out, in] in panels and steps of `scales`, and a bias.

    words: [N / PANEL, K, PANEL] uint32 of four signed bytes, K words for `in`; scales, bias: [N] float32; offsets: [N] int32, what
    the upper bytes of x find too much, negated: 128 times the sum of a row of W.
    """

    words: NDArray[np.uint32]
    scales: NDArray[np.float32]
    offsets: NDArray[np.int32]
    bias: NDArray[np.float32]


@operation
def multiply_cut(_: Any, x: Any, x_scales: Any, first: Any, num_rows: Any, weights: Any, panel: Any, outputs: Any) -> Any:
    """Fills a panel of outputs [T, N] for num_rows of the rows, `first` and those after it, 1 to MOST_ROWS.

    x, x_scales: of `cut_rows`.
    """

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x_array, x_scales_array, outputs_array = (
            context.make_array(signature.args[i])(context, builder, values[i]) for i in (0, 1, 6)
        )
        parts = arrays_in(context, builder, weights, values[4])
        first, num_rows, panel = values[2], values[3], values[5]
        size = builder.extract_value(parts["words"].shape, 1)
        width = builder.extract_value(outputs_array.shape, 1)
        column = builder.mul(panel, I64(PANEL))
        x_data = builder.gep(x_array.data, [builder.mul(builder.mul(first, size), I64(2))])
        weight_data = builder.gep(parts["words"].data, [builder.mul(column, size)])

        def panel_of(name: str, kind: Any) -> list[Any]:
            return [builder.load(place, align=4) for place in vectors_at(builder, parts[name].data, column, kind)]

        no_words, no_sums = (ir.Constant(kind, [0] * LANES) for kind in (WORDS, SUMS))
        starts = [*panel_of("offsets", WORDS), *[no_words] * NUM_VECTORS]
        scales, bias = panel_of("scales", SUMS), panel_of("bias", SUMS)
        upper = ir.Constant(SUMS, [256.0] * LANES)

        def sums_of_bytes(count: int) -> list[Any]:
            sums = build_tile(builder, size, x_data, weight_data, starts * count, add_byte_products)
            sums = [builder.sitofp(total, SUMS) for total in sums]
            rows = [sums[place : place + 2 * NUM_VECTORS] for place in range(0, len(sums), 2 * NUM_VECTORS)]
            return [
                builder.fadd(builder.fmul(high, upper), low)
                for row in rows
                for high, low in zip(row[:NUM_VECTORS], row[NUM_VECTORS:], strict=True)
            ]

        def sums_of_halves(count: int) -> list[Any]:
            nothing = [no_words] * (count * NUM_VECTORS)

            def with_group(first_word: Any, num_words: Any, totals: list[Any]) -> list[Any]:
                x_group = builder.gep(x_data, [builder.mul(first_word, I64(2 * count))])
                weight_group = builder.gep(weight_data, [builder.mul(first_word, I64(PANEL))])
                sums = build_tile(
                    builder,
                    num_words,
                    x_group,
                    weight_group,
                    nothing,
                    add_half_products,
                    lambda builder, word, _: (halves_of(builder, word),),
                )
                return [builder.fadd(total, builder.sitofp(own, SUMS)) for total, own in zip(totals, sums, strict=True)]

            return build_groups(builder, size, WORDS_WITH_ROOM, [no_sums] * len(nothing), with_group)

        sums_of = sums_of_bytes if x.dtype == types.uint32 else sums_of_halves
        for count in cases_of(builder, num_rows, MOST_ROWS):
            sums = sums_of(count)
            for row in range(count):
                number = builder.add(first, I64(row))
                own = sums[row * NUM_VECTORS : (row + 1) * NUM_VECTORS]
                x_scale = spread(builder, builder.load(builder.gep(x_scales_array.data, [number]), align=4), SUMS)
                results = [
                    builder.fadd(builder.fmul(total, builder.fmul(x_scale, scale)), start)
                    for total, scale, start in zip(own, scales, bias, strict=True)
                ]
                store_sums(builder, results, outputs_array.data, builder.add(builder.mul(number, width), column))
        return context.get_dummy_value()

    return types.void(x, x_scales, types.intp, types.intp, weights, types.intp, outputs), build


@njit(cache=True, parallel=True)
def int8_product(x: np.ndarray, weights: Int8Weights, outputs: np.ndarray) -> None:
    """Fills outputs [T, N] with x [T, in] times the weights, and their bias.

    x, outputs: as `vectors.array_of`, float32 or uint16 that are bfloat16.
    """
    num_rows, num_tiles = len(x), (len(x) + MOST_ROWS - 1) // MOST_ROWS
    words, scales = words_for(2 * num_rows * weights.words.shape[1]), np.empty(num_rows, dtype=np.float32)
    if num_tiles < MANY_TILES:
        for tile in range(num_tiles):
            cut_rows(x, num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles, words, scales)
    else:
        for tile in prange(num_tiles):
            cut_rows(x, num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles, words, scales)
    for panel in prange(len(weights.words)):
        for tile in range(num_tiles):
            first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            multiply_cut(words, scales, first, last - first, weights, panel, outputs)
