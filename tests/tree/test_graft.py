"""Copies on draft trees with fixed shapes: what is found is what the host finds, and where it is grafted is found node by node."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import random_tree

from eagle_rt.speculate.copies import LENGTHS, longest_match
from eagle_rt.tree import graft as module
from eagle_rt.tree.draft_tree import DraftTree
from eagle_rt.tree.graft import MOST_MATCHED, copied_tokens, graft

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


@settings(deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), count=st.integers(1, 9))
def test_what_the_host_copies(texts: list[list[int]], count: int) -> None:
    """Whatever stands behind the texts."""
    assert LENGTHS[-1] == MOST_MATCHED
    rows = torch.randint(0, 3, (len(texts), 64))
    for row, text in enumerate(texts):
        rows[row, : len(text)] = torch.tensor(text)
    found = copied_tokens(rows, torch.tensor([len(text) - 1 for text in texts]), count)
    for text, tokens, is_found in zip(texts, *found, strict=True):
        length, following = longest_match(np.array(text))
        assert bool(is_found) == (length > 0)
        if is_found:
            written = list(text)
            for number in range(count):
                written.append(written[following + number])
            assert tokens.tolist() == written[len(text) :]


def test_no_farther_back_than_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SEARCHED", 4)
    text = torch.tensor([[5, 1, 2, 3, 4, 5]])
    assert not copied_tokens(text, torch.tensor([5]), 1)[1]
    assert copied_tokens(text[:, 1:].contiguous(), torch.tensor([4]), 1)[1].item() is False
    assert copied_tokens(torch.tensor([[9, 5, 1, 2, 3, 5]]), torch.tensor([5]), 1)[0].item() == 1


def grafted_by_hand(tree: DraftTree, b: int, copied: list[int], num_copied: int) -> list[tuple[int, int, int, float]]:
    """(token, parent, depth, score) of each new node."""
    columns = tree.tokens[b].tolist(), tree.parents[b].tolist(), tree.scores[b].tolist()
    children = {(parent, token): node for node, (token, parent, score) in enumerate(zip(*columns, strict=True)) if score > -np.inf}
    at, depth = 0, 0
    while depth < len(copied) - num_copied and (at, copied[depth]) in children:
        at, depth = children[at, copied[depth]], depth + 1
    nodes, score = [], columns[2][at]
    for number in range(num_copied):
        nodes.append((copied[depth + number], at if number == 0 else tree.num_nodes + number - 1, depth + number + 1, score))
    return nodes


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), num_copied=st.integers(1, 5), most_merged=st.integers(0, 4))
def test_copies_go_on_below_what_was_drafted(seed: int, num_copied: int, most_merged: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, batch_size=3, num_nodes=rng.randrange(1, 12), vocab_size=4)
    copied = torch.tensor([[rng.randrange(4) for _ in range(most_merged + num_copied)] for _ in range(3)])
    is_found = torch.tensor([True, rng.random() < 0.5, True])
    grown = graft(tree, copied, is_found, num_copied)
    for name in ("tokens", "parents", "depths", "scores"):
        assert torch.equal(getattr(grown, name)[:, : tree.num_nodes], getattr(tree, name))
    for b in range(3):
        columns = (getattr(grown, name)[b, tree.num_nodes :].tolist() for name in ("tokens", "parents", "depths", "scores"))
        new = list(zip(*columns, strict=True))
        if is_found[b]:
            assert new == grafted_by_hand(tree, b, copied[b].tolist(), num_copied)
        else:
            assert new == [(int(tree.tokens[b, 0]), 0, 1, -np.inf)] * num_copied
        # No two children of a node that may be accepted hold the same token, unless all that could be merged was.
        real = [node for node in range(grown.num_nodes) if grown.scores[b, node] > -np.inf]
        edges = [(int(grown.parents[b, node]), int(grown.tokens[b, node])) for node in real]
        depth = int(grown.depths[b, tree.num_nodes]) - 1
        assert len(set(edges)) == len(edges) or depth == most_merged
