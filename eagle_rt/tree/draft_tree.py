"""A batch of draft trees, described by their parents alone; masks and positions are derived from them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """B trees of N nodes each.

    tokens: [B, N] int64 target ids, column 0 the root: the last token that is already certain.
    parents: [B, N] int64 node numbers; the root's is -1 and every other parent comes before its child.
    depths: [B, N] int64, 0 at the root.
    scores: [B, N] float32 cumulative draft log-probabilities, 0 at the root; -inf marks a node that must not be accepted.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]


def root_only(root_tokens: Tensor) -> DraftTree:
    """The tree of plain decoding: [B] tokens become B trees of one node."""
    column = root_tokens[:, None]
    zeros = torch.zeros_like(column)
    return DraftTree(column, zeros - 1, zeros, zeros.float())


def path_tokens(tree: DraftTree, max_depth: int) -> Tensor:
    """[B, N, max_depth] the tokens from below the root to each node, -1 before them. max_depth: as in `ancestor_mask`."""
    nodes = torch.arange(tree.num_nodes, device=tree.tokens.device).expand_as(tree.tokens)
    columns = []
    for _ in range(max_depth):
        is_drafted = nodes > 0
        columns.append(tree.tokens.gather(1, nodes).masked_fill(~is_drafted, -1))
        nodes = tree.parents.gather(1, nodes).clamp(min=0)
    return torch.stack(columns[::-1], dim=2) if columns else tree.tokens[:, :, None][:, :, :0]


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """[B, N, N] bool: row i is True at i itself and at every node on the way up to the root.

    max_depth: at least the depth of the deepest node. Source: EAGLE-2 (Li et al. 2024), section 4.2.

    >>> ancestor_mask(torch.tensor([[-1, 0, 0, 1]]), max_depth=2)[0].int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    batch_size, num_nodes = parents.shape
    itself = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).expand(batch_size, -1, -1)
    # The root names itself as its parent here, which adds nothing to its row.
    parent_rows = parents.clamp(min=0)[:, :, None].expand(-1, -1, num_nodes)
    mask = itself
    for _ in range(max_depth):
        mask = itself | mask.gather(1, parent_rows)
    return mask
