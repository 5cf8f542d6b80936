"""Trees on the host against those with fixed shapes, and against brute force."""

import numpy as np
import pytest
import torch
from grown_trees import VOCAB_SIZE, grown, node_logits, sequences_with

from eagle_rt.speculate.forest import ranks_within_owners
from eagle_rt.speculate.policy import FixedPlan
from eagle_rt.tree import expand
from eagle_rt.tree.draft_tree import DraftTree, ancestor_mask
from eagle_rt.tree.rerank import rerank
from eagle_rt.tree.verify import walk
from eagle_rt.tree_shape import TreeShape


def fixed_shapes_tree(shape: TreeShape, sequence: int) -> DraftTree:
    candidates, beam = expand.first_level(node_logits([()], sequence), shape.top_k)
    paths: list[tuple[int, ...]] = [()]
    for _ in range(shape.num_steps - 1):
        paths = [(*paths[row], token) for row, token in zip(beam.parent_rows[0].tolist(), beam.tokens[0].tolist(), strict=True)]
        candidates, beam = expand.next_level(candidates, beam, node_logits(paths, sequence)[None])
    return rerank(candidates, torch.arange(VOCAB_SIZE), torch.tensor([7]), shape.num_draft_tokens)


def node_set(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Every node as the tokens on its path."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


SHAPES = [TreeShape(3, 2, 8), TreeShape(1, 4, 3), None, TreeShape(5, 4, 16), TreeShape(4, 1, 5), TreeShape(3, 3, 20)]


def test_ragged_trees_are_those_with_fixed_shapes() -> None:
    trees = grown(FixedPlan(sequences_with(SHAPES)), SHAPES)
    for index, shape in enumerate(SHAPES):
        start, stop = trees.starts[index], trees.starts[index + 1]
        tokens = trees.tokens[start:stop].tolist()
        parents = [parent - start if parent >= 0 else -1 for parent in trees.parents[start:stop].tolist()]
        if shape is None:
            assert (tokens, parents) == ([7], [-1])
            continue
        expected = fixed_shapes_tree(shape, index)
        assert node_set(tokens, parents) == node_set(expected.tokens[0].tolist(), expected.parents[0].tolist())
        mask = ancestor_mask(torch.tensor([parents]), shape.num_steps)[0].numpy()
        assert np.array_equal(trees.visible[start:stop, : stop - start], mask)
        assert not trees.visible[start:stop, stop - start :].any()
        assert trees.places[start:stop].tolist() == list(range(stop - start))
        assert {(7, *own[own >= 0].tolist()) for own in trees.paths[start:stop]} == node_set(tokens, parents)


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_is_the_one_with_fixed_shapes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    trees = grown(FixedPlan(sequences_with(SHAPES)), SHAPES)
    # A choice that follows the tree more often than not.
    choice = torch.randint(0, VOCAB_SIZE, (len(trees.tokens),), generator=generator).tolist()
    for row, parent in enumerate(trees.parents.tolist()):
        if parent >= 0 and torch.rand((), generator=generator) < 0.6:
            choice[parent] = int(trees.tokens[row])
    asked: list[int] = []

    def choose(rows: list[int]) -> list[int]:
        asked.extend(rows)
        return [choice[row] for row in rows]

    paths, chosen = trees.walk(choose)
    assert sorted(asked) == sorted(row for path in paths for row in path)  # and after no other node
    for index in range(len(SHAPES)):
        own = slice(trees.starts[index], trees.starts[index + 1])
        parents = torch.from_numpy(trees.parents[own])[None]
        parents = torch.where(parents >= 0, parents - own.start, -1)
        tree = DraftTree(
            torch.from_numpy(trees.tokens[own])[None],
            parents,
            torch.from_numpy(trees.depths[own])[None],
            torch.zeros(parents.shape),
        )
        expected = walk(tree, torch.tensor([choice[own]]), min(6, own.stop - own.start - 1))
        count = int(expected.num_accepted) + 1
        assert [row - own.start for row in paths[index]] == expected.path[0, :count].tolist()
        assert chosen[index] == expected.tokens[0, :count].tolist()


def test_ranks() -> None:
    ranks = ranks_within_owners(np.array([1, 0, 1, 1, 0]), np.array([0.5, 0.1, 0.9, 0.5, 0.1]))
    assert ranks.tolist() == [1, 0, 0, 2, 1]
