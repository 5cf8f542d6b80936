"""Gated delta nets in a few kernels; the twin is `kernels.delta_net.delta_net`.

Rows are taken in blocks. What a row changes is u = write * (value - what is known at its key), and what is known
there is what the memory holds and what the rows before it have changed: so the changes of a block solve U = R - A U, where A has
numbers only where one row comes before another (Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024, section
3, for texts). Put in again and again, each turn makes one more row of every path right. A text's memory moves on with every block;
of a tree what has been changed in the blocks before is looked up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.delta_net import LEAST_SQUARE, DeltaNetWeights, Lineage, Memory
from eagle_rt.kernels.triton.add_rms_norm import norm_of
from eagle_rt.kernels.triton.common import rounded

# Rows that are taken together; numbers of a key that are multiplied at once, and of a value that a program makes.
ROWS, MOST_KEYS, MOST_VALUES = 16, 32, 32
CHANNELS = 512
SMALL = tl.constexpr(LEAST_SQUARE)


@triton.jit
def _mix_channels(
    inputs,  # [T, WIDTH], of which the first NUM_CHANNELS are mixed
    kernel,  # [NUM_CHANNELS, TAPS] float32
    channels,  # [S, TAPS - 1, NUM_CHANNELS]
    memory_rows,  # [B] int64
    is_new,  # [B] uint8
    owners,  # [T] int64
    parents,  # [T] int64
    mixed,  # [T, NUM_CHANNELS] float32
    WIDTH: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < NUM_CHANNELS
    owner = tl.load(owners + row)
    before = channels + tl.load(memory_rows + owner) * (TAPS - 1) * NUM_CHANNELS
    is_known = tl.load(is_new + owner) == 0
    total, tapped = tl.zeros([BLOCK], tl.float32), row + tl.zeros([BLOCK], tl.int64)
    for tap in tl.static_range(TAPS):
        is_here = tapped >= 0
        own = tl.load(inputs + tapped * WIDTH + columns, mask=is_column & is_here, other=0.0).to(tl.float32)
        old = tl.load(before + (TAPS - 1 + tapped) * NUM_CHANNELS + columns, mask=is_column & ~is_here, other=0.0).to(tl.float32)
        weight = tl.load(kernel + columns * TAPS + (TAPS - 1 - tap), mask=is_column, other=0.0)
        total += tl.where(is_here, own, tl.where(is_known, old, 0.0)) * weight
        tapped = tl.where(is_here, tl.load(parents + tapped, mask=is_here, other=0), tapped - 1)
    tl.store(mixed + row * NUM_CHANNELS + columns, total * tl.sigmoid(total), mask=is_column)


@triton.jit
def _remember_channels(
    inputs,  # [T, WIDTH]
    channels,  # [S, TAPS - 1, NUM_CHANNELS]
    memory_rows,  # [B] int64
    is_new,  # [B] uint8
    starts,  # [B] int64
    stops,  # [B] int64
    WIDTH: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < NUM_CHANNELS
    own = channels + tl.load(memory_rows + b) * (TAPS - 1) * NUM_CHANNELS + columns
    is_known, start, stop = tl.load(is_new + b) == 0, tl.load(starts + b), tl.load(stops + b)
    # Each is read from further behind than it is written to.
    for place in tl.static_range(TAPS - 1):
        row = stop - (TAPS - 1) + place + tl.zeros([BLOCK], tl.int64)
        is_here = row >= start
        new = tl.load(inputs + row * WIDTH + columns, mask=is_column & is_here, other=0.0)
        old = tl.load(own + (TAPS - 1 + row - start) * NUM_CHANNELS, mask=is_column & ~is_here, other=0.0)
        tl.store(own + place * NUM_CHANNELS, tl.where(is_here, new, tl.where(is_known, old, 0.0)), mask=is_column)


@triton.jit
def _products(a_of, a_rows, is_a, b_of, b_rows, is_b, KEY_DIM: tl.constexpr, KEYS: tl.constexpr):
    """[A, B] of heads that begin at rows of a with those at rows of b."""
    numbers = tl.arange(0, KEYS)
    sums = tl.zeros([a_rows.shape[0], b_rows.shape[0]], tl.float32)
    for begin in range(0, KEY_DIM, KEYS):
        a = tl.load(a_of + a_rows[:, None] + begin + numbers[None, :], mask=is_a[:, None], other=0.0)
        b = tl.load(b_of + b_rows[:, None] + begin + numbers[None, :], mask=is_b[:, None], other=0.0)
        sums += tl.dot(a, tl.trans(b), input_precision="tf32x3")
    return sums


@triton.jit
def _found(a_of, a_rows, is_a, matrix, is_known, columns, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr):
    """([A] the squares of heads that begin at rows of a, [A, columns] what the memory holds at them)."""
    numbers = tl.arange(0, KEYS)
    squares, found = tl.zeros([a_rows.shape[0]], tl.float32), tl.zeros([a_rows.shape[0], columns.shape[0]], tl.float32)
    for begin in range(0, KEY_DIM, KEYS):
        a = tl.load(a_of + a_rows[:, None] + begin + numbers[None, :], mask=is_a[:, None], other=0.0)
        old = tl.load(matrix + (begin + numbers[:, None]) * VALUE_DIM + columns[None, :])
        squares += tl.sum(a * a, 1)
        found += tl.dot(a, tl.where(is_known, old, 0.0), input_precision="tf32x3")
    return squares, found


@triton.jit
def _kept_by(rates, decay, time_bias, rows, is_row, head, num_heads):
    """[R] how much of the memory each row keeps, as a logarithm."""
    time = tl.load(rates + (rows * 2 + 1) * num_heads + head, mask=is_row, other=0.0).to(tl.float32) + tl.load(time_bias + head)
    passed = tl.maximum(time, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(time)))
    return tl.where(is_row, -tl.load(decay + head) * passed, 0.0)


@triton.jit
def _delta_rule(
    mixed,  # [T, NUM_CHANNELS] float32
    rates,  # [T, 2 * heads]
    decay,  # [heads] float32
    time_bias,  # [heads] float32
    matrices,  # [S, heads, KEY_DIM, VALUE_DIM] float32
    memory_rows,  # [B] int64
    is_new,  # [B] uint8
    starts,  # [B] int64
    stops,  # [B] int64
    visible,  # [T, NUM_COLUMNS] uint8, of trees
    all_kept,  # [T, heads] float32, filled for trees: how much is kept on the way to each row, as a logarithm
    all_changes,  # [T, heads, VALUE_DIM] float32, filled for trees
    found,  # [T, heads, VALUE_DIM] float32
    NUM_CHANNELS: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    IS_TEXT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    b, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    num_key_heads = num_heads // NUM_SHARED
    start, stop, is_known = tl.load(starts + b), tl.load(stops + b), tl.load(is_new + b) == 0
    matrix = matrices + (tl.load(memory_rows + b) * num_heads + head) * KEY_DIM * VALUE_DIM
    places, columns = tl.arange(0, ROWS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    query_of = mixed + (head // NUM_SHARED) * KEY_DIM
    key_of = query_of + num_key_heads * KEY_DIM
    value_of = mixed + 2 * num_key_heads * KEY_DIM + head * VALUE_DIM + columns
    for first in range(start, stop, ROWS):
        rows = (first + places).to(tl.int64)
        is_row, own, heads_of_rows = rows < stop, rows * NUM_CHANNELS, rows * num_heads + head
        squares, known = _found(key_of, own, is_row, matrix, is_known, columns, KEY_DIM, VALUE_DIM, KEYS)
        key_scale = 1.0 / tl.sqrt(squares + SMALL)
        squares, read = _found(query_of, own, is_row, matrix, is_known, columns, KEY_DIM, VALUE_DIM, KEYS)
        query_scale = 1.0 / tl.sqrt((squares + SMALL) * KEY_DIM)
        # Which row of the block is seen by which, itself among them.
        seen, kept = places[None, :] <= places[:, None], _kept_by(rates, decay, time_bias, rows, is_row, head, num_heads)
        kept_before = tl.zeros([ROWS], tl.float32)
        if not IS_TEXT:
            sees = visible + rows[:, None] * NUM_COLUMNS + places[None, :]
            is_tree = is_row[:, None] & (first - start + places < NUM_COLUMNS)[None, :]
            seen = tl.load(sees + first - start, mask=is_tree, other=0) != 0
            for other in range(start, first, ROWS):
                is_seen = tl.load(sees + other - start, mask=is_row[:, None], other=0) != 0
                others_kept = _kept_by(rates, decay, time_bias, other + places, other + places < stop, head, num_heads)
                kept_before += tl.sum(tl.where(is_seen, others_kept[None, :], 0.0), 1)
        kept_so_far = kept_before + tl.sum(tl.where(seen, kept[None, :], 0.0), 1)
        read *= (tl.exp(kept_so_far) * query_scale)[:, None]
        write = tl.load(rates + rows * 2 * num_heads + head, mask=is_row, other=0.0).to(tl.float32)
        write = tl.where(is_row, tl.sigmoid(write), 0.0)
        values = tl.load(value_of[None, :] + own[:, None], mask=is_row[:, None], other=0.0)
        wanted = write[:, None] * (values - (tl.exp(kept_so_far) * key_scale)[:, None] * known)
        if not IS_TEXT:
            for other in range(start, first, ROWS):
                others = (other + places).to(tl.int64)
                is_seen = tl.load(sees + other - start, mask=is_row[:, None], other=0) != 0
                others_kept = tl.load(all_kept + others * num_heads + head)
                between = tl.where(is_seen, tl.exp(tl.where(is_seen, kept_so_far[:, None] - others_kept[None, :], 0.0)), 0.0)
                changes = tl.load(all_changes + (others * num_heads + head)[:, None] * VALUE_DIM + columns[None, :])
                keys = _products(key_of, own, is_row, key_of, others * NUM_CHANNELS, others < stop, KEY_DIM, KEYS)
                factors = (write * key_scale)[:, None] * between * keys
                wanted -= tl.dot(factors, changes, input_precision="tf32x3")
                keys = _products(query_of, own, is_row, key_of, others * NUM_CHANNELS, others < stop, KEY_DIM, KEYS)
                read += tl.dot(query_scale[:, None] * between * keys, changes, input_precision="tf32x3")

        between = tl.where(seen, tl.exp(tl.where(seen, kept_so_far[:, None] - kept_so_far[None, :], 0.0)), 0.0)
        is_before = seen & (places[None, :] != places[:, None])
        factors = (write * key_scale)[:, None] * between * _products(key_of, own, is_row, key_of, own, is_row, KEY_DIM, KEYS)
        factors = tl.where(is_before, factors * key_scale[None, :], 0.0)
        changes = wanted
        for _ in range(1, tl.max(tl.sum(seen.to(tl.int32), 1), 0)):
            changes = wanted - tl.dot(factors, changes, input_precision="tf32x3")
        changes *= key_scale[:, None]  # so that they need no more of their keys than those are
        factors = query_scale[:, None] * between * _products(query_of, own, is_row, key_of, own, is_row, KEY_DIM, KEYS)
        read += tl.dot(factors, changes, input_precision="tf32x3")
        place = heads_of_rows[:, None] * VALUE_DIM + columns[None, :]
        tl.store(found + place, read, mask=is_row[:, None])
        if IS_TEXT:
            last, numbers = tl.sum(kept, 0), tl.arange(0, KEYS)
            left = tl.exp(last - kept_so_far)[:, None] * changes
            for begin in range(0, KEY_DIM, KEYS):
                keys = tl.load(key_of + own[:, None] + begin + numbers[None, :], mask=is_row[:, None], other=0.0)
                part = matrix + (begin + numbers[:, None]) * VALUE_DIM + columns[None, :]
                old = tl.exp(last) * tl.where(is_known, tl.load(part), 0.0)
                tl.store(part, old + tl.dot(tl.trans(keys), left, input_precision="tf32x3"))
            is_known = stop > start
        else:
            tl.store(all_kept + heads_of_rows, kept_so_far, mask=is_row)
            tl.store(all_changes + place, changes, mask=is_row[:, None])
        tl.debug_barrier()  # what was written is read by the next block


@triton.jit
def _norm_and_gate(
    found,  # [T, heads * VALUE_DIM] float32
    inputs,  # [T, WIDTH], behind NUM_CHANNELS the gates
    norm,  # [VALUE_DIM] float32
    owners,  # [T] int64
    stops,  # [B] int64
    outputs,  # [T, heads * VALUE_DIM]
    eps,
    WIDTH: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    row, head, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, VALUE_DIM)
    place = (row * tl.num_programs(1) + head) * VALUE_DIM + columns
    gates = tl.load(inputs + row * WIDTH + NUM_CHANNELS + head * VALUE_DIM + columns).to(tl.float32)
    is_row = row + columns * 0 < tl.load(stops + tl.load(owners + row))  # or nothing was found there
    normed = norm_of(tl.load(found + place, mask=is_row, other=0.0), tl.load(norm + columns), eps, VALUE_DIM)
    tl.store(outputs + place, rounded(normed * gates * tl.sigmoid(gates), outputs.dtype.element_ty))


def delta_net(inputs: Tensor, rates: Tensor, weights: DeltaNetWeights, memory: Memory, lineage: Lineage) -> Tensor:
    shape, num_rows, num_texts = weights.shape, len(inputs), len(lineage.starts)
    width, num_channels, value_dim = inputs.shape[1], shape.num_channels, shape.value_dim
    mixed = torch.empty(num_rows, num_channels, dtype=torch.float32, device=inputs.device)
    found = mixed.new_empty(num_rows, shape.values_size)
    inputs, rates, outputs = inputs.contiguous(), rates.contiguous(), inputs.new_empty(num_rows, shape.values_size)
    owned, ends = (memory.rows, memory.is_new.view(torch.uint8)), (lineage.starts, lineage.stops)
    sizes = {"WIDTH": width, "NUM_CHANNELS": num_channels, "TAPS": shape.taps, "BLOCK": CHANNELS}
    num_blocks = triton.cdiv(num_channels, CHANNELS)
    _mix_channels[(num_rows, num_blocks)](
        inputs, weights.kernel, memory.channels, *owned, lineage.owners, lineage.parents, mixed, **sizes
    )
    visible = None if lineage.visible is None else lineage.visible.view(torch.uint8)
    of_trees = (found, found) if visible is None else (found.new_empty(num_rows, shape.num_heads), torch.empty_like(found))
    num_columns, values = 0 if visible is None else visible.shape[1], min(MOST_VALUES, value_dim)
    _delta_rule[(num_texts, shape.num_heads, value_dim // values)](
        mixed,
        rates,
        weights.decay,
        weights.time_bias,
        memory.matrices,
        *owned,
        *ends,
        mixed if visible is None else visible,
        *of_trees,
        found,
        NUM_CHANNELS=num_channels,
        NUM_SHARED=shape.num_heads // shape.num_key_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=value_dim,
        NUM_COLUMNS=num_columns,
        IS_TEXT=lineage.is_text,
        ROWS=ROWS,
        KEYS=min(MOST_KEYS, shape.key_dim),
        VALUES=values,
        num_warps=4,
    )
    _norm_and_gate[(num_rows, shape.num_heads)](
        found,
        inputs,
        weights.norm,
        lineage.owners,
        lineage.stops,
        outputs,
        weights.eps,
        WIDTH=width,
        NUM_CHANNELS=num_channels,
        VALUE_DIM=value_dim,
        num_warps=1,
    )
    if lineage.is_text and shape.taps > 1:
        _remember_channels[(num_texts, num_blocks)](inputs, memory.channels, *owned, *ends, **sizes)
    return outputs
