"""Sums of products of rows with weights of few bits, which become bfloat16 in registers; part of several kernels.

Two numbers of a word become two halves of a register by a few operations of 32 bits: a number of four bits is put below a leading
one, which is taken away again with what is nothing, one of eight bits likewise, and the exponents of E2M1 and E4M3 are moved up and
mended by a power of two. With one number at a time twice to three times as many instructions came out of the compiler.
"""

import triton
import triton.language as tl

from eagle_rt.kernels import narrow
from eagle_rt.kernels.triton.common import INTERPRETED

TILE, WORDS, STEP_INPUTS = tl.constexpr(narrow.TILE), tl.constexpr(narrow.WORDS), tl.constexpr(narrow.STEP_INPUTS)
# By how many powers of two the exponents of E2M1, whose numbers are in halves, and of E4M3 are below those of bfloat16.
E2M1_UNIT, E4M3_UNIT = tl.constexpr(2.0**127), tl.constexpr(2.0**120)


@triton.jit
def halves_of_words(pairs):
    """The numbers in bfloat16 of which int32 `pairs` are the bits: (the lower, the upper)."""
    if INTERPRETED:  # which has no bfloat16
        lower, upper = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        lower, upper = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
        lower, upper = lower.to(tl.bfloat16, bitcast=True), upper.to(tl.bfloat16, bitcast=True)
    return lower, upper


@triton.jit
def as_read(values):
    """bfloat16, or what the interpreter computes in instead."""
    return values.to(tl.float32) if INTERPRETED else values.to(tl.bfloat16)


@triton.jit
def numbers_of(words, offset, step: tl.constexpr, KIND: tl.constexpr):
    """[TILE, STEP_INPUTS] the numbers of a step in words [TILE, WORDS] of a `NarrowWeight`, see there; offset: [TILE], of kind
    "offset4"."""
    if KIND == "int8":
        own = words >> 8 * step
        # Without their sign numbers are 128 more, or those below nothing 256.
        lower, upper = halves_of_words(own & 0x007F007F | 0x43004300)
        lower_start, upper_start = halves_of_words(own & 0x00800080 | 0x43004300)
        lower, upper = lower - lower_start, upper - upper_start
    elif KIND == "e4m3":
        own = words >> 8 * step
        lower, upper = halves_of_words((own & 0x007F007F) << 4 | (own & 0x00800080) << 8)
        lower, upper = as_read(lower * E4M3_UNIT), as_read(upper * E4M3_UNIT)
    elif KIND == "e2m1":
        own = words >> 4 * step
        lower, upper = halves_of_words((own & 0x00070007) << 6 | (own & 0x00080008) << 12)
        lower, upper = as_read(lower * E2M1_UNIT), as_read(upper * E2M1_UNIT)
    else:
        lower, upper = halves_of_words(words >> 4 * step & 0x000F000F | 0x43004300)
        if KIND == "int4":
            lower, upper = as_read(lower - 136.0), as_read(upper - 136.0)
        else:
            lower, upper = lower - offset[:, None], upper - offset[:, None]
    return tl.reshape(tl.join(lower, upper), [TILE, STEP_INPUTS])


@triton.jit
def narrow_sums(
    x,  # [.., in_size]
    words,
    ratios,
    offsets,
    tile,
    num_blocks,
    first,
    last,
    rows,
    is_row,
    in_size,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """[TILE, rows] float32 products of rows of x, where is_row, and outputs of a tile (int64) of a `NarrowWeight`, without their
    scales, of blocks from `first` to before `last`."""
    outs, before = tl.arange(0, TILE), tile * num_blocks * TILE
    words, ratios, offsets = words + before * WORDS, ratios + before * PARTS, offsets + before * PARTS
    inputs, places = tl.arange(0, STEP_INPUTS), outs[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    sums = tl.zeros([TILE, rows.shape[0]], tl.float32)
    for block in range(first, last):
        own_words = tl.load(words + block * (TILE * WORDS) + places, eviction_policy="evict_first")
        own_sums = tl.zeros([TILE, rows.shape[0]], tl.float32)
        for step in tl.static_range(STEPS):
            start = (block * STEPS + step) * STEP_INPUTS
            is_input = is_row[None, :] & (inputs < in_size - start)[:, None]
            own_x = tl.load(x + rows[None, :] * in_size + start + inputs[:, None], mask=is_input, other=0.0)
            if KIND == "offset4":
                offset = as_read(tl.load(offsets + (block * PARTS + step * PARTS // STEPS) * TILE + outs))
            else:
                offset = outs
            numbers = numbers_of(own_words, offset, step, KIND)
            if INTERPRETED:
                own_x = own_x.to(tl.float32)
            else:
                numbers = numbers.to(own_x.dtype)
            if PARTS == 0:
                sums = tl.dot(numbers, own_x, sums)
            else:
                own_sums = tl.dot(numbers, own_x, own_sums)
                if (step + 1) % (STEPS // PARTS) == 0:
                    ratio = tl.load(ratios + (block * PARTS + step * PARTS // STEPS) * TILE + outs).to(tl.float32)
                    sums += own_sums * ratio[:, None]
                    own_sums = tl.zeros([TILE, rows.shape[0]], tl.float32)
    return sums
