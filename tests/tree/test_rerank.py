import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_rt.tree.expand import Level
from eagle_rt.tree.rerank import rerank
from eagle_rt.tree_shape import num_tree_nodes
from tree import brute_force
from tree.test_expand import column, grow, paths_of


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, 1, 2]), st.floats(0, 1, allow_nan=False))
def test_rerank_keeps_the_best_connected_nodes(seed: int, num_steps: int, top_k: int, levels: int | None, share: float) -> None:
    """With `levels` 1 and 2 most scores tie."""
    candidates, _ = grow([seed, seed + 1], num_steps, top_k, levels)
    num_nodes = 2 + round(share * (num_tree_nodes(num_steps, top_k) - 2))
    tree = rerank(candidates, torch.arange(100, 200), torch.tensor([7, 8]), num_nodes)
    for row in range(2):
        parents, scores = column(candidates, "parents", row), column(candidates, "scores", row)
        chosen = brute_force.best_subtree(scores, num_nodes - 1)
        assert all(parents[node] in chosen or parents[node] == -1 for node in chosen)

        paths = paths_of(candidates, row)
        expected = {tuple(token + 100 for token in paths[node]) for node in chosen}
        tree_paths: list[tuple[int, ...]] = [()]
        for node in range(1, num_nodes):
            parent = int(tree.parents[row, node])
            assert 0 <= parent < node
            tree_paths.append((*tree_paths[parent], int(tree.tokens[row, node])))
        assert set(tree_paths[1:]) == expected
        assert [len(path) for path in tree_paths] == tree.depths[row].tolist()
        assert int(tree.tokens[row, 0]) == 7 + row
        assert int(tree.parents[row, 0]) == -1


def test_a_child_that_ties_with_its_parent_never_displaces_it() -> None:
    """A child of log-probability 0 scores the same as its parent: a plain top-k may take the child alone."""
    candidates = (
        Level(torch.tensor([[1, 2]]), torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1, -1]])),
        Level(torch.tensor([[3, 4, 5, 6]]), torch.tensor([[-1.0, -9.0, -1.0, -9.0]]), torch.tensor([[0, 0, 1, 1]])),
    )
    for num_nodes in range(2, 6):
        tree = rerank(candidates, torch.arange(10), torch.tensor([0]), num_nodes)
        assert tree.tokens[0].tolist() == [0, 1, 2, 3, 5][:num_nodes]
        assert tree.parents[0].tolist() == [-1, 0, 0, 1, 2][:num_nodes]
