import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_rt.tree.draft_tree import DraftTree
from eagle_rt.tree.verify import walk
from tree import brute_force
from tree.test_draft_tree import parent_lists

NUM_TOKENS = 4


def tree_of(parents: list[int], tokens: list[int]) -> DraftTree:
    depths = [len(brute_force.ancestors(parents, node)) - 1 for node in range(len(parents))]
    return DraftTree(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([depths]), torch.zeros(1, len(parents)))


@settings(max_examples=200, deadline=None)
@given(parent_lists(12), st.data())
def test_walk_equals_brute_force(parents: list[int], data: st.DataObject) -> None:
    taken: dict[int, set[int]] = {}
    tokens = [0]
    for parent in parents[1:]:  # siblings hold distinct tokens
        free = sorted(set(range(NUM_TOKENS + len(parents))) - taken.setdefault(parent, set()))[:NUM_TOKENS]
        tokens.append(data.draw(st.sampled_from(free)))
        taken[parent].add(tokens[-1])
    choice = [data.draw(st.sampled_from(tokens)) for _ in parents]
    tree = tree_of(parents, tokens)
    max_depth = int(tree.depths.max())
    acceptance = walk(tree, torch.tensor([choice]), max_depth)
    expected = brute_force.walk(parents, tokens, choice)
    assert acceptance.path[0].tolist() == expected + [-1] * (max_depth + 1 - len(expected))
    assert acceptance.num_accepted.tolist() == [len(expected) - 1]
    assert acceptance.tokens[0, : len(expected)].tolist() == [choice[node] for node in expected]
    assert acceptance.num_emitted.tolist() == [len(expected)]


def test_a_node_without_a_score_is_never_accepted() -> None:
    tree = tree_of([-1, 0, 1], [9, 1, 2])
    tree.scores[0, 1:] = -torch.inf
    acceptance = walk(tree, torch.tensor([[1, 2, 3]]), 2)
    assert acceptance.num_accepted.tolist() == [0]
    assert acceptance.tokens[0, 0] == 1
