"""A weight of few bits in half precision again, for products of many rows; the twin is `NarrowWeight.widened`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels import narrow
from eagle_rt.kernels.narrow import NarrowWeight, num_steps
from eagle_rt.kernels.triton.common import rounded
from eagle_rt.kernels.triton.narrow_sums import as_read, numbers_of

TILE, WORDS, STEP_INPUTS = tl.constexpr(narrow.TILE), tl.constexpr(narrow.WORDS), tl.constexpr(narrow.STEP_INPUTS)


@triton.jit
def _widen(
    words,
    ratios,
    offsets,
    scales,
    output,  # [out_size, in_size]
    out_size,
    in_size,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
):
    tile, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tile * tl.num_programs(1) + block
    places, inputs = tl.arange(0, TILE), tl.arange(0, STEP_INPUTS)
    outs = tile * TILE + places
    own_words = tl.load(words + number * (TILE * WORDS) + places[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
    scale = tl.load(scales + outs)
    for step in tl.static_range(STEPS):
        start = (block * STEPS + step) * STEP_INPUTS
        if KIND == "offset4":
            offset = as_read(tl.load(offsets + (number * PARTS + step * PARTS // STEPS) * TILE + places))
        else:
            offset = places
        values = numbers_of(own_words, offset, step, KIND).to(tl.float32)
        if PARTS > 0:
            values *= tl.load(ratios + (number * PARTS + step * PARTS // STEPS) * TILE + places).to(tl.float32)[:, None]
        is_wanted = (outs < out_size)[:, None] & (inputs < in_size - start)[None, :]
        values = rounded(values * scale[:, None], output.dtype.element_ty)
        tl.store(output + outs[:, None] * in_size + start + inputs[None, :], values, mask=is_wanted)


def widen(weight: NarrowWeight, dtype: torch.dtype) -> Tensor:
    """[out, in] in this precision."""
    output = weight.words.new_empty(weight.out_size, weight.in_size, dtype=dtype)
    tensors = weight.words, weight.ratios, weight.offsets, weight.scales, output
    constants = {"KIND": weight.kind, "STEPS": num_steps(weight.kind), "PARTS": weight.parts}
    _widen[weight.words.shape[:2]](*tensors, weight.out_size, weight.in_size, **constants, num_warps=4)
    return output
