"""Penalties at fixed places on the device, for captured steps, which go on before the host knows what the last one said."""

import torch
from torch import Tensor

from eagle_rt.kernels.dispatch import triton_kernel
from eagle_rt.speculate.penalties import Penalties, Strengths, changed, times_on_path
from eagle_rt.token_map.token_map import TokenMap


class PenaltyTables:
    """What `Penalties` say of B sequences, which are its twin, for every token of the vocabulary."""

    def __init__(self, counts: Tensor, is_seen: Tensor, bias: Tensor, strengths: Strengths) -> None:
        """[B, V + 1] each, and [B]; the last column takes what is said of no token."""
        self._tables, self._strengths = (counts, is_seen, bias), strengths
        self._vocab_size = counts.shape[1] - 1

    def first(self, batch_size: int) -> "PenaltyTables":
        """Those of so many sequences, in the same memory."""
        own = slice(batch_size)
        counts, is_seen, bias = (table[own] for table in self._tables)
        return PenaltyTables(counts, is_seen, bias, self._strengths.at(own))

    def fill(self, penalties: Penalties | None) -> None:
        """Those of the first sequences; the others have none."""
        for table in self._tables:
            table.zero_()
        for values, nothing in zip(self._strengths, (0, 0, 1), strict=True):
            values.fill_(nothing)
        if penalties is None:
            return
        own = slice(len(penalties.ids))
        for table, values in zip(self._tables, (penalties.counts, penalties.is_seen, penalties.bias), strict=True):
            table[own].scatter_(1, penalties.ids, values.to(table.dtype))
        for kept, values in zip(self._strengths, penalties.strengths, strict=True):
            kept[own] = values

    def count(self, tokens: Tensor, is_said: Tensor) -> None:
        """Replies have gone on with those of the tokens [B, D] that are said."""
        counts, is_seen, _ = self._tables
        ids = torch.where(is_said, tokens, self._vocab_size)
        counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))
        is_seen.scatter_(1, ids, True)

    def applied_to(
        self, logits: Tensor, owners: Tensor | None = None, paths: Tensor | None = None, token_map: TokenMap | None = None
    ) -> Tensor:
        """`Penalties.applied_to`, for as many rows of every sequence, one sequence after the other.

        Tokens on no path are changed alike in all rows of a sequence; those on one are then put right.
        """
        owners = torch.arange(len(logits), device=logits.device) if owners is None else owners
        paths = owners[:, None][:, :0] if paths is None else paths
        is_drafted = paths >= 0
        if token_map is None:
            ids = columns = torch.where(is_drafted, paths, 0)
        else:
            # Where a path has none, or one that cannot be drafted, the first that can be is put right, which it is.
            found = token_map.to_draft(paths)
            columns = torch.where(is_drafted & (found < logits.shape[1]), found, 0)
            ids = token_map.to_target(columns)
        said = times_on_path(ids, paths)
        counts, is_seen, bias = (table[owners[:, None], ids] for table in self._tables)
        values, strengths = logits.gather(1, columns).float(), self._strengths.at((owners, None))
        values = changed(values, counts + said, is_seen | (said > 0), bias, strengths)
        return self._changed(logits, token_map.target_ids if token_map else None).scatter_(1, columns, values)

    def _changed(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """As `applied_to`, paths apart. token_ids: [W] of which tokens they are; None: of all."""
        if kernel := triton_kernel("penalize", logits):
            return kernel(logits, self._tables, self._strengths, token_ids)
        columns = slice(self._vocab_size) if token_ids is None else token_ids
        counts, is_seen, bias = (table[:, None, columns] for table in self._tables)
        rows = logits.float().unflatten(0, (len(counts), -1))
        return changed(rows, counts, is_seen, bias, self._strengths.at((..., None, None))).flatten(0, 1)


def penalty_tables(batch_size: int, vocab_size: int, device: str) -> PenaltyTables:
    shape = batch_size, vocab_size + 1
    counts, is_seen, bias = (torch.zeros(shape, dtype=dtype, device=device) for dtype in (torch.int32, torch.bool, torch.float32))
    strengths = torch.tensor([[0.0], [0.0], [1.0]], device=device).repeat(1, batch_size)
    return PenaltyTables(counts, is_seen, bias, Strengths(*strengths))
