"""Which steps are timed at start."""

from pathlib import Path

import pytest
import torch
from engines import make_core, random_prompts, run

from eagle_rt.engine.calibrate import trees_to_time
from eagle_rt.engine.params import SamplingParams
from eagle_rt.kernels import products
from eagle_rt.tree_shape import TreeShape

BOUNDS = TreeShape(6, 4, 24)


@pytest.mark.parametrize(("batch_size", "jump_after", "is_timed"), [(1, 12, True), (4, 12, False), (1, None, False)])
def test_a_jump_is_timed_on_both_sides(batch_size: int, jump_after: int | None, is_timed: bool) -> None:
    """By a single sequence, whose trees may have any number of rows."""
    trees = trees_to_time(BOUNDS, batch_size, jump_after)
    assert ({12, 13} <= {tree.num_draft_tokens for tree in trees if tree}) == is_timed
    assert len(set(trees)) == len(trees)
    assert None in trees


def test_trees_stay_within_their_bounds() -> None:
    small = TreeShape(2, 2, 4)
    assert all(tree.num_draft_tokens <= 4 for tree in trees_to_time(small, 1, 12) if tree)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_jump_is_known_of_our_own_products(monkeypatch: pytest.MonkeyPatch, is_ours: bool) -> None:
    pytest.importorskip("numba")
    from eagle_rt.kernels.cpu import int8_product, product

    monkeypatch.setattr(products, "takes_own_kernel", lambda weight: is_ours)
    own = products.product_with(torch.zeros(1, 1), None)
    assert own
    assert own.rows_at_once == (product.MOST_ROWS if is_ours else None)
    assert products.product_with(torch.zeros(1, 1), None, "int8").rows_at_once == int8_product.MOST_ROWS


@pytest.mark.parametrize("tree", [(1, 1, 2), (1, 3, 4)], ids=str)
def test_trees_of_one_level_are_measured_and_served(target_dir: Path, head_dir: Path, tree: tuple[int, int, int]) -> None:
    """As a target's own multi-token-prediction layer drafts: no step has a second level that could be timed."""
    prompts, setting = random_prompts(2, seed=3, longest=20), SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    expected = run(make_core(target_dir), prompts, setting)
    core = make_core(target_dir, head_dir, tree, speculative_tree="adaptive")
    assert run(core, prompts, setting) == expected
