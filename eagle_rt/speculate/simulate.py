"""Made-up acceptance: what a shape would be worth with a head that accepts so much. The texts mean nothing."""

import numpy as np
import torch
from torch import Tensor

from eagle_rt.speculate.forest import Choose, PackedTrees
from eagle_rt.tree.draft_tree import DraftTree
from eagle_rt.tree.verify import Acceptance


def simulated_paths(trees: PackedTrees, choose: Choose, mean_length: float) -> tuple[list[list[int]], list[list[int]]]:
    """The same for trees on the host: (rows of the paths, tokens gained)."""
    paths = []
    for start, stop in zip(trees.starts, trees.starts[1:], strict=False):
        wanted = int(torch.rand(()) + (mean_length - 1))
        depths = trees.depths[start:stop]
        row = start + int(np.where(depths <= wanted, depths, -1).argmax())
        path = []
        while row >= 0:
            path.append(row)
            row = int(trees.parents[row])
        path.reverse()
        paths.append(path)
    bonus = choose([path[-1] for path in paths])
    return paths, [[*trees.tokens[path[1:]].tolist(), token] for path, token in zip(paths, bonus, strict=True)]


def simulated_walk(tree: DraftTree, choice: Tensor, max_depth: int, mean_length: float) -> Acceptance:
    """As `tree.verify.walk`, but for each tree a path of floor or ceil(mean_length) - 1 drafts is kept, whatever the target chose.

    The draw is random, so that mean_length tokens are gained on average, the bonus included; fewer where a tree has no node so
    deep. choice: [B, N], of which only the bonus is taken.
    """
    batch_size, num_nodes = tree.tokens.shape
    device = tree.tokens.device
    wanted = (torch.rand(batch_size, 1, device=device) + (mean_length - 1)).floor().long().clamp(max=max_depth)
    # The deepest node that is no deeper than wanted, and of those the first.
    reach = torch.where(tree.depths <= wanted, tree.depths, -1) * num_nodes - torch.arange(num_nodes, device=device)
    node = reach.argmax(dim=1, keepdim=True)
    num_accepted = tree.depths.gather(1, node)[:, 0]
    path = torch.full((batch_size, max_depth + 1), -1, device=device)
    for _ in range(max_depth + 1):
        path = path.scatter(1, tree.depths.gather(1, node), node)
        node = tree.parents.gather(1, node).clamp(min=0)
    following = torch.cat((path[:, 1:], torch.full_like(path[:, :1], -1)), dim=1)
    drafted, chosen = tree.tokens.gather(1, following.clamp(min=0)), choice.gather(1, path.clamp(min=0))
    return Acceptance(path, num_accepted, torch.where(following >= 0, drafted, chosen))
