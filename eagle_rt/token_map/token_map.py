"""Which target token each entry of a draft vocabulary stands for."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenMap:
    """target_ids: [W] int64, the target id of every draft id; all distinct."""

    target_ids: Tensor

    def to_target(self, draft_tokens: Tensor) -> Tensor:
        return self.target_ids[draft_tokens]

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
    check_target_ids(target_ids, target_vocab_size)
    return TokenMap(target_ids)


def check_target_ids(target_ids: Tensor, target_vocab_size: int) -> None:
    outside = target_ids[(target_ids < 0) | (target_ids >= target_vocab_size)]
    if len(outside):
        raise ValueError(
            f"the draft vocabulary maps to target id {int(outside[0])}, but the target has only ids below "
            f"{target_vocab_size}: this head was made for another target"
        )
    if len(target_ids.unique()) != len(target_ids):
        raise ValueError("the draft vocabulary maps two draft ids to the same target id: the d2t tensor is damaged")
