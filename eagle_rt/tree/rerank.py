"""Choosing, among all candidates of a draft tree, the ones that the target will verify."""

import torch
from torch import Tensor

from eagle_rt.tree.draft_tree import DraftTree
from eagle_rt.tree.expand import Candidates


def rerank(candidates: Candidates, candidate_target_tokens: Tensor, root_tokens: Tensor, num_nodes: int) -> DraftTree:
    """The root and the `num_nodes - 1` best candidates, as a tree.

    candidate_target_tokens: [B, C], `candidates.tokens` as target ids; root_tokens: [B].

    A child never scores above its parent, so the best candidates are closed under parents, except where both score the
    same and the child is taken first. Candidates are numbered level by level and the sort is stable, so on a tie the
    shallower one wins and the tree stays connected. Source: EAGLE-2 (Li et al. 2024), section 4.2.
    """
    batch_size, num_candidates = candidates.scores.shape
    assert num_nodes - 1 <= num_candidates
    order = candidates.scores.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, : num_nodes - 1].sort(dim=1).values

    # node_of[c]: the node number of candidate c in the tree; parent -1 is the root, node 0.
    device = root_tokens.device
    node_of = torch.zeros(batch_size, num_candidates, dtype=torch.int64, device=device)
    node_numbers = torch.arange(1, num_nodes, device=device).expand(batch_size, -1)
    node_of.scatter_(1, chosen, node_numbers)
    parent_candidates = candidates.parents.gather(1, chosen)
    parents = torch.where(parent_candidates < 0, 0, node_of.gather(1, parent_candidates.clamp(min=0)))

    root = root_tokens[:, None]
    zeros = torch.zeros_like(root)
    return DraftTree(
        tokens=torch.cat((root, candidate_target_tokens.gather(1, chosen)), dim=1),
        parents=torch.cat((zeros - 1, parents), dim=1),
        depths=torch.cat((zeros, candidates.depths[chosen]), dim=1),
        scores=torch.cat((zeros.float(), candidates.scores.gather(1, chosen)), dim=1),
    )
