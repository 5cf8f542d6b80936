"""Copies on the device against their torch twins: in Triton's interpreter on a CPU, natively on a GPU."""

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import random_tree

from eagle_rt.kernels import dispatch
from eagle_rt.kernels.triton import graft_copies as module
from eagle_rt.kernels.triton.graft_copies import graft_copies
from eagle_rt.kernels.triton.note_tokens import note_tokens
from eagle_rt.speculate.texts import TextTable
from eagle_rt.tree import graft as twin
from eagle_rt.tree.graft import copied_tokens, graft

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def twins() -> Iterator[None]:
    """On a GPU too the twins are those in torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "prefers_triton", lambda x: False)
        yield


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    num_nodes=st.sampled_from([1, 2, 5, 32, 60]),
    num_copied=st.sampled_from([1, 4, 16]),
    most_merged=st.integers(0, 5),
    vocab_size=st.sampled_from([2, 3, 200]),
    most_searched=st.sampled_from([7, 16384]),
    block=st.sampled_from([16, 1024]),
)
def test_graft_copies(
    seed: int, num_nodes: int, num_copied: int, most_merged: int, vocab_size: int, most_searched: int, block: int
) -> None:
    """Texts of one token and of several blocks; trees of one node and of many; few tokens, so that much is found and merged."""
    rng, batch_size = random.Random(seed), 3
    tree = random_tree(rng, batch_size, num_nodes, vocab_size)
    texts = torch.tensor([[rng.randrange(vocab_size) for _ in range(80)] for _ in range(5)], dtype=torch.int32)
    states, places = torch.tensor([4, 0, 2]), torch.tensor([0, rng.randrange(1, 80), rng.randrange(80)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin, "MOST_SEARCHED", most_searched)
        patch.setattr(module, "BLOCK_SEARCHED", block)
        own = texts[states].scatter(1, places[:, None], tree.tokens[:, :1].int())
        expected = graft(tree, *copied_tokens(own, places, most_merged + num_copied), num_copied)
        given_tree = tuple(column.to(DEVICE) for column in (tree.tokens, tree.parents, tree.depths, tree.scores))
        on_device = texts.to(DEVICE), states.to(DEVICE), places.to(DEVICE)
        found = graft_copies(*on_device, given_tree, num_copied, most_merged, twin.MOST_MATCHED, most_searched)
    for name, column in zip(("tokens", "parents", "depths", "scores"), found, strict=True):
        assert torch.equal(column.cpu(), getattr(expected, name)), name


def test_long_runs_are_matched_as_far_as_is_looked_for() -> None:
    """The place with the longest run before it, the latest of those; beyond what is looked for all are as long."""
    run = list(range(10, 50))
    texts = torch.tensor([[*run[20:], 1, *run, 2, *run[5:], 3, *run[10:], 4, *run]], dtype=torch.int32)
    tree = random_tree(random.Random(0), 1, 1, 2)
    tree.tokens[0, 0] = run[-1]
    place = torch.tensor([texts.shape[1] - 1])
    own = (tree.tokens, tree.parents, tree.depths, tree.scores)
    for most_matched, following in ((32, 3), (40, 2), (25, 4)):
        args = (texts.to(DEVICE), torch.tensor([0], device=DEVICE), place.to(DEVICE), tuple(column.to(DEVICE) for column in own))
        tokens, *_ = graft_copies(*args, 1, 0, most_matched, 16384)
        assert tokens[0, 1].item() == following, most_matched


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), num_tokens=st.integers(1, 9))
def test_note_tokens(seed: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table, other = (TextTable(6, 40, DEVICE) for _ in range(2))
    states, places = torch.tensor([5, 1, 3], device=DEVICE), torch.randint(0, 40 - num_tokens, (3,), generator=generator).to(DEVICE)
    roots, tokens = (torch.randint(0, 2**17, shape, generator=generator).to(DEVICE) for shape in ((3,), (3, num_tokens)))
    table.note(states, places, roots, tokens)
    note_tokens(other.tokens, states, places, roots, tokens)
    assert torch.equal(table.tokens, other.tokens)
    assert int((table.tokens != 0).sum()) <= 3 * (num_tokens + 1)


def test_no_match_goes_on_before_a_text_begins() -> None:
    """Into the end of the row before, which here ends as the text does."""
    texts = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 7, 9, 6, 7]], dtype=torch.int32)
    tree = random_tree(random.Random(0), 1, 1, 2)
    tree.tokens[0, 0] = 7
    own = tuple(column.to(DEVICE) for column in (tree.tokens, tree.parents, tree.depths, tree.scores))
    state, place = (torch.tensor([number], device=DEVICE) for number in (1, 5))
    assert graft_copies(texts.to(DEVICE), state, place, own, 1, 0, 32, 16384)[0][0, 1].item() == 9
