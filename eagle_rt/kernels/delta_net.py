"""Gated delta nets (Yang et al., "Gated Delta Networks", 2025; as Qwen3.5 has them): attention whose memory of a text does not grow
with it, but is one matrix a head, which each token changes a little.

Before that every channel of queries, keys and values is mixed with those of the few tokens before (a causal convolution), and after
it what is read is normed and gated. Rows may be those of a tree: then each goes on from the memory that its parent leaves.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.dispatch import kernel_for

# Beside the length of a query or key, which may be nothing.
LEAST_SQUARE = 1e-6
# Matrices of kernels have so many rows and columns at least.
LEAST_DIM = 16


class DeltaNetShape(NamedTuple):
    """Heads of keys, each shared by as many of values, and the numbers of each. taps: the tokens that a channel is mixed of."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Of queries, keys and values, in this order."""
        return 2 * self.keys_size + self.values_size

    @property
    def has_kernels(self) -> bool:
        return all(size >= LEAST_DIM and size.bit_count() == 1 for size in (self.key_dim, self.value_dim))


@dataclass(frozen=True)
class DeltaNetWeights:
    """All but the products, in float32. kernel: [channels, taps], the token's own last; decay: [heads] how fast each forgets, and
    time_bias [heads], see `memory_rates`; norm: [value_dim]."""

    shape: DeltaNetShape
    kernel: Tensor
    decay: Tensor
    time_bias: Tensor
    norm: Tensor
    eps: float


@dataclass(frozen=True)
class Lineage:
    """Which of T rows come before which. B sequences own the rows starts[b] to stops[b] - 1, [B] int64.

    parents: [T] int64, the row before each in its text or its tree, which stands before it here too, -1 for those that follow what
    is remembered of the sequence. visible: [T, C] bool, which rows of its tree each one sees, itself and all on the way to the
    first; None for texts, where every row goes on from the one before it, and is remembered.
    """

    starts: Tensor
    stops: Tensor
    parents: Tensor
    visible: Tensor | None = None

    @classmethod
    def of_texts(cls, starts: Tensor, stops: Tensor, num_rows: int) -> "Lineage":
        parents = torch.arange(-1, num_rows - 1, device=starts.device).index_fill(0, starts, -1)
        return cls(starts, stops, parents)

    @property
    def is_text(self) -> bool:
        return self.visible is None

    @cached_property
    def owners(self) -> Tensor:
        """[T] whose each row is."""
        rows = torch.arange(len(self.parents), device=self.parents.device)
        return torch.searchsorted(self.starts, rows, right=True) - 1


@dataclass(frozen=True)
class Memory:
    """What one layer remembers of S texts: the channels [S, taps - 1, channels] of the last tokens, before they are mixed, and a
    matrix for each head [S, heads, key_dim, value_dim] in float32.

    rows: [B] int64 which of the S are those of a pass' sequences; is_new: [B] bool, of which nothing is to be remembered."""

    channels: Tensor
    matrices: Tensor
    rows: Tensor
    is_new: Tensor


def delta_net(inputs: Tensor, rates: Tensor, weights: DeltaNetWeights, memory: Memory, lineage: Lineage) -> Tensor:
    """[T, values_size] what is read from the memory after each of T rows, normed and gated; of texts it is changed.

    inputs: [T, channels + values_size], queries, keys and values before they are mixed, and gates; rates: [T, 2 * heads], see
    `memory_rates`.
    """
    shape = weights.shape
    if shape.has_kernels and (kernel := kernel_for("delta_net", inputs)):
        return kernel(inputs, rates, weights, memory, lineage)
    read = torch.zeros(len(inputs), shape.num_heads, shape.value_dim, device=inputs.device)
    channels, gates = inputs.float().split((shape.num_channels, shape.values_size), dim=1)
    write, keep = memory_rates(rates, weights)
    for b in range(len(lineage.starts)):
        read_sequence(channels, write, keep, read, weights, memory, lineage, b)
    normed = functional.rms_norm(read, (shape.value_dim,), weights.norm, weights.eps).flatten(1)
    return (normed * functional.silu(gates)).to(inputs.dtype)


def memory_rates(rates: Tensor, weights: DeltaNetWeights) -> tuple[Tensor, Tensor]:
    """([T, heads] how much of a key's value is written anew, how much of the memory is kept), between 0 and 1."""
    write, time = rates.float().chunk(2, dim=1)
    return write.sigmoid(), (-weights.decay * functional.softplus(time + weights.time_bias)).exp()


def read_sequence(
    channels: Tensor, write: Tensor, keep: Tensor, read: Tensor, weights: DeltaNetWeights, memory: Memory, lineage: Lineage, b: int
) -> None:
    """Fills read [T, heads, value_dim] where the rows are sequence b's, one row after the other."""
    shape, row = weights.shape, memory.rows[b]
    is_new = bool(memory.is_new[b])
    # Those of the text, and then one for each row.
    matrices = [torch.zeros_like(memory.matrices[0]) if is_new else memory.matrices[row]]
    histories = [torch.zeros_like(memory.channels[0], dtype=torch.float32) if is_new else memory.channels[row].float()]
    first, stop = int(lineage.starts[b]), int(lineage.stops[b])
    for t in range(first, stop):
        parent = int(lineage.parents[t])
        place = 0 if parent < 0 else parent - first + 1
        history = torch.cat((histories[place], channels[t : t + 1]))
        histories.append(history[1:])
        mixed = functional.silu((history * weights.kernel.t()).sum(dim=0))
        queries, keys, values = mixed.split((shape.keys_size, shape.keys_size, shape.values_size))
        num_shared = shape.num_heads // shape.num_key_heads
        query, key = (unit(own.view(-1, shape.key_dim)).repeat_interleave(num_shared, dim=0) for own in (queries, keys))
        matrix = matrices[place] * keep[t, :, None, None]
        known = torch.einsum("hkv,hk->hv", matrix, key)
        change = write[t, :, None] * (values.view(shape.num_heads, -1) - known)
        matrix = matrix + key[:, :, None] * change[:, None]
        matrices.append(matrix)
        read[t] = torch.einsum("hkv,hk->hv", matrix, query) * shape.key_dim**-0.5
    if lineage.is_text and stop > first:
        memory.matrices[row] = matrices[-1]
        memory.channels[row] = histories[-1].to(memory.channels.dtype)


def unit(heads: Tensor) -> Tensor:
    """Of length one."""
    return heads * (heads.square().sum(dim=-1, keepdim=True) + LEAST_SQUARE).rsqrt()
