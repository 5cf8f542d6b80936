"""Choosing, among all candidates of a draft tree, the ones that the target will verify."""

import torch
from torch import Tensor

from eagle_rt.tree.draft_tree import DraftTree
from eagle_rt.tree.expand import Candidates


def rerank(candidates: Candidates, target_ids: Tensor, root_tokens: Tensor, num_nodes: int) -> DraftTree:
    """The root and the `num_nodes - 1` best candidates, as a tree of target ids.

    target_ids: [W] the target id of every draft id; root_tokens: [B] target ids.

    A child never scores above its parent, so the best candidates are closed under parents, except where both score the
    same and the child is taken first. Candidates are numbered level by level and the sort is stable, so on a tie the
    shallower one wins and the tree stays connected. Source: EAGLE-2 (Li et al. 2024), section 4.2.
    """
    scores = torch.cat([level.scores for level in candidates], dim=1)
    tokens = torch.cat([level.tokens for level in candidates], dim=1)
    candidate_parents = torch.cat([level.parents for level in candidates], dim=1)
    batch_size, num_candidates = scores.shape
    assert num_nodes - 1 <= num_candidates
    order = scores.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, : num_nodes - 1].sort(dim=1).values

    # node_of[c + 1]: the node number of candidate c in the tree; a parent of -1 is the root, node 0.
    node_numbers = torch.arange(1, num_nodes, device=scores.device).expand(batch_size, -1)
    node_of = torch.zeros(batch_size, num_candidates + 1, dtype=torch.int64, device=scores.device)
    node_of.scatter_(1, chosen + 1, node_numbers)
    parents = node_of.gather(1, candidate_parents.gather(1, chosen) + 1)

    first_of_level = torch.tensor(level_starts(candidates), device=scores.device)
    depths = torch.bucketize(chosen, first_of_level, right=True)
    root = root_tokens[:, None]
    zeros = torch.zeros_like(root)
    return DraftTree(
        tokens=torch.cat((root, target_ids[tokens.gather(1, chosen)]), dim=1),
        parents=torch.cat((zeros - 1, parents), dim=1),
        depths=torch.cat((zeros, depths), dim=1),
        scores=torch.cat((zeros.float(), scores.gather(1, chosen)), dim=1),
    )


def level_starts(candidates: Candidates) -> list[int]:
    """The number of the first candidate of every level."""
    sizes = [level.tokens.shape[1] for level in candidates]
    return [sum(sizes[:depth]) for depth in range(len(sizes))]
