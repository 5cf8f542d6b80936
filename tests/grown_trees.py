"""Draft trees grown by a plan over made-up logits in tests."""

from collections.abc import Sequence

import numpy as np
import torch

from eagle_rt.speculate.forest import Candidates, PackedTrees, joined, pack
from eagle_rt.speculate.policy import DraftPlan
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree.expand import top_children
from eagle_rt.tree_shape import TreeShape

VOCAB_SIZE = 50
Shapes = Sequence[TreeShape | None]


def node_logits(paths: list[tuple[int, ...]], sequence: int) -> torch.Tensor:
    """Made-up logits after a path of tokens: a function of the path alone."""
    rows = [torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(hash((sequence, path)) % 2**31)) * 2 for path in paths]
    return torch.stack(rows)


def sequences_with(shapes: Shapes) -> list[HostSequence]:
    return [HostSequence(f"s{index}", [1, 2, 3], range(100), 0.0, shape) for index, shape in enumerate(shapes)]


def grown(plan: DraftPlan, shapes: Shapes) -> PackedTrees:
    """The trees that a plan makes of the made-up logits for sequences with such bounds."""
    levels: list[Candidates] = []
    nodes: list[tuple] = []  # columns of all so far
    paths: list[tuple[int, ...]] = []
    numbers, num_before = np.full(len(plan.drafters), -1), 0
    owners, above = np.array(plan.drafters), np.ones(len(plan.drafters))
    while len(owners):
        columns: list[tuple] = []
        for owner, number, value in zip(owners.tolist(), numbers.tolist(), above.tolist(), strict=True):
            path = () if number < 0 else paths[number]
            shape = shapes[owner]
            assert shape
            log_probs, tokens = top_children(node_logits([path], owner)[0], shape.top_k)
            score = nodes[number][5] if number >= 0 else 0.0
            for log_prob, token in zip(log_probs.tolist(), tokens.tolist(), strict=True):
                columns.append((owner, token, number, len(path) + 1, log_prob, score + log_prob, value))
                paths.append((*path, token))
        level = Candidates(*(np.array(column) for column in zip(*columns, strict=True)))
        levels.append(level)
        nodes += columns
        places = plan.expand(level)
        numbers, owners, above = num_before + places, level.owners[places], level.values[places]
        num_before += len(level)
    candidates = joined(levels)
    kept = plan.keep(candidates)
    trees = pack(np.full(len(shapes), 7), candidates[kept], kept)
    assert trees.tokens[trees.rows_of_chosen].tolist() == candidates.tokens[kept].tolist()
    assert trees.owners[trees.rows_of_chosen].tolist() == candidates.owners[kept].tolist()
    return trees


def paths_of(trees: PackedTrees, sequence: int) -> set[tuple[int, ...]]:
    """Every node of a sequence's tree as the tokens that lead to it from below the root."""
    own = trees.paths[trees.starts[sequence] : trees.starts[sequence + 1]]
    return {tuple(path[path >= 0].tolist()) for path in own}
