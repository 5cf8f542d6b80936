"""The sequences of one decode step as the device sees them, and the passes that can be made over them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_rt.batch import Batch, CacheRows
from eagle_rt.speculate.sampler import SamplingBatch


@dataclass(frozen=True)
class DecodeSequences:
    """B sequences whose next token is due.

    root_tokens: [B] the last token of each text, which is not cached yet; num_cached: the B host integers of rows before it,
    so that it stands at that position; positions: the same as [B] int64. cache_rows: the slots of each, scratch rows
    included; scratch_slots: [B, R] those of the R scratch rows that follow the cached ones. state_rows: [B] where each
    sequence's draft state is kept.
    """

    root_tokens: Tensor
    num_cached: tuple[int, ...]
    positions: Tensor
    cache_rows: tuple[CacheRows, ...]
    scratch_slots: Tensor
    state_rows: Tensor
    sampling: SamplingBatch

    @property
    def batch_size(self) -> int:
        return len(self.num_cached)

    def scratch_batch(self, tokens: Tensor, positions: Tensor, first_row: int, tree_mask: Tensor | None) -> Batch:
        """A pass over [B, Q] tokens that are written to scratch rows first_row .. first_row + Q - 1."""
        num_rows = tokens.shape[1]
        last_row = first_row + num_rows
        kv_lens = tuple(num_cached + last_row for num_cached in self.num_cached)
        return Batch(
            tokens=tokens.flatten(),
            positions=positions.flatten(),
            slots=self.scratch_slots[:, first_row:last_row].flatten(),
            query_starts=tuple(range(0, (self.batch_size + 1) * num_rows, num_rows)),
            kv_lens=kv_lens,
            kv_slots=tuple(rows.up_to(kv_len) for rows, kv_len in zip(self.cache_rows, kv_lens, strict=True)),
            tree_mask=tree_mask,
        )

    def positions_at(self, depths: Tensor) -> Tensor:
        """Text positions [B, Q] of nodes at depths [B, Q] (or [Q]) below the root."""
        return self.positions[:, None] + depths

    def accepted_moves(self, path: Tensor) -> tuple[Tensor, Tensor]:
        """(sources, destinations), [B * (D + 1)] slots: node path[b, i] goes to scratch row i; past the path nothing moves."""
        steps = torch.arange(path.shape[1], device=path.device)
        sources = self.scratch_slots.gather(1, torch.where(path >= 0, path, steps))
        return sources.flatten(), self.scratch_slots[:, : path.shape[1]].flatten()
