"""Products of some rows with a weight of few bits; the twin is torch's with the weight `widened`.

A program takes a tile of outputs, as many rows as there are registers for their sums, and, where there are too few tiles for a GPU,
some of the inputs.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels import narrow
from eagle_rt.kernels.narrow import NarrowWeight, num_steps
from eagle_rt.kernels.triton.common import padded, rounded
from eagle_rt.kernels.triton.narrow_sums import narrow_sums

TILE = tl.constexpr(narrow.TILE)
MOST_BLOCK_ROWS, ADDED_BLOCK = 64, 1024
# So many programs at least keep a processor of a GPU reading; a program has so many blocks at least.
PROGRAMS_ON_EACH, LEAST_BLOCKS = 2, 4
INTERPRETED_PROCESSORS = 3


@triton.jit(do_not_specialize=["num_rows"])
def _narrow_product(
    x,  # [num_rows, in_size]
    words,
    ratios,
    offsets,
    scales,
    bias,  # [out_size], read if HAS_BIAS
    output,  # [num_rows, out_size], or float32 [splits, num_rows, out_size] without scales and bias if IS_SPLIT
    num_rows,
    in_size,
    out_size,
    num_blocks,
    split_blocks,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    tile, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * split_blocks
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    last = tl.minimum(first + split_blocks, num_blocks)
    sums = narrow_sums(x, words, ratios, offsets, tile, num_blocks, first, last, rows, is_row, in_size, KIND, STEPS, PARTS)
    outs = tile * TILE + tl.arange(0, TILE)
    is_out = outs < out_size
    places = rows.to(tl.int64)[None, :] * out_size + outs[:, None]
    if IS_SPLIT:
        output += tl.program_id(1).to(tl.int64) * num_rows * out_size
    else:
        sums *= tl.load(scales + outs)[:, None]
        if HAS_BIAS:
            sums += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)[:, None]
    tl.store(output + places, rounded(sums, output.dtype.element_ty), mask=is_row[None, :] & is_out[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _add_splits(sums, scales, bias, output, num_rows, out_size, num_splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Fills output [num_rows, out_size] with sums [splits, num_rows, out_size], one after the other, scaled."""
    row, outs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_out = outs < out_size
    own, total = sums + row * out_size + outs, tl.zeros([BLOCK], tl.float32)
    for _ in range(num_splits):
        total += tl.load(own, mask=is_out, other=0.0)
        own += num_rows * out_size
    total *= tl.load(scales + outs, mask=is_out, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)
    tl.store(output + row * out_size + outs, rounded(total, output.dtype.element_ty), mask=is_out)


def narrow_product(x: Tensor, weight: NarrowWeight, bias: Tensor | None) -> Tensor:
    """[R, out] from x [R, in]. How sums are split follows from the weight alone."""
    (num_rows, in_size), num_blocks = x.shape, weight.words.shape[1]
    num_tiles, block_rows = len(weight.words), min(MOST_BLOCK_ROWS, padded(num_rows, least=16))
    wanted = triton.cdiv(PROGRAMS_ON_EACH * num_processors(x.device), num_tiles)
    split_blocks = triton.cdiv(num_blocks, max(1, min(wanted, num_blocks // LEAST_BLOCKS)))
    num_splits = triton.cdiv(num_blocks, split_blocks)
    output = x.new_empty(num_rows, weight.out_size)
    sums = x.new_empty(num_splits, *output.shape, dtype=torch.float32) if num_splits > 1 else output
    bias_or_none = weight.scales if bias is None else bias
    _narrow_product[(num_tiles, num_splits, triton.cdiv(num_rows, block_rows))](
        x.contiguous(),
        weight.words,
        weight.ratios,
        weight.offsets,
        weight.scales,
        bias_or_none,
        sums,
        num_rows,
        in_size,
        weight.out_size,
        num_blocks,
        split_blocks,
        KIND=weight.kind,
        STEPS=num_steps(weight.kind),
        PARTS=weight.parts,
        HAS_BIAS=bias is not None,
        IS_SPLIT=num_splits > 1,
        BLOCK_ROWS=block_rows,
        num_warps=8 if block_rows == MOST_BLOCK_ROWS else 4,
        num_stages=4,
    )
    if num_splits > 1:
        _add_splits[(num_rows, triton.cdiv(weight.out_size, ADDED_BLOCK))](
            sums, weight.scales, bias_or_none, output, num_rows, weight.out_size, num_splits, bias is not None, ADDED_BLOCK
        )
    return output


@cache
def num_processors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETED_PROCESSORS
