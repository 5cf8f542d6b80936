import doctest

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_rt.tree import draft_tree
from eagle_rt.tree.draft_tree import ancestor_mask, root_only
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


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(draft_tree, extraglobs={"torch": torch}).failed == 0


def test_root_only() -> None:
    tree = root_only(torch.tensor([5, 6]))
    assert tree.tokens.tolist() == [[5], [6]]
    assert tree.parents.tolist() == [[-1], [-1]]
