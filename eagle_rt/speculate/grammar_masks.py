"""Logits without the tokens that grammars rule out: in a tree, by a node's path to it as well."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle_rt.batch import to_device
from eagle_rt.speculate.grammar_match import GrammarMatch
from eagle_rt.token_map.token_map import TokenMap


@dataclass(frozen=True)
class GrammarMasks:
    """matches: of B sequences, None where any token will do."""

    matches: Sequence[GrammarMatch | None]

    def applied_to(
        self, logits: Tensor, owners: Tensor | None = None, paths: Tensor | None = None, token_map: TokenMap | None = None
    ) -> Tensor:
        """[T, V] from the logits [T, V] after nodes of the sequences `owners` [T], with -inf where a token may not follow; None:
        one of each.

        paths: [T, D] the tokens that follow each text on the way to its node, itself included, from the first to the last, with
        -1 anywhere between. token_map: of logits over a draft vocabulary, which stay as they are where none of it may follow.
        Reads owners and paths on the host.
        """
        numbers = range(len(self.matches)) if owners is None else owners.tolist()
        ways = [[]] * len(numbers) if paths is None else paths.tolist()
        rows, masks = [], []
        for row, (number, way) in enumerate(zip(numbers, ways, strict=True)):
            if match := self.matches[number]:
                rows.append(row)
                masks.append(match.allowed(tuple(token for token in way if token >= 0)))
        if not rows:
            return logits
        if token_map is not None:
            of_drafts = [mask[token_map.host_ids] for mask in masks]
            masks = [mask if mask.any() else ~mask for mask in of_drafts]
        allowed = to_device(np.stack(masks), logits.device)
        if len(rows) == len(logits):
            return torch.where(allowed, logits, -torch.inf)
        own = to_device(rows, logits.device, torch.int64)
        return logits.index_copy(0, own, torch.where(allowed, logits[own], -torch.inf))
