"""Gated delta nets on a CPU in one compiled function; needs numba. The twin is `kernels.delta_net`.

Each head of keys goes through the rows of a sequence one by one, and its matrices stay in the processor's caches. So a row comes
out the same in any tree and in none.
"""

import numpy as np
from numba import njit, prange
from torch import Tensor

from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import (
    FLAGS,
    LANES,
    ONE,
    ZERO,
    add_product,
    array_of,
    load,
    multiply,
    number_of,
    sigmoid,
    spread,
    store,
    stored_as,
)
from eagle_rt.kernels.delta_net import LEAST_SQUARE, DeltaNetShape, DeltaNetWeights, Lineage, Memory

# Columns of a matrix that are taken together.
COLUMNS = 2 * LANES
SMALL = np.float32(LEAST_SQUARE)


def delta_net(inputs: Tensor, rates: Tensor, weights: DeltaNetWeights, memory: Memory, lineage: Lineage) -> Tensor:
    use_torch_threads()
    outputs = inputs.new_empty(len(inputs), weights.shape.values_size)
    rows = lineage.starts.numpy(), lineage.stops.numpy(), lineage.parents.numpy(), lineage.is_text
    read_rows(
        array_of(inputs.contiguous()),
        array_of(rates.contiguous()),
        weights.shape,
        weights.kernel.numpy(),
        weights.decay.numpy(),
        weights.time_bias.numpy(),
        weights.norm.numpy(),
        np.float32(weights.eps),
        array_of(memory.channels),
        memory.matrices.numpy(),
        memory.rows.numpy(),
        memory.is_new.numpy(),
        *rows,
        array_of(outputs),
    )
    return outputs


@njit(cache=True, parallel=True)
def read_rows(
    inputs: np.ndarray,
    rates: np.ndarray,
    shape: DeltaNetShape,
    kernel: np.ndarray,
    decay: np.ndarray,
    time_bias: np.ndarray,
    norm: np.ndarray,
    eps: np.float32,
    old_channels: np.ndarray,
    old_matrices: np.ndarray,
    memory_rows: np.ndarray,
    is_new: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    parents: np.ndarray,
    is_text: bool,
    outputs: np.ndarray,
) -> None:
    """See `kernels.delta_net.delta_net`; what may be of sixteen bits is an `array_of`."""
    num_heads, key_dim, value_dim = shape.num_heads, shape.key_dim, shape.value_dim
    num_shared, num_before = num_heads // shape.num_key_heads, shape.taps - 1
    num_channels = 2 * shape.num_key_heads * key_dim + num_heads * value_dim
    for item in prange(len(starts) * shape.num_key_heads):
        b, key_head = item // shape.num_key_heads, item % shape.num_key_heads
        start, stop, own = starts[b], stops[b], memory_rows[b]
        if stop == start:
            continue
        # The channels of this head: of queries, of keys, and of the values that share them.
        size = 2 * key_dim + num_shared * value_dim
        offsets = np.empty(size, dtype=np.int64)
        for i in range(key_dim):
            offsets[i] = key_head * key_dim + i
            offsets[key_dim + i] = (shape.num_key_heads + key_head) * key_dim + i
        for i in range(num_shared * value_dim):
            offsets[2 * key_dim + i] = 2 * shape.num_key_heads * key_dim + key_head * num_shared * value_dim + i
        before = np.zeros((num_before, size), dtype=np.float32)
        if not is_new[b]:
            for j in range(num_before):
                for i in range(size):
                    before[j, i] = number_of(old_channels[own, j, offsets[i]])
        if is_new[b]:
            old_matrices[own, key_head * num_shared : (key_head + 1) * num_shared] = ZERO
        # Of a text there is one for each head, which changes; each row of a tree has its own.
        matrices = np.empty((num_shared, 0 if is_text else stop - start, key_dim, value_dim), dtype=np.float32)
        mixed, taps = np.empty(size, dtype=np.float32), np.empty(shape.taps, dtype=np.int64)
        change, read = np.empty(value_dim, dtype=np.float32), np.empty(value_dim, dtype=np.float32)
        for row in range(start, stop):
            find_taps(parents, row, taps)
            mix(inputs, before, offsets, kernel, taps, mixed)
            query, key = mixed[:key_dim], mixed[key_dim : 2 * key_dim]
            make_unit(query, np.float32(ONE / np.sqrt(np.float32(key_dim))))
            make_unit(key, ONE)
            parent = parents[row]
            for h in range(num_shared):
                head = key_head * num_shared + h
                of_text = old_matrices[own, head]
                old = of_text if is_text or parent < 0 else matrices[h, parent - start]
                new = of_text if is_text else matrices[h, row - start]
                write = sigmoid(number_of(rates[row, head]))
                keep = kept(decay[head], number_of(rates[row, num_heads + head]) + time_bias[head])
                values = mixed[2 * key_dim + h * value_dim : 2 * key_dim + (h + 1) * value_dim]
                update(old, new, query, key, values, write, keep, change, read)
                norm_and_gate(read, norm, eps, inputs[row, num_channels + head * value_dim :], outputs[row, head * value_dim :])
        if is_text:
            # The rows before the one that would follow.
            for j in range(num_before):
                last = stop - num_before + j
                for i in range(size):
                    if last >= start:
                        old_channels[own, j, offsets[i]] = inputs[last, offsets[i]]
                    else:
                        old_channels[own, j, offsets[i]] = stored_as(before[num_before + last - start, i], old_channels)


@njit(cache=True)
def find_taps(parents: np.ndarray, row: int, taps: np.ndarray) -> None:
    """Fills taps [n] with the rows that a row's channels are mixed of, itself last; -1, -2 and so on for those before the pass."""
    for tap in range(len(taps) - 1, -1, -1):
        taps[tap] = row
        row = row - 1 if row < 0 else parents[row]


@njit(cache=True, fastmath=set(FLAGS))
def mix(
    inputs: np.ndarray, before: np.ndarray, offsets: np.ndarray, kernel: np.ndarray, taps: np.ndarray, mixed: np.ndarray
) -> None:
    """Fills mixed [n] with the channels at offsets [n], each mixed of its taps and bent (SiLU)."""
    for i in range(len(offsets)):
        channel, total = offsets[i], ZERO
        for tap in range(len(taps)):
            row = taps[tap]
            number = number_of(inputs[row, channel]) if row >= 0 else before[len(before) + row, i]
            total += number * kernel[channel, tap]
        mixed[i] = total * sigmoid(total)


@njit(cache=True)
def kept(decay: np.float32, time: np.float32) -> np.float32:
    """exp(-decay * softplus(time))."""
    grown = np.float64(time)
    grown = max(grown, 0.0) + np.log1p(np.exp(-abs(grown)))
    return np.float32(np.exp(-np.float64(decay) * grown))


@njit(cache=True, fastmath=set(FLAGS), error_model="numpy")
def make_unit(numbers: np.ndarray, length: np.float32) -> None:
    """Of this length."""
    squares = ZERO
    for number in numbers:
        squares += number * number
    scale = length / np.sqrt(squares + SMALL)
    for i in range(len(numbers)):
        numbers[i] *= scale


@njit(cache=True, fastmath=set(FLAGS))
def update(
    old: np.ndarray,
    new: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    values: np.ndarray,
    write: np.float32,
    keep: np.float32,
    change: np.ndarray,
    read: np.ndarray,
) -> None:
    """The delta rule: fills the new matrix [K, V], which may be the old one, and read [V], what the query finds in it."""
    key_dim, value_dim = old.shape
    for j in range(0, value_dim, COLUMNS):
        first = second = spread(ZERO)
        for i in range(key_dim):
            place = i * value_dim + j
            first = add_product(first, spread(key[i]), load(old, place))
            second = add_product(second, spread(key[i]), load(old, place + LANES))
        # Of each value what is not known yet.
        store(change, j, multiply(spread(write), add_product(load(values, j), spread(-keep), first)))
        store(change, j + LANES, multiply(spread(write), add_product(load(values, j + LANES), spread(-keep), second)))
    for j in range(0, value_dim, COLUMNS):
        first = second = spread(ZERO)
        first_change, second_change = load(change, j), load(change, j + LANES)
        for i in range(key_dim):
            place = i * value_dim + j
            one = add_product(multiply(spread(keep), load(old, place)), spread(key[i]), first_change)
            other = add_product(multiply(spread(keep), load(old, place + LANES)), spread(key[i]), second_change)
            store(new, place, one)
            store(new, place + LANES, other)
            first = add_product(first, spread(query[i]), one)
            second = add_product(second, spread(query[i]), other)
        store(read, j, first)
        store(read, j + LANES, second)


@njit(cache=True, fastmath=set(FLAGS), error_model="numpy")
def norm_and_gate(read: np.ndarray, norm: np.ndarray, eps: np.float32, gates: np.ndarray, outputs: np.ndarray) -> None:
    """Fills the first of outputs, by the first of gates."""
    squares = ZERO
    for number in read:
        squares += number * number
    scale = ONE / np.sqrt(squares / np.float32(len(read)) + eps)
    for i in range(len(read)):
        gate = number_of(gates[i])
        outputs[i] = stored_as(read[i] * scale * norm[i] * gate * sigmoid(gate), outputs)
