"""What requests hold against tokens, or for them, by what their texts have said so far: in a tree, also by a node's path to it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_rt.token_map.token_map import TokenMap


@dataclass(frozen=True)
class Penalties:
    """Settings of B sequences, and the tokens whose logits they change.

    ids: [B, U] int64 target ids, each row filled up with its first one; counts: [B, U] int64, how often the reply has said each so
    far; is_seen: [B, U] bool, whether reply or prompt has; bias: [B, U] float32, added to their logits.
    frequency, presence, repetition: [B] float32; 0, 0 and 1 change nothing.
    """

    ids: Tensor
    counts: Tensor
    is_seen: Tensor
    bias: Tensor
    frequency: Tensor
    presence: Tensor
    repetition: Tensor

    def rows(self, owners: Tensor) -> "Penalties":
        """Those of T rows that belong to sequences `owners` [T]."""
        return Penalties(*(getattr(self, name)[owners] for name in self.__dataclass_fields__))


def penalized(
    logits: Tensor,
    penalties: Penalties,
    owners: Tensor | None = None,
    paths: Tensor | None = None,
    token_map: TokenMap | None = None,
) -> Tensor:
    """[T, V] float32 from the logits [T, V] after nodes of the sequences `owners` [T]; None: one of each.

    paths: [T, D] the tokens that follow each node's text on the way to it, itself included, -1 where there are fewer; they count as
    said. token_map: of logits over a draft vocabulary.

    A token that was seen has its logit divided by `repetition` if it is positive and else multiplied by it (Keskar et al., "CTRL",
    2019, section 4.1); then `frequency` times its count and, if that is not 0, `presence` are taken off (OpenAI's API); and last
    its bias is added. Counts are whole numbers, so that the same text gives the same logits whatever of it is a path.
    """
    own = penalties if owners is None else penalties.rows(owners)
    paths = own.ids[:, :0] if paths is None else paths
    # Tokens of paths that are in no row of `ids` come after those that are; those that are say the same twice.
    more = torch.where(paths >= 0, paths, own.ids[:, :1])
    ids = torch.cat((own.ids, more), dim=1)
    is_known = more[:, :, None] == own.ids[:, None, :]
    places, is_new = is_known.long().argmax(dim=2), ~is_known.any(dim=2)

    def with_more(values: Tensor) -> Tensor:
        return torch.cat((values, values.gather(1, places).masked_fill(is_new, 0)), dim=1)

    num_on_path = (ids[:, :, None] == paths[:, None, :]).sum(dim=2)
    counts = with_more(own.counts) + num_on_path
    is_seen = with_more(own.is_seen) | (num_on_path > 0)
    frequency, presence, repetition = (own_value[:, None] for own_value in (own.frequency, own.presence, own.repetition))

    size = logits.shape[1]
    # What cannot be drafted has a column of its own, which is cut off again.
    rows = logits.float() if token_map is None else torch.nn.functional.pad(logits.float(), (0, 1))
    columns = ids if token_map is None else token_map.to_draft(ids)
    values = rows.gather(1, columns)
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(is_seen, repeated, values) - frequency * counts - presence * (counts > 0) + with_more(own.bias)
    return rows.scatter(1, columns, values)[:, :size]
