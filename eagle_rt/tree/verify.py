"""Verification: follow the target's own choices down a draft tree."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_rt.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class Acceptance:
    """What one verification keeps.

    path: [B, D + 1] int64 node numbers from the root down, -1 past the end; num_accepted: [B] drafted nodes on it, 0..D;
    tokens: [B, D + 1] the target's choice after every node of the path: the accepted drafts and, last, the bonus token;
    what stands past `num_emitted` is padding.
    """

    path: Tensor
    num_accepted: Tensor
    tokens: Tensor

    @property
    def num_emitted(self) -> Tensor:
        """[B] tokens that the step adds to each text: the accepted drafts and the target's own next token."""
        return self.num_accepted + 1


def walk(tree: DraftTree, choice: Tensor, max_depth: int) -> Acceptance:
    """Go from the root to the child that holds the target's choice, for as long as there is one.

    choice: [B, N], the token that the target itself puts after every node. Siblings hold distinct tokens, so there is at
    most one such child. The text is therefore what the target alone would have written, whatever the tree. The number of
    iterations is fixed.
    """
    is_chosen = tree.tokens[:, 1:] == choice.gather(1, tree.parents[:, 1:])
    is_chosen &= tree.scores[:, 1:] > -torch.inf
    node = torch.zeros_like(choice[:, 0])
    still_going = torch.ones_like(node, dtype=torch.bool)
    path = [node]
    for _ in range(max_depth):
        is_next = is_chosen & (tree.parents[:, 1:] == node[:, None])
        still_going = still_going & is_next.any(dim=1)
        node = torch.where(still_going, is_next.int().argmax(dim=1) + 1, node)
        path.append(torch.where(still_going, node, -1))
    path = torch.stack(path, dim=1)
    return Acceptance(path, (path >= 0).sum(dim=1) - 1, choice.gather(1, path.clamp(min=0)))
