import doctest

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_rt.tree import draft_tree
from eagle_rt.tree.draft_tree import DraftTree, ancestor_mask, path_tokens, root_only
from tree import brute_force


@st.composite
def parent_lists(draw: st.DrawFn, max_nodes: int = 70) -> list[int]:
    """Any tree: every node's parent comes before it."""
    size = draw(st.integers(1, max_nodes))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]


@settings(max_examples=60, deadline=None)
@given(parent_lists())
def test_ancestor_mask_equals_following_the_parents(parents: list[int]) -> None:
    depths = [len(brute_force.ancestors(parents, node)) - 1 for node in range(len(parents))]
    mask = ancestor_mask(torch.tensor([parents, parents]), max(depths))
    for node in range(len(parents)):
        assert set(mask[1, node].nonzero()[:, 0].tolist()) == brute_force.ancestors(parents, node)


@settings(max_examples=60, deadline=None)
@given(parent_lists(max_nodes=20))
def test_path_tokens_are_those_below_the_root(parents: list[int]) -> None:
    """From the top: children come after their parents."""
    depths = [len(brute_force.ancestors(parents, node)) - 1 for node in range(len(parents))]
    tokens = torch.arange(100, 100 + len(parents)).expand(2, -1)
    both = torch.tensor([parents, parents])
    paths = path_tokens(DraftTree(tokens, both, torch.tensor([depths, depths]), torch.zeros(tokens.shape)), max(depths))
    for node in range(len(parents)):
        downwards = sorted(brute_force.ancestors(parents, node) - {0})
        assert paths[1, node].tolist() == [-1] * (max(depths) - len(downwards)) + [100 + own for own in downwards]


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(draft_tree, extraglobs={"torch": torch}).failed == 0


def test_root_only() -> None:
    tree = root_only(torch.tensor([5, 6]))
    assert tree.tokens.tolist() == [[5], [6]]
    assert tree.parents.tolist() == [[-1], [-1]]
