"""Which target token each entry of a draft vocabulary stands for."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class TokenMap:
    """target_ids: [W] int64, the target id of every draft id; all distinct."""

    target_ids: Tensor

    def to_target(self, draft_tokens: Tensor) -> Tensor:
        return self.target_ids[draft_tokens]

    def to_draft(self, tokens: Tensor) -> Tensor:
        """Draft ids of target tokens, W for those that have none."""
        ordered, order = self._ordered
        places = torch.searchsorted(ordered, tokens).clamp(max=len(ordered) - 1)
        return torch.where(ordered[places] == tokens, order[places], len(ordered))

    @cached_property
    def host_ids(self) -> NDArray[np.int64]:
        """The target ids, on the host."""
        return self.target_ids.cpu().numpy()

    @cached_property
    def _ordered(self) -> tuple[Tensor, Tensor]:
        """[W] the target ids, ascending, and [W] whose they are."""
        ordered, order = self.target_ids.sort()
        return ordered, order

    def to(self, device: torch.device) -> "TokenMap":
        return TokenMap(self.target_ids.to(device))


def identity_map(vocab_size: int) -> TokenMap:
    """The draft vocabulary is the target's."""
    return TokenMap(torch.arange(vocab_size))


def from_offsets(offsets: Tensor, target_vocab_size: int) -> TokenMap:
    """The `d2t` tensor of an EAGLE-3 checkpoint: draft id i stands for target id i + d2t[i].

    Raises:
        ValueError: an id falls outside the target's vocabulary, or two draft ids share one.
    """
    target_ids = torch.arange(len(offsets)) + offsets.to(torch.int64).cpu()
    check_target_ids(target_ids, target_vocab_size, "the head's d2t")
    return TokenMap(target_ids)


def check_target_ids(target_ids: Tensor, target_vocab_size: int, source: str) -> None:
    """Raises ValueError, naming `source`, if an id falls outside the target's vocabulary or stands there twice."""
    outside = target_ids[(target_ids < 0) | (target_ids >= target_vocab_size)]
    if len(outside):
        raise ValueError(
            f"{source} maps to target id {int(outside[0])}, but the target has only ids below {target_vocab_size}: "
            "it was made for another target"
        )
    ordered = target_ids.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise ValueError(f"{source} maps to target id {int(repeated[0])} twice: the file is damaged")
