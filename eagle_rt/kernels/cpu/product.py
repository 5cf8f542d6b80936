"""Products of rows with a weight on a CPU, compiled by numba; needs numba.

Of few rows, as in a decode step, the reading of the weight is what costs: so it lies as it is read, and is read once. A row comes
out the same, bit by bit, whichever and how many others are multiplied beside it, so that a tree that is verified says just what
plain decoding would have said.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import cgutils, types
from numba.extending import overload
from numpy.typing import NDArray

from eagle_rt.kernels.cpu.instructions import has_instructions
from eagle_rt.kernels.cpu.vectors import operation
from eagle_rt.kernels.processor import is_intel

# Float32 of a vector: two registers of AVX2, of which there are sixteen, or one of the 32 of AVX-512.
LANES = 16
# Vectors of outputs that lie side by side, and rows whose sums of those are in registers at a time.
NUM_VECTORS, MOST_ROWS = (2, 12) if has_instructions("avx512f") else (1, 6)
PANEL = LANES * NUM_VECTORS
# So many tiles of such rows are turned by all threads.
MANY_TILES = 4
# Tiles of so many rows have the weight fetched so many bytes ahead. An AMD's processor looks far enough ahead by itself until
# computing takes long, which then cost a fifth of the speed, and being told sooner costs a tenth; Intel's never does.
FEWEST_ROWS_AHEAD, BYTES_AHEAD = 1 if is_intel() else 5, 8192
F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
SUMS, WORDS, HALVES = (ir.VectorType(element, LANES) for element in (F32, I32, I16))
# Intel's processors take twice as long to multiply pairs of bfloat16 at once as to multiply both of them as float32.
HAS_FAST_PAIRS = has_instructions("avx512bf16") and not is_intel()


class RowWeights(NamedTuple):
    """W [out, in] as `product` takes it, and a bias [N]: words [N / PANEL, K, PANEL] float32, or int32 of two bfloat16."""

    words: NDArray
    bias: NDArray[np.float32]


class BFloat16(ir.Type):
    """For which llvmlite has no word."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def arrays_in(context: Any, builder: Any, kind: Any, value: Any) -> dict[str, Any]:
    """The arrays of a named tuple of such."""
    return {
        name: context.make_array(own)(context, builder, builder.extract_value(value, place))
        for place, (name, own) in enumerate(zip(kind.fields, kind.types, strict=True))
    }


def spread(builder: Any, number: Any, vector_type: Any) -> Any:
    """The vector of one number, everywhere."""
    first = builder.insert_element(ir.Constant(vector_type, ir.Undefined), number, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(WORDS, [0] * LANES))


def widened(builder: Any, words: Any) -> tuple[Any, Any]:
    """The two bfloat16 of each word as floats: one is the upper half of a float32."""
    first = builder.shl(words, ir.Constant(WORDS, [16] * LANES))
    second = builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES))
    return builder.bitcast(first, SUMS), builder.bitcast(second, SUMS)


Parts = tuple[tuple[Any, ...], ...]


def parts_of(builder: Any, word: Any, number: Any) -> Parts:
    """A vector of a weight's words as what is multiplied with the numbers of x that belong to a word, one after the other: with one
    number that is like the word the word, with two float32 the two bfloat16 in it."""
    return ((word,) if word.type.element == number else widened(builder, word),)


def add_products(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """sums + weights * x, of words that are pairs of bfloat16 both products."""
    if weights.type.element == F32:
        return call(builder, f"llvm.fma.v{LANES}f32", SUMS, weights, x, sums)
    pairs = ir.VectorType(BFloat16(), 2 * LANES)
    words = [builder.bitcast(value, pairs) for value in (weights, x)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", SUMS, sums, *words)


def rounded(builder: Any, sums: Any) -> Any:
    """Floats as bfloat16, to the nearest, to an even one of two."""
    bits = builder.bitcast(sums, WORDS)
    shift, one, most = (ir.Constant(WORDS, [number] * LANES) for number in (16, 1, 0x7FFF))
    is_odd = builder.and_(builder.lshr(bits, shift), one)
    return builder.trunc(builder.lshr(builder.add(builder.add(bits, most), is_odd), shift), HALVES)


def vectors_at(builder: Any, data: Any, index: Any, vector: Any) -> list[Any]:
    """Where the vectors of a panel begin that begins at an index."""
    places = [builder.gep(data, [builder.add(index, I64(v * LANES))]) for v in range(NUM_VECTORS)]
    return [builder.bitcast(place, vector.as_pointer()) for place in places]


def fetch_ahead(builder: Any, places: list[Any]) -> None:
    """Into the second cache, what stands BYTES_AHEAD of these places; where nothing does, that is no error."""
    data = I16.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [data, I32, I32, I32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_cache, not_code = I32(0), I32(2), I32(1)
    for place in places:
        ahead = builder.gep(builder.bitcast(place, data), [I64(BYTES_AHEAD // 2)])
        builder.call(fetch, [ahead, read, second_cache, not_code])


def build_tile(
    builder: Any, size: Any, x: Any, weight: Any, starts: list[Any], add: Callable[..., Any], cut: Callable[..., Parts] = parts_of
) -> list[Any]:
    """The sums [num_rows * NUM_VECTORS] of a tile: `starts`, as many, and, for each k of `size`, x [size, steps, num_rows, parts]
    times weight [size, PANEL], whose words are `cut` into as many parts of as many steps, which `add` multiplies. Leaves the
    builder where they are known."""
    before = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(I64)
    k.add_incoming(I64(0), before)
    sums = [builder.phi(start.type) for start in starts]
    for total, start in zip(sums, starts, strict=True):
        total.add_incoming(start, before)
    results = add_word(builder, k, x, weight, sums, add, cut)
    following = builder.add(k, I64(1))
    k.add_incoming(following, loop)
    for total, result in zip(sums, results, strict=True):
        total.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, size), loop, done)
    builder.position_at_end(done)
    return results


def add_word(
    builder: Any, k: Any, x: Any, weight: Any, sums: list[Any], add: Callable[..., Any], cut: Callable[..., Parts] = parts_of
) -> list[Any]:
    """What `sums` come to with the products of one k, see `build_tile`."""
    num_rows = len(sums) // NUM_VECTORS
    places = vectors_at(builder, weight, builder.mul(k, I64(PANEL)), ir.VectorType(weight.type.pointee, LANES))
    if num_rows >= FEWEST_ROWS_AHEAD:
        fetch_ahead(builder, places)
    words = [builder.load(place, align=4) for place in places]
    steps = [list(zip(*step, strict=True)) for step in zip(*(cut(builder, word, x.type.pointee) for word in words), strict=True)]
    numbers_of_step = num_rows * len(steps[0])
    results = list(sums)
    for step, parts in enumerate(steps):
        for part, columns in enumerate(parts):
            for row in range(num_rows):
                place = I64(step * numbers_of_step + row * len(parts) + part)
                index = builder.add(builder.mul(k, I64(len(steps) * numbers_of_step)), place)
                number = spread(builder, builder.load(builder.gep(x, [index]), align=4), columns[0].type)
                for vector, column in enumerate(columns, row * NUM_VECTORS):
                    results[vector] = add(builder, results[vector], column, number)
    return results


def cases_of(builder: Any, num_rows: Any, most_rows: int) -> Iterator[int]:
    """1 to most_rows, each while the builder is where it is built what so many rows come to; in the end behind all of it."""
    after = builder.append_basic_block("after")
    cases = builder.switch(num_rows, after)
    for count in range(1, most_rows + 1):
        case = builder.append_basic_block(f"rows.{count}")
        cases.add_case(I64(count), case)
        builder.position_at_end(case)
        yield count
        builder.branch(after)
    builder.position_at_end(after)


def store_sums(builder: Any, sums: list[Any], outputs: Any, index: Any) -> None:
    """Sums of a row, in the precision of the outputs, to where the vectors of a panel begin that begins at an index."""
    if outputs.type.pointee != F32:
        sums = [rounded(builder, total) for total in sums]
    for total, place in zip(sums, vectors_at(builder, outputs, index, sums[0].type), strict=True):
        builder.store(total, place, align=2)


@operation
def multiply_tile(_: Any, x: Any, first: Any, num_rows: Any, weight: Any, panel: Any, bias: Any, outputs: Any) -> Any:
    """Fills a panel of outputs [T, N] for num_rows of the rows, `first` and those after it, 1 to MOST_ROWS.

    x: [T * K] of `turn_tile`; those rows as [K, num_rows]. weight: [N / PANEL, K, PANEL]; bias: [N].
    """

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x_array, weight_array, bias_array, outputs_array = (
            context.make_array(signature.args[i])(context, builder, values[i]) for i in (0, 3, 5, 6)
        )
        first, num_rows, panel = values[1], values[2], values[4]
        size = cgutils.unpack_tuple(builder, weight_array.shape, 3)[1]
        width = cgutils.unpack_tuple(builder, outputs_array.shape, 2)[1]
        column = builder.mul(panel, I64(PANEL))
        x_data = builder.gep(x_array.data, [builder.mul(first, size)])
        if x.dtype == types.int64:  # two float32
            x_data = builder.bitcast(x_data, F32.as_pointer())
        weight_data = builder.gep(weight_array.data, [builder.mul(column, size)])
        starts = [builder.load(place, align=4) for place in vectors_at(builder, bias_array.data, column, SUMS)]
        for count in cases_of(builder, num_rows, MOST_ROWS):
            sums = build_tile(builder, size, x_data, weight_data, starts * count, add_products)
            for row in range(count):
                place = builder.add(builder.mul(builder.add(first, I64(row)), width), column)
                store_sums(builder, sums[row * NUM_VECTORS : (row + 1) * NUM_VECTORS], outputs_array.data, place)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, weight, types.intp, bias, outputs), build


@operation
def turned(_: Any, word: Any, columns: Any) -> Any:
    """A word of x as columns hold it: as it is, or two bfloat16 as two float32 in one int64."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if columns.dtype == word:
            return values[0]
        first, second = builder.shl(values[0], I32(16)), builder.and_(values[0], I32(0xFFFF0000))
        return builder.or_(builder.zext(first, I64), builder.shl(builder.zext(second, I64), I64(32)))

    return columns.dtype(word, columns), build


@njit(cache=True)
def turn_tile(x: np.ndarray, first: int, last: int, columns: np.ndarray) -> None:
    """Fills what is theirs of columns [T * K] with the rows from first to last of x [T, K], as [K, last - first]."""
    size, num_rows = x.shape[1], last - first
    for row in range(num_rows):
        place = first * size + row
        for k in range(size):
            columns[place] = turned(x[first + row, k], columns)
            place += num_rows


def columns_for(x: np.ndarray) -> np.ndarray:
    """What `turn_tile` fills for x [T, K]; as it is, a single row lies there already."""
    raise NotImplementedError("only in compiled functions")


@overload(columns_for)
def _compiled_columns_for(x):  # numba wants the parameters of what it returns, and no annotations
    if x.dtype == types.int32 and not HAS_FAST_PAIRS:
        return lambda x: np.empty(x.size, dtype=np.int64)
    return lambda x: x.reshape(-1) if len(x) == 1 else np.empty(x.size, dtype=x.dtype)


@njit(cache=True, parallel=True)
def product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, outputs: np.ndarray) -> None:
    """Fills outputs [T, N] with x [T, K] times weight [N / PANEL, K, PANEL] plus bias [N].

    x, weight: float32, or int32 of two bfloat16; bias: float32; outputs: float32, or uint16 that are bfloat16.
    """
    num_rows = len(x)
    num_tiles = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    columns = columns_for(x)
    if num_rows > 1 or columns.itemsize > x.itemsize:
        if num_tiles < MANY_TILES:
            for tile in range(num_tiles):
                turn_tile(x, num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles, columns)
        else:
            for tile in prange(num_tiles):
                turn_tile(x, num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles, columns)
    for panel in prange(len(weight)):
        for tile in range(num_tiles):
            first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            multiply_tile(columns, first, last - first, weight, panel, bias, outputs)
