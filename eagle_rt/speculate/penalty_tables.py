"""Penalties at fixed places on the device, for captured steps, which go on before the host knows what the last one said."""

import torch
from torch import Tensor

from eagle_rt.speculate.penalties import Penalties, Strengths, changed, times_on_path
from eagle_rt.token_map.token_map import TokenMap


class PenaltyTables:
    """What `Penalties` say of B sequences, which are its twin, for every token of the vocabulary."""

    def __init__(self, counts: Tensor, is_seen: Tensor, bias: Tensor, strengths: Strengths) -> None:
        """[B, V + 1] each, and [B]; the last column takes what is said of no token."""
        self._counts, self._is_seen, self._bias, self._strengths = counts, is_seen, bias, strengths
        self._vocab_size = counts.shape[1] - 1

    def first(self, batch_size: int) -> "PenaltyTables":
        """Those of so many sequences, in the same memory."""
        own = slice(batch_size)
        return PenaltyTables(self._counts[own], self._is_seen[own], self._bias[own], self._strengths.at(own))

    def fill(self, penalties: Penalties | None) -> None:
        """Those of the first sequences; the others have none."""
        for table in (self._counts, self._is_seen, self._bias):
            table.zero_()
        for values, nothing in zip(self._strengths, (0, 0, 1), strict=True):
            values.fill_(nothing)
        if penalties is None:
            return
        own = slice(len(penalties.ids))
        for table, values in ((self._counts, penalties.counts), (self._is_seen, penalties.is_seen), (self._bias, penalties.bias)):
            table[own].scatter_(1, penalties.ids, values.to(table.dtype))
        for kept, values in zip(self._strengths, penalties.strengths, strict=True):
            kept[own] = values

    def count(self, tokens: Tensor, is_said: Tensor) -> None:
        """Replies have gone on with those of the tokens [B, D] that are said."""
        ids = torch.where(is_said, tokens, self._vocab_size)
        self._counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))
        self._is_seen.scatter_(1, ids, True)

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
            tables = [table[:, : self._vocab_size] for table in (self._counts, self._is_seen, self._bias)]
        else:
            # Where a path has none, or one that cannot be drafted, the first that can be is put right, which it is.
            found = token_map.to_draft(paths)
            columns = torch.where(is_drafted & (found < logits.shape[1]), found, 0)
            ids = token_map.to_target(columns)
            tables = [table[:, token_map.target_ids] for table in (self._counts, self._is_seen, self._bias)]
        rows, size = logits.float(), len(self._counts)
        counts, is_seen, bias = (table[:, None] for table in tables)
        results = changed(rows.unflatten(0, (size, -1)), counts, is_seen, bias, self._strengths.at((..., None, None))).flatten(0, 1)
        said = times_on_path(ids, paths)
        counts, is_seen, bias = (table[owners[:, None], ids] for table in (self._counts, self._is_seen, self._bias))
        values = changed(rows.gather(1, columns), counts + said, is_seen | (said > 0), bias, self._strengths.at((owners, None)))
        return results.scatter(1, columns, values)


def penalty_tables(batch_size: int, vocab_size: int, device: str) -> PenaltyTables:
    shape = batch_size, vocab_size + 1
    counts, is_seen, bias = (torch.zeros(shape, dtype=dtype, device=device) for dtype in (torch.int32, torch.bool, torch.float32))
    strengths = torch.tensor([[0.0], [0.0], [1.0]], device=device).repeat(1, batch_size)
    return PenaltyTables(counts, is_seen, bias, Strengths(*strengths))
