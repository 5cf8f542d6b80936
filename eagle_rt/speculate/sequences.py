"""The sequences of one decode step as the device sees them, and the passes that can be made over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.batch import Batch, DeviceRows, HostMask, HostRows, MaskWords, Slots, slots_at
from eagle_rt.kernels.dispatch import triton_kernel
from eagle_rt.speculate.sampler import SamplingBatch
from eagle_rt.tree_shape import TreeShape


@dataclass(frozen=True)
class HostSequence:
    """A sequence whose next token is due, for steps that are decided on the host.

    text: its tokens, of which all but the last, the root, are cached in `slots`, which go on past them with scratch rows.
    bounds: the largest tree to draft, None for none at all. state_row: see `Batch.state_rows`.
    """

    id: str
    text: list[int]
    slots: Slots
    temperature: float
    bounds: TreeShape | None
    state_row: int = 0

    @property
    def num_cached(self) -> int:
        return len(self.text) - 1


@dataclass(frozen=True)
class HostCache:
    """Where B sequences are cached, with lengths that the host knows: num_cached rows each, and then scratch rows."""

    num_cached: tuple[int, ...]
    slots: tuple[Slots, ...]

    def visible(self, num_scratch: int) -> HostRows:
        """What a pass sees that writes the first `num_scratch` scratch rows."""
        kv_lens = tuple(count + num_scratch for count in self.num_cached)
        return HostRows(kv_lens, tuple(own[:kv_len] for own, kv_len in zip(self.slots, kv_lens, strict=True)))


@dataclass(frozen=True)
class DeviceCache:
    """The same with lengths that only the device knows. kv_lens: [R + 1, B] int32, with 0 to R scratch rows; pages: [B, P]
    int32."""

    kv_lens: Tensor
    pages: Tensor
    page_size: int

    def visible(self, num_scratch: int) -> DeviceRows:
        return DeviceRows(self.kv_lens[num_scratch], self.pages, self.page_size)


def scratch_rows(num_cached: Tensor, pages: Tensor, page_size: int, num_scratch: int) -> tuple[DeviceCache, Tensor]:
    """Where sequences with num_cached [B] rows on pages [B, P] are cached, and the slots [B, R] of their scratch rows."""
    if kernel := triton_kernel("begin_step", num_cached):
        kv_lens, slots = kernel(num_cached, pages, page_size, num_scratch)
    else:
        kv_lens = num_cached.int() + torch.arange(num_scratch + 1, dtype=torch.int32, device=pages.device)[:, None]
        rows = num_cached[:, None] + torch.arange(num_scratch, device=pages.device)
        slots = pages.gather(1, rows // page_size).long() * page_size + rows % page_size
    return DeviceCache(kv_lens, pages, page_size), slots


@dataclass(frozen=True)
class DecodeSequences:
    """B sequences whose next token is due.

    root_tokens: [B] the last token of each text, which is not cached yet; positions: [B] int64, where it stands, which is also the
    number of rows before it in the `cache`. scratch_slots: [B, R] those of the R scratch rows that follow. state_rows: [B]
    where each sequence's draft state is kept, and what the target's layers remember of it.
    """

    root_tokens: Tensor
    positions: Tensor
    cache: HostCache | DeviceCache
    scratch_slots: Tensor
    state_rows: Tensor
    sampling: SamplingBatch

    @property
    def batch_size(self) -> int:
        return self.root_tokens.shape[0]

    def owners(self, num_rows: int) -> Tensor:
        """[B * num_rows] whose each of so many rows of every sequence is."""
        return torch.arange(self.batch_size, device=self.root_tokens.device).repeat_interleave(num_rows)

    def scratch_batch(self, tokens: Tensor, positions: Tensor, first_row: int, tree_mask: Tensor | MaskWords | None) -> Batch:
        """A pass over [B, Q] tokens that are written to scratch rows first_row .. first_row + Q - 1."""
        num_rows = tokens.shape[1]
        last_row = first_row + num_rows
        return Batch(
            tokens=tokens.flatten(),
            positions=positions.flatten(),
            slots=self.scratch_slots[:, first_row:last_row].flatten(),
            query_starts=tuple(range(0, (self.batch_size + 1) * num_rows, num_rows)),
            rows=self.cache.visible(last_row),
            tree_mask=tree_mask,
            state_rows=self.state_rows,
        )

    def positions_at(self, depths: Tensor) -> Tensor:
        """Text positions [..., B, Q] of nodes at depths [..., B or 1, Q] (or [Q]) below the root."""
        return self.positions[:, None] + depths


def packed_scratch_batch(
    sequences: Sequence[HostSequence],
    counts: list[int],
    num_scratch: list[int],
    tokens: NDArray[np.int64],
    offsets: NDArray[np.int64],
    places: NDArray[np.int64],
    visible: NDArray[np.bool_] | None,
    device: torch.device,
) -> Batch:
    """A pass over `counts` nodes of each sequence, T in all, one sequence after the other.

    They are written to `places` [T] among the sequence's scratch rows, of which the first num_scratch are then in use. offsets: [T]
    positions past the cached rows; visible: [T, C] which of its sequence's scratch rows in use each sees, None for causal.
    """
    bases = np.repeat([own.num_cached for own in sequences], counts)
    starts = tuple(accumulate(counts, initial=0))
    kv_lens = tuple(own.num_cached + in_use for own, in_use in zip(sequences, num_scratch, strict=True))
    firsts = [own.slots.start for own in sequences if isinstance(own.slots, range)]
    if len(firsts) < len(sequences):
        spans = zip(sequences, starts, starts[1:], strict=False)
        slots = np.concatenate([slots_at(own.slots, own.num_cached + places[start:stop]) for own, start, stop in spans])
    else:
        slots = np.repeat(firsts, counts) + bases + places
    return Batch(
        tokens=torch.as_tensor(tokens, device=device),
        positions=torch.as_tensor(bases + offsets, device=device),
        slots=torch.as_tensor(slots, device=device),
        query_starts=starts,
        rows=HostRows(kv_lens, tuple(own.slots[:kv_len] for own, kv_len in zip(sequences, kv_lens, strict=True))),
        tree_mask=None if visible is None else HostMask(visible, tuple(num_scratch)),
        state_rows=torch.as_tensor([own.state_row for own in sequences], device=device),
    )
