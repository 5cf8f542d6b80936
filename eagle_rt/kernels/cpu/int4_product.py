"""Products of rows with a weight of four bits on a CPU, compiled by numba; needs numba.

A quarter of the bytes of bfloat16, and what belongs to each group of inputs: the size of its steps, and which of them is nothing.
A row comes out the same whatever is multiplied beside it.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import types
from numpy.typing import NDArray

from eagle_rt.kernels.cpu.cut_rows import cut_in_tiles
from eagle_rt.kernels.cpu.product import (
    I64,
    LANES,
    NUM_VECTORS,
    PANEL,
    SUMS,
    WORDS,
    Parts,
    add_word,
    call,
    cases_of,
    spread,
    store_sums,
    vectors_at,
)
from eagle_rt.kernels.cpu.vectors import operation
from eagle_rt.kernels.cpu.whole_numbers import (
    BYTES,
    add_byte_products,
    add_half_products,
    build_groups,
    looked_up,
    positive_halves_of,
)

# Rows whose sums are in registers at a time, of bytes each of them twice.
MOST_ROWS = 6
# Inputs that share a scale, and that are in one word.
GROUP, IN_WORD = 32, 8
WORDS_OF_GROUP = GROUP // IN_WORD


class Int4Weights(NamedTuple):
    """W [out, in] in panels, and a bias: an input of a group g counts scales * ratios[g] * (levels[its four bits] - nothings[g]).

    words: [N / PANEL, K, PANEL] uint32 of eight inputs: the first four in the lower halves of the bytes, the others in the upper
    ones. ratios: [N / PANEL, G, PANEL] uint16 that are float16, and nothings as many uint8; levels: [16] uint8; scales, bias: [N]
    float32.
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

    x, x_scales, x_totals: of `cut_rows`.
    """

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x_array, x_scales_array, totals_array, outputs_array = (
            context.make_array(signature.args[i])(context, builder, values[i]) for i in (0, 1, 2, 7)
        )
        parts = {
            name: context.make_array(kind)(context, builder, builder.extract_value(values[5], place))
            for place, (name, kind) in enumerate(zip(weights.fields, weights.types, strict=True))
        }
        first, num_rows, panel = values[3], values[4], values[6]
        size, num_groups = (builder.extract_value(parts[name].shape, 1) for name in ("words", "ratios"))
        width, column = builder.extract_value(outputs_array.shape, 1), builder.mul(panel, I64(PANEL))
        words_of_row = builder.mul(size, I64(IN_WORD // 2))
        x_data = builder.gep(x_array.data, [builder.mul(first, words_of_row)])
        weight_data = builder.gep(parts["words"].data, [builder.mul(column, size)])
        sixteen = builder.load(builder.bitcast(parts["levels"].data, ir.VectorType(BYTES.element, 16).as_pointer()), align=1)
        repeated = ir.Constant(ir.VectorType(WORDS.element, BYTES.count), [*range(16)] * (BYTES.count // 16))
        levels = builder.shuffle_vector(sixteen, ir.Constant(sixteen.type, ir.Undefined), repeated)

        def panel_of(name: str, kind: Any, index: Any) -> list[Any]:
            return [builder.load(place, align=1) for place in vectors_at(builder, parts[name].data, index, kind)]

        def cut(builder: Any, word: Any, _: Any) -> Parts:
            four_bits = ir.Constant(WORDS, [0x0F0F0F0F] * LANES)
            upper = builder.lshr(word, ir.Constant(WORDS, [4] * LANES))
            bytes_of = [looked_up(builder, builder.and_(own, four_bits), levels) for own in (word, upper)]
            return tuple((own,) if of_bytes else positive_halves_of(builder, own) for own in bytes_of)

        of_bytes = x.dtype == types.uint32
        add = add_signed_bytes if of_bytes else add_half_products
        no_words, no_sums = (ir.Constant(kind, [0] * LANES) for kind in (WORDS, SUMS))

        def sums_of(count: int) -> list[Any]:
            """The sums of so many rows, in units of both scales."""
            nothing = [no_words] * (count * NUM_VECTORS * (1 + of_bytes))

            def with_group(first_word: Any, _: Any, sums: list[Any]) -> list[Any]:
                x_group = builder.gep(x_data, [builder.mul(first_word, I64(count * IN_WORD // 2))])
                weight_group = builder.gep(weight_data, [builder.mul(first_word, I64(PANEL))])
                found = nothing
                for k in range(WORDS_OF_GROUP):
                    found = add_word(builder, I64(k), x_group, weight_group, found, add, cut)
                group = builder.sdiv(first_word, I64(WORDS_OF_GROUP))
                place = builder.add(builder.mul(column, num_groups), builder.mul(group, I64(PANEL)))
                halves, nothings = panel_of("ratios", HALF_FLOATS, place), panel_of("nothings", SMALL, place)
                ratios = [builder.fpext(own, SUMS) for own in halves]
                nothings = [builder.fneg(builder.uitofp(own, SUMS)) for own in nothings]
                results = []
                for row in range(count):
                    own = found[row * NUM_VECTORS * (1 + of_bytes) : (row + 1) * NUM_VECTORS * (1 + of_bytes)]
                    if of_bytes:
                        eight = ir.Constant(WORDS, [8] * LANES)
                        pairs = zip(own[:NUM_VECTORS], own[NUM_VECTORS:], strict=True)
                        own = [builder.add(builder.shl(upper, eight), lower) for upper, lower in pairs]
                    index = builder.add(builder.mul(builder.add(first, I64(row)), num_groups), group)
                    total = spread(builder, builder.load(builder.gep(totals_array.data, [index]), align=4), SUMS)
                    for place in range(NUM_VECTORS):
                        steps = fma(builder, nothings[place], total, builder.sitofp(own[place], SUMS))
                        results.append(fma(builder, ratios[place], steps, sums[row * NUM_VECTORS + place]))
                return results

            return build_groups(builder, size, WORDS_OF_GROUP, [no_sums] * (count * NUM_VECTORS), with_group)

        scales, bias = (panel_of(name, SUMS, column) for name in ("scales", "bias"))
        for count in cases_of(builder, num_rows, MOST_ROWS):
            sums = sums_of(count)
            for row in range(count):
                number = builder.add(first, I64(row))
                x_scale = spread(builder, builder.load(builder.gep(x_scales_array.data, [number]), align=4), SUMS)
                own = sums[row * NUM_VECTORS : (row + 1) * NUM_VECTORS]
                results = [
                    builder.fadd(builder.fmul(total, builder.fmul(x_scale, scale)), start)
                    for total, scale, start in zip(own, scales, bias, strict=True)
                ]
                store_sums(builder, results, outputs_array.data, builder.add(builder.mul(number, width), column))
        return context.get_dummy_value()

    return types.void(x, x_scales, x_totals, types.intp, types.intp, weights, types.intp, outputs), build


HALF_FLOATS, SMALL = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(ir.IntType(8), LANES)


def add_signed_bytes(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """As `add_byte_products`, but those of x have a sign, and those of weights have none."""
    return add_byte_products(builder, sums, x, weights)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(builder, f"llvm.fma.v{LANES}f32", SUMS, a, b, c)


@njit(cache=True, parallel=True)
def int4_product(x: np.ndarray, weights: Int4Weights, outputs: np.ndarray) -> None:
    """Fills outputs [T, N] with x [T, in] times the weights, and their bias.

    x, outputs: as `vectors.array_of`, float32 or uint16 that are bfloat16.
    """
    num_rows, num_tiles = len(x), (len(x) + MOST_ROWS - 1) // MOST_ROWS
    words, scales, totals = cut_in_tiles(x, num_tiles, weights.ratios.shape[1])
    for panel in prange(len(weights.words)):
        for tile in range(num_tiles):
            first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            multiply_cut(words, scales, totals, first, last - first, weights, panel, outputs)
