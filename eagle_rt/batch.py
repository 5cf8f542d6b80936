"""The tensors of one forward pass: data only."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The cache slots of a sequence's rows, in order; a range where they lie side by side, which can be read without copying them.
Slots = NDArray[np.int64] | range
NO_SLOTS = np.zeros(0, dtype=np.int64)
# What a `HostMask` would show where there is none.
NOTHING_SEEN = np.zeros((0, 0), dtype=np.bool_)


def slots_at(slots: Slots, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Some of them."""
    return slots.start + places if isinstance(slots, range) else slots[places]


def to_device(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the host, a list or an array, on the device. On a GPU through pinned memory, so that the host need not wait: else
    CUDA copies only when all that was launched before has run."""
    own = torch.as_tensor(values, dtype=dtype)
    return own.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else own.to(device)


@dataclass(frozen=True)
class HostRows:
    """The cache rows that B sequences see, as the host knows them.

    kv_lens: the number of rows of each, those included that the pass writes; kv_slots: their slots, kv_lens[b] of sequence b.
    """

    kv_lens: tuple[int, ...]
    kv_slots: tuple[Slots, ...]

    def slot_arrays(self) -> list[NDArray[np.int64]]:
        """The same slots, spelled out where they lie side by side."""
        return [np.arange(own.start, own.stop) if isinstance(own, range) else own for own in self.kv_slots]

    def firsts_and_table(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[B] the first slots of sequences whose slots lie side by side, and of the others -1 less where theirs begin in the table,
        which holds those one after the other."""
        firsts, table, num_scattered = [], [NO_SLOTS], 0
        for own in self.kv_slots:
            if isinstance(own, range):
                firsts.append(own.start)
            else:
                firsts.append(-1 - num_scattered)
                table.append(own)
                num_scattered += len(own)
        return np.array(firsts), np.concatenate(table)


@dataclass(frozen=True)
class DeviceRows:
    """The same where only the device knows the lengths, as in a captured step.

    kv_lens: [B] int32; pages: [B, P] int32, the pages of each sequence in the order of its text; page_size: rows of a page.
    """

    kv_lens: Tensor
    pages: Tensor
    page_size: int


@dataclass(frozen=True)
class Batch:
    """T packed query tokens of B sequences, and where their keys and values live.

    tokens, positions, slots: [T] int64; `slots` are the cache rows that the pass writes.
    query_starts: B + 1 host integers; sequence b owns the rows query_starts[b] : query_starts[b + 1].
    tree_mask: what each query sees of the last C visible rows; every row before those is visible to all, and None means causal.
        [B, Q, C] bool (Q query rows for every sequence), or the same as a `MaskWords`; or for each sequence its own `HostMask`.
    state_rows: [B] int64 where layers with memories keep what they remember of each sequence, see `Memories`; saves: of which
        sequence, after how many of its rows, that is to be saved, and in which row.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: tuple[int, ...]
    rows: HostRows | DeviceRows
    tree_mask: "Tensor | MaskWords | HostMask | None"
    state_rows: Tensor | None = None
    saves: tuple[tuple[int, int, int], ...] = ()

    @property
    def batch_size(self) -> int:
        return len(self.query_starts) - 1


@dataclass(frozen=True)
class HostMask:
    """A tree mask that the host knows, of B sequences that are not alike.

    visible: [T, C] what each query sees of the last widths[b] rows of its sequence b; False in the columns past that.
    """

    visible: NDArray[np.bool_]
    widths: tuple[int, ...]


@dataclass(frozen=True)
class MaskWords:
    """A tree mask as bits. words: [B, Q, W] int64, bit j of word w for column 64 w + j; num_columns: C, all bits past it are 0."""

    words: Tensor
    num_columns: int
