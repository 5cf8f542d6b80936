"""What requests hold against tokens, or for them, by what their texts have said so far: in a tree, also by a node's path to it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle_rt.token_map.token_map import TokenMap


class Strengths(NamedTuple):
    """Settings of sequences, float32; 0, 0 and 1 change nothing."""

    frequency: Tensor
    presence: Tensor
    repetition: Tensor

    def at(self, index: Any) -> "Strengths":
        return Strengths(*(values[index] for values in self))


def changed(values: Tensor, counts: Tensor, is_seen: Tensor, bias: Tensor, strengths: Strengths) -> Tensor:
    """Logits float32 after penalties, of tokens that replies have said so often, and texts at all; all of like shapes.

    A token that was seen has its logit divided by `repetition` if it is positive and else multiplied by it (Keskar et al., "CTRL",
    2019, section 4.1); then `frequency` times its count and, if that is not 0, `presence` are taken off (OpenAI's API); and last
    its bias is added. Counts are whole numbers, so that the same text gives the same logits whatever of it is a path.
    """
    frequency, presence, repetition = strengths
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    return torch.where(is_seen, repeated, values) - frequency * counts - presence * (counts > 0) + bias


@dataclass(frozen=True)
class Penalties:
    """Settings of B sequences, and the tokens whose logits they change.

    ids: [B, U] int64 target ids, each row filled up with its first one; counts: [B, U] int64, how often the reply has said each so
    far; is_seen: [B, U] bool, whether reply or prompt has; bias: [B, U] float32, added to their logits. strengths: [B].
    """

    ids: Tensor
    counts: Tensor
    is_seen: Tensor
    bias: Tensor
    strengths: Strengths

    def rows(self, owners: Tensor) -> "Penalties":
        """Those of T rows that belong to sequences `owners` [T]."""
        return Penalties(self.ids[owners], self.counts[owners], self.is_seen[owners], self.bias[owners], self.strengths.at(owners))

    def applied_to(
        self, logits: Tensor, owners: Tensor | None = None, paths: Tensor | None = None, token_map: TokenMap | None = None
    ) -> Tensor:
        """[T, V] float32 from the logits [T, V] after nodes of the sequences `owners` [T]; None: one of each.

        paths: [T, D] the tokens that follow each node's text on the way to it, itself included, -1 where there are fewer; they
        count as said. token_map: of logits over a draft vocabulary.
        """
        own = self if owners is None else self.rows(owners)
        paths = own.ids[:, :0] if paths is None else paths
        # Tokens of paths that are in no row of `ids` come after those that are; those that are say the same twice.
        more = torch.where(paths >= 0, paths, own.ids[:, :1])
        ids = torch.cat((own.ids, more), dim=1)
        is_known = more[:, :, None] == own.ids[:, None, :]
        places, is_new = is_known.long().argmax(dim=2), ~is_known.any(dim=2)

        def with_more(values: Tensor) -> Tensor:
            return torch.cat((values, values.gather(1, places).masked_fill(is_new, 0)), dim=1)

        said = times_on_path(ids, paths)
        # What cannot be drafted has a column of its own, which is cut off again.
        rows = logits.float() if token_map is None else torch.nn.functional.pad(logits.float(), (0, 1))
        columns = ids if token_map is None else token_map.to_draft(ids)
        values, counts, is_seen = rows.gather(1, columns), with_more(own.counts) + said, with_more(own.is_seen) | (said > 0)
        values = changed(values, counts, is_seen, with_more(own.bias), own.strengths.at((..., None)))
        return rows.scatter(1, columns, values)[:, : logits.shape[1]]


def times_on_path(ids: Tensor, paths: Tensor) -> Tensor:
    """[T, K] how often each of ids [T, K] is on the path [T, D] of its row."""
    return (ids[:, :, None] == paths[:, None, :]).sum(dim=2)
