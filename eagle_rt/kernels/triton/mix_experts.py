"""What the experts of every token add to it, in four kernels; the twin is `kernels.experts.add_experts`.

Pairs of a row and an expert are grouped by experts, and a program multiplies all rows of one expert with some of its outputs, so
that an expert's weights are read once, and those of experts that no row takes not at all. Shapes follow from the number of rows
alone.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.experts import ExpertTensors, Mixing
from eagle_rt.kernels.narrow import TILE, num_steps
from eagle_rt.kernels.narrow_experts import NarrowExperts, NarrowStack
from eagle_rt.kernels.triton.common import IS_INTERPRETED, padded, rounded
from eagle_rt.kernels.triton.gated import constants_of, gate_of
from eagle_rt.kernels.triton.gated_product import halves_of, outs_of_tile
from eagle_rt.kernels.triton.narrow_sums import narrow_sums
from eagle_rt.kernels.triton.skinny_product import sums_of

BLOCK_OUT, MOST_BLOCK_IN, LEAST_BLOCK_IN, MOST_BLOCK_ROWS = 64, 128, 16, 64
GROUP_BLOCK, SUM_BLOCK = 1024, 1024


@triton.jit(do_not_specialize=["num_rows", "num_pairs"])
def _group(experts, groups, counts, num_rows, num_pairs, BLOCK: tl.constexpr):
    """Fills groups [experts, num_rows] with the pairs of each expert, in order, and counts [experts] with how many these are."""
    expert = tl.program_id(0)
    count = 0
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        is_ours = tl.load(experts + pairs, mask=pairs < num_pairs, other=-1) == expert
        ones = is_ours.to(tl.int32)
        tl.store(groups + expert * num_rows + count + tl.cumsum(ones, 0) - 1, pairs, mask=is_ours)
        count += tl.sum(ones, 0)
    tl.store(counts + expert, count)


@triton.jit
def group_of(experts, groups, counts, num_rows, FROM_PAIRS: tl.constexpr):
    """(the expert of a program, where its pairs begin, how many these are): one for every expert, or for every pair, of which the
    first of each expert does the work."""
    expert = tl.program_id(0)
    if FROM_PAIRS:
        expert = tl.load(experts + tl.program_id(0))
    own = groups + expert * num_rows
    count = tl.load(counts + expert)
    if FROM_PAIRS:
        count = tl.where(tl.load(own) == tl.program_id(0), count, 0)
    return expert.to(tl.int64), own, count


@triton.jit
def expert_sums(
    x,
    weight,
    ratios,
    offsets,
    scales,
    expert,
    outs,
    out_size,
    num_blocks,
    rows,
    is_row,
    in_size,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """[outs, rows] float32 products of rows of x and outputs of an expert: those of a `NarrowWeight`, a tile for each program of
    the second axis, or of any weight [experts, out_size, in_size] if KIND is "wide"."""
    if KIND == "wide":
        sums = sums_of(x, weight + expert * out_size * in_size, outs, rows, is_row, in_size, BLOCK_IN, IN_FLOAT32)
    else:
        tile = expert * tl.num_programs(1) + tl.program_id(1)
        sums = narrow_sums(x, weight, ratios, offsets, tile, num_blocks, 0, num_blocks, rows, is_row, in_size, KIND, STEPS, PARTS)
        sums *= tl.load(scales + tile * outs.shape[0] + tl.arange(0, outs.shape[0]))[:, None]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _gate(
    x,  # [num_rows, in_size]
    weight,  # of experts, each [2 * size, in_size], gates first, or a `NarrowWeight` of tiles of both
    ratios,
    offsets,
    scales,
    bias,  # [experts, 2 * size], read if HAS_BIAS
    shares,  # [num_rows, TOP_K], read if WEIGHS_INPUTS
    output,  # [num_rows * TOP_K, size]
    experts,  # [num_rows, TOP_K]
    groups,
    counts,
    num_rows,
    in_size,
    size,
    num_blocks,
    TOP_K: tl.constexpr,
    WEIGHS_INPUTS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    CUBIC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FROM_PAIRS: tl.constexpr,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    dtype = output.dtype.element_ty
    expert, group, count = group_of(experts, groups, counts, num_rows, FROM_PAIRS)
    outs = outs_of_tile(tl.program_id(1), size, BLOCK_OUT)
    columns = tl.program_id(1) * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2)
    for first in range(0, count, BLOCK_ROWS):
        numbers = first + tl.arange(0, BLOCK_ROWS)
        is_row = numbers < count
        pairs = tl.load(group + numbers, mask=is_row, other=0).to(tl.int64)
        sums = expert_sums(
            x, weight, ratios, offsets, scales, expert, outs, 2 * size, num_blocks,
            pairs // TOP_K, is_row, in_size, KIND, STEPS, PARTS, BLOCK_IN, IN_FLOAT32,
        )  # fmt: skip
        if WEIGHS_INPUTS:  # which comes to the same
            sums *= tl.load(shares + pairs, mask=is_row, other=0.0)[None, :]
        if HAS_BIAS:
            sums += tl.load(bias + expert * 2 * size + outs).to(tl.float32)[:, None]
        gate, up = halves_of(sums, dtype)
        values = gate_of(gate, up, ALPHA, LIMIT, SHIFT, CUBIC, dtype)
        is_wanted = is_row[None, :] & (columns < size)[:, None]
        tl.store(output + pairs[None, :] * size + columns[:, None], values, mask=is_wanted)


@triton.jit(do_not_specialize=["num_rows"])
def _down(
    x,  # [num_rows * TOP_K, in_size]
    weight,  # of experts, each [out_size, in_size]
    ratios,
    offsets,
    scales,
    bias,  # [experts, out_size], read if HAS_BIAS
    output,  # [num_rows * TOP_K, out_size]
    experts,  # [num_rows, TOP_K]
    groups,
    counts,
    num_rows,
    in_size,
    out_size,
    num_blocks,
    HAS_BIAS: tl.constexpr,
    FROM_PAIRS: tl.constexpr,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    expert, group, count = group_of(experts, groups, counts, num_rows, FROM_PAIRS)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    for first in range(0, count, BLOCK_ROWS):
        numbers = first + tl.arange(0, BLOCK_ROWS)
        is_row = numbers < count
        pairs = tl.load(group + numbers, mask=is_row, other=0).to(tl.int64)
        # Tiles past the end read the first outputs again, so that no load of the weight is masked.
        sums = expert_sums(
            x, weight, ratios, offsets, scales, expert, outs % out_size, out_size, num_blocks,
            pairs, is_row, in_size, KIND, STEPS, PARTS, BLOCK_IN, IN_FLOAT32,
        )  # fmt: skip
        if HAS_BIAS:
            sums += tl.load(bias + expert * out_size + outs % out_size).to(tl.float32)[:, None]
        is_wanted = is_row[None, :] & (outs < out_size)[:, None]
        places = output + pairs[None, :] * out_size + outs[:, None]
        tl.store(places, rounded(sums, output.dtype.element_ty), mask=is_wanted)


@triton.jit
def _add_shares(added, shares, output, SIZE: tl.constexpr, TOP_K: tl.constexpr, WEIGHS_INPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """Fills output [R, SIZE] with the sums of added [R, TOP_K, SIZE], by their shares [R, TOP_K] unless inputs were weighed."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for pair in tl.static_range(TOP_K):
        own = tl.load(added + (row * TOP_K + pair) * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
        if WEIGHS_INPUTS:
            total += own
        else:
            total += tl.load(shares + row * TOP_K + pair) * own
    tl.store(output + row * SIZE + columns, rounded(total, output.dtype.element_ty), mask=is_column)


def block_in(size: int) -> int:
    """How many inputs are multiplied at a time, of so many.

    Raises:
        ValueError: a matrix unit takes more.
    """
    block = math.gcd(size, MOST_BLOCK_IN)
    if block < LEAST_BLOCK_IN:
        raise ValueError(f"experts of {size} inputs have no kernels: their number must be a multiple of {LEAST_BLOCK_IN}")
    return block


def operands_of(weights: Tensor | NarrowStack) -> tuple[tuple[Tensor, ...], int, dict[str, Any]]:
    """(what kernels read of the weights of experts, how many blocks of inputs there are, how they read it)."""
    if isinstance(weights, NarrowStack):
        weight = weights.weight
        tensors = weight.words, weight.ratios, weight.offsets, weight.scales
        own = {"KIND": weight.kind, "STEPS": num_steps(weight.kind), "PARTS": weight.parts, "BLOCK_OUT": TILE, "BLOCK_IN": 0}
        return tensors, weight.words.shape[1], own
    own = {"KIND": "wide", "STEPS": 0, "PARTS": 0, "BLOCK_OUT": BLOCK_OUT, "BLOCK_IN": block_in(weights.shape[2])}
    return (weights,) * 4, 0, own


def num_warps(block_out: int, block_rows: int) -> int:
    """As many as have registers for the sums."""
    return 8 if block_out * block_rows > BLOCK_OUT * MOST_BLOCK_ROWS else 4


def mix_experts(x: Tensor, shares: Tensor, experts: Tensor, weights: ExpertTensors | NarrowExperts, mixing: Mixing) -> Tensor:
    """[R, H] from x [R, H], shares and experts [R, num_taken] of `route`."""
    (num_rows, hidden_size), top_k, count, size = x.shape, experts.shape[1], weights.count, weights.size
    num_pairs = num_rows * top_k
    groups, counts = experts.new_empty(count, num_rows), experts.new_empty(count)
    _group[(count,)](experts, groups, counts, num_rows, num_pairs, BLOCK=GROUP_BLOCK)
    # Twice the rows that an expert has on average, so that few have more than are multiplied at a time.
    block_rows = min(MOST_BLOCK_ROWS, padded(2 * triton.cdiv(num_pairs, count), least=16))
    tiling = {
        "HAS_BIAS": weights.down_bias is not None,
        "FROM_PAIRS": num_pairs < count,
        "BLOCK_ROWS": block_rows,
        "IN_FLOAT32": IS_INTERPRETED,
        "num_stages": 4,
    }
    grouping, programs = (experts, groups, counts, num_rows), min(num_pairs, count)
    activations, added = x.new_empty(num_pairs, size), x.new_empty(num_pairs, hidden_size)
    tensors, num_blocks, reading = operands_of(weights.gate_and_up)
    _gate[(programs, triton.cdiv(size, reading["BLOCK_OUT"] // 2))](
        x.contiguous(),
        *tensors,
        shares if weights.gate_and_up_bias is None else weights.gate_and_up_bias,
        shares,
        activations,
        *grouping,
        hidden_size,
        size,
        num_blocks,
        TOP_K=top_k,
        WEIGHS_INPUTS=mixing.weighs_inputs,
        **constants_of(mixing.gate),
        **reading,
        **tiling,
        num_warps=num_warps(reading["BLOCK_OUT"], block_rows),
    )
    tensors, num_blocks, reading = operands_of(weights.down)
    _down[(programs, triton.cdiv(hidden_size, reading["BLOCK_OUT"]))](
        activations,
        *tensors,
        shares if weights.down_bias is None else weights.down_bias,
        added,
        *grouping,
        size,
        hidden_size,
        num_blocks,
        **reading,
        **tiling,
        num_warps=num_warps(reading["BLOCK_OUT"], block_rows),
    )
    output = torch.empty_like(x)
    block = min(SUM_BLOCK, padded(hidden_size))
    _add_shares[(num_rows, triton.cdiv(hidden_size, block))](
        added, shares, output, SIZE=hidden_size, TOP_K=top_k, WEIGHS_INPUTS=mixing.weighs_inputs, BLOCK=block
    )
    return output
