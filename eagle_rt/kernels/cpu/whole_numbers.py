"""Sums of products of whole numbers, in vectors of 32 bits, for compiled functions; needs numba."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from eagle_rt.kernels.cpu.cut_rows import HAS_BYTE_DOT, TOGETHER
from eagle_rt.kernels.cpu.instructions import has_instructions
from eagle_rt.kernels.cpu.product import I16, I32, I64, LANES, WORDS, call

HAS_WIDE_OPERATIONS = has_instructions("avx512bw")
HALVES, BYTES = ir.VectorType(I16, 2 * LANES), ir.VectorType(ir.IntType(8), 4 * LANES)


def add_byte_products(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """sums + weights * x, of words that are four bytes all products: those of weights have a sign, and those of x have none."""
    if HAS_BYTE_DOT:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, sums, x, weights)
    for place in range(TOGETHER):
        left, right = (ir.Constant(WORDS, [8 * count] * LANES) for count in (TOGETHER - 1 - place, TOGETHER - 1))
        byte = builder.ashr(builder.shl(weights, left), right)
        sums = builder.add(sums, builder.mul(byte, builder.lshr(builder.shl(x, left), right)))
    return sums


def add_half_products(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """sums + weights * x, of words that are two halves with a sign both products."""
    products = call_wide(builder, ("llvm.x86.avx512.pmaddw.d.512", "llvm.x86.avx2.pmadd.wd"), HALVES, WORDS, weights, x)
    return builder.add(sums, products)


def add_bytes_to_halves(builder: Any, sums: Any, weights: Any, x: Any) -> Any:
    """sums + weights * x, of words that are two halves of sums, and four bytes, of which those of x have a sign: two products to
    each half, which must have room for them."""
    products = call_wide(builder, ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx2.pmadd.ub.sw"), BYTES, HALVES, weights, x)
    return builder.bitcast(builder.add(builder.bitcast(sums, HALVES), builder.bitcast(products, HALVES)), WORDS)


def looked_up(builder: Any, places: Any, table: Any) -> Any:
    """Of words of four bytes, each at most 15, the bytes at these places of a table, which every 16 bytes of it repeat."""
    return call_wide(builder, ("llvm.x86.avx512.pshuf.b.512", "llvm.x86.avx2.pshuf.b"), BYTES, BYTES, table, places)


def call_wide(builder: Any, names: tuple[str, str], taken: Any, result: Any, *words: Any) -> Any:
    """An operation on words as vectors of the type `taken`, or another one on both halves of them where the processor has no wider
    one; as words, what results is of another type, too."""
    values = [builder.bitcast(value, taken) for value in words]
    if HAS_WIDE_OPERATIONS:
        return builder.bitcast(call(builder, names[0], result, *values), WORDS)
    undefined, size, halves = ir.Constant(taken, ir.Undefined), taken.count // 2, []
    for first in (0, size):
        lanes = ir.Constant(ir.VectorType(I32, size), [*range(first, first + size)])
        own = [builder.shuffle_vector(value, undefined, lanes) for value in values]
        halves.append(call(builder, names[1], ir.VectorType(result.element, result.count // 2), *own))
    together = builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, result.count), [*range(result.count)]))
    return builder.bitcast(together, WORDS)


def halves_of(builder: Any, word: Any) -> tuple[Any, Any]:
    """The even bytes of words and the odd ones, which have signs, as halves."""
    pairs, eight = builder.bitcast(word, HALVES), ir.Constant(HALVES, [8] * 2 * LANES)
    even, odd = builder.ashr(builder.shl(pairs, eight), eight), builder.ashr(pairs, eight)
    return builder.bitcast(even, WORDS), builder.bitcast(odd, WORDS)


def build_groups(
    builder: Any, size: Any, most: int, starts: list[Any], add: Callable[[Any, Any, list[Any]], list[Any]]
) -> list[Any]:
    """What `starts` come to when `add(first, number, totals)` has added every group of up to `most` of `size` words, one at least.
    Leaves the builder where that is known."""
    before = builder.block
    loop, done = builder.append_basic_block("groups"), builder.append_basic_block("all.groups")
    builder.branch(loop)
    builder.position_at_end(loop)
    first = builder.phi(I64)
    totals = [builder.phi(start.type) for start in starts]
    rest = builder.sub(size, first)
    number = builder.select(builder.icmp_signed("<", rest, I64(most)), rest, I64(most))
    results = add(first, number, totals)
    following = builder.add(first, I64(most))
    for phi, start, result in zip([first, *totals], [I64(0), *starts], [following, *results], strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(result, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, size), loop, done)
    builder.position_at_end(done)
    return results
