"""Captured steps: the same texts as step by step, whatever the batch, the settings and the trees."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import checkpoints
import family_configs
import pytest
import torch
from captured import SETTINGS, make_captured
from engines import Tree, make_core, random_prompts, run
from torch import Tensor

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SpeculativeParams
from eagle_rt.speculate.tree_choice import PayingTree, trees_within
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape


@pytest.mark.parametrize("tree", [None, (1, 1, 2), (3, 2, 6)], ids=str)
def test_a_captured_step_writes_the_same_texts(target_dir: Path, head_dir: Path, tree: Tree | None) -> None:
    prompts = random_prompts(3, seed=4, longest=20)
    expected = run(make_core(target_dir), prompts, SETTINGS)
    core = make_captured(target_dir, head_dir, tree, (2, 4), page_size=4)
    # Three requests run in the graph for four, then two and one of them in the graph for two.
    assert run(core, prompts, SETTINGS) == expected
    assert "step" in core.runner.clock.seconds


def test_queries_that_are_scaled_by_their_positions(tmp_path: Path, head_dir: Path) -> None:
    """Those of every draft by its own."""
    soon = {**family_configs.MINISTRAL, "original_max_position_embeddings": 8}
    target_dir = checkpoints.write_target(tmp_path, "ministral3", rope_parameters=soon)
    prompts = random_prompts(3, seed=4, longest=20)
    expected = run(make_core(target_dir, context_length=64), prompts, SETTINGS)
    assert run(make_captured(target_dir, head_dir, (3, 2, 6), (2, 4)), prompts, SETTINGS) == expected
    in_half = {"context_length": 64, "dtype": "bfloat16"}
    plain, drafted = (run(make_core(target_dir, *own, **in_half), prompts, SETTINGS) for own in ((), (head_dir, (3, 2, 6))))
    assert plain == drafted


def test_a_batch_larger_than_all_graphs_runs_eagerly(target_dir: Path, head_dir: Path) -> None:
    prompts = random_prompts(3, seed=5, longest=9)
    core = make_captured(target_dir, head_dir, (2, 2, 4), (1,))
    texts = run(core, prompts, SETTINGS)
    assert {"verify", "step"} <= set(core.runner.clock.seconds)
    assert texts == run(make_core(target_dir), prompts, SETTINGS)


@pytest.mark.parametrize("batch_sizes", [(1, 4), (1, 2)], ids=str)
@pytest.mark.parametrize("tree", [None, (3, 2, 6)], ids=str)
def test_penalties_in_captured_steps(target_dir: Path, head_dir: Path, tree: Tree | None, batch_sizes: tuple[int, ...]) -> None:
    """Of some requests, which run beside others, end before them, and come after them; three are too many for a graph of two."""
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3}
    settings = [
        replace(SETTINGS[0], max_new_tokens=12),
        replace(SETTINGS[1], max_new_tokens=4, **penalties),
        replace(SETTINGS[0], max_new_tokens=9, **penalties),
        replace(SETTINGS[0], max_new_tokens=9, logit_bias=((65, 3.0), (66, -100.0)), frequency_penalty=1.5),
    ]
    prompts = random_prompts(4, seed=7, longest=9)
    expected = run(make_core(target_dir), prompts, settings)
    core = make_captured(target_dir, head_dir, tree, batch_sizes)
    assert run(core, prompts, settings) == expected
    assert "step" in core.runner.clock.seconds
    assert ("verify" in core.runner.clock.seconds) == (batch_sizes == (1, 2)), "all are captured that fit"
    # Nothing of them is left for those who come next.
    assert run(core, prompts[:1], SETTINGS[:1]) == run(make_core(target_dir), prompts[:1], SETTINGS[:1])


def test_captured_drafts_are_ranked_after_penalties(target_dir: Path, head_dir: Path) -> None:
    core = make_captured(target_dir, head_dir, (3, 1, 4), (1,))
    setting = replace(SETTINGS[1], max_new_tokens=8, logit_bias=((65, 100.0),))
    assert run(core, random_prompts(1, longest=9), [setting]) == [[65] * 8]
    assert core.current_metrics().mean_accepted_tokens > 3


def test_padding_harms_no_one(target_dir: Path, head_dir: Path) -> None:
    core = make_captured(target_dir, head_dir, (2, 2, 4), (4,))
    for index, prompt in enumerate(random_prompts(2, seed=6, longest=12)):
        core.submit(f"r{index}", prompt, SETTINGS[0])
    while core.scheduler.waiting or any(request.is_prefilling for request in core.scheduler.running):
        core.step()
    core.scheduler.plan()
    requests = tuple(core.scheduler.running)
    own = [page for request in requests for page in request.pages]
    pool, page_size = core.runner.stepper.pool, core.scheduler.limits.page_size
    num_pages = core.scheduler.limits.num_pages
    others = [page for page in range(num_pages) if page not in own]
    slots = (torch.tensor(others)[:, None] * page_size + torch.arange(page_size)).flatten()
    before = pool.storage[:, slots].clone()
    graph = core.runner.graphs.find(2, core.runner.tree_shape)
    with torch.inference_mode():
        first = graph.launch(requests, follows=False)().rows
        assert graph.launch(requests, follows=False)().rows == first
    assert len(first) == 2
    assert torch.equal(pool.storage[:, slots], before)
    assert pool.storage[:, num_pages * page_size :].any(), "padding writes to the page that is no one's"


class InTurns:
    """Another tree in every step, and what was learned of them."""

    def __init__(self, trees: list[TreeShape]) -> None:
        self._trees, self.learned = cycle(trees), []

    def best(self, batch_size: int, *, is_sampled: bool) -> TreeShape:
        return next(self._trees)

    def learn(self, tree: TreeShape, gains: Sequence[int], ms: float, *, is_sampled: bool) -> None:
        assert ms > 0
        assert all(1 <= gain <= tree.max_depth + 1 for gain in gains)
        self.learned.append(tree)


@pytest.mark.parametrize("batch_sizes", [(4,), (1,)], ids=str)
def test_trees_may_change_from_step_to_step(target_dir: Path, head_dir: Path, batch_sizes: tuple[int, ...]) -> None:
    """Captured, each before the one ahead of it is read, and in batches that are too large: nothing of the texts changes, and a
    tree after a step without one accepts what it does after others."""
    prompts = random_prompts(3, seed=4, longest=20)
    settings = [replace(setting, max_new_tokens=9) for setting in SETTINGS]
    expected = run(make_core(target_dir), prompts, settings)
    core = make_captured(target_dir, head_dir, (2, 2, 5), batch_sizes, speculative_tree="adaptive")
    trees = core.runner.graphs.trees
    assert trees == trees_within(TreeShape(2, 2, 5))[::-1]
    core.runner.choice = InTurns(trees)
    assert run(core, prompts, settings) == expected
    assert core.runner.choice.learned[: len(trees)] == trees
    metrics = core.current_metrics()
    assert 0 < metrics.num_undrafted < metrics.num_drafts


def test_a_head_follows_while_nothing_is_drafted(target_dir: Path, head_dir: Path) -> None:
    """What a tree accepts after rests is what it accepts where there were none."""
    prompts, setting = random_prompts(1, seed=8), [replace(SETTINGS[0], max_new_tokens=16)]
    tree, states = TreeShape(2, 1, 3), []
    core = make_captured(target_dir, head_dir, (2, 1, 3), (1,), speculative_tree="adaptive", disable_radix_cache=True)
    by_position = states_by_position(core)
    for trees in ([tree], [NO_SPECULATION, NO_SPECULATION, tree]):
        core.runner.choice = InTurns(trees)
        run(core, prompts, setting)
        states.append(dict(by_position))
        by_position.clear()
    always, seldom = states
    shared = set(always) & set(seldom)
    assert len(shared) > 3
    for position in shared:
        torch.testing.assert_close(seldom[position], always[position])


def states_by_position(core: EngineCore) -> dict[int, Tensor]:
    """Of the first state row, filled while the engine runs: the head's state by where the last token stands."""
    drafter, states = core.runner.stepper.drafter, {}
    for tree in core.runner.graphs.trees:
        own = core.runner.graphs.find(1, tree)._stepper.drafter
        assert own._states is drafter._states, "all trees go on from the same states"
        original = own.propose

        def propose(sequences: Any, original: Callable[..., Any] = original) -> Any:
            row = int(sequences.state_rows[0])
            states[int(sequences.positions[0])] = drafter._states[row].clone()
            return original(sequences)

        own.propose = propose
    return states


def test_an_adaptive_engine_is_given_what_steps_take(target_dir: Path, head_dir: Path) -> None:
    core = make_captured(target_dir, head_dir, (2, 1, 3), (1, 2), speculative_tree="adaptive")
    assert isinstance(core.runner.choice, PayingTree)
    assert core.runner.host_stepper is None
    prompts = random_prompts(2, seed=5, longest=9)
    assert run(core, prompts, SETTINGS[1:]) == run(make_core(target_dir), prompts, SETTINGS[1:])


def test_steps_that_are_not_captured_rest_where_that_is_asked_for(target_dir: Path, head_dir: Path) -> None:
    """As they do on a GPU with our kernels and no graphs."""
    options = {"attention_backend": "triton", "max_total_tokens": 512, "speculative_disable_by_batch_size": 1}
    core = make_core(target_dir, head_dir, (2, 1, 3), **options)
    core.runner._host_stepper = None
    prompts, plain = random_prompts(2, seed=5, longest=9), SpeculativeParams(enabled=False)
    for count, speculative, drafts in ((1, None, True), (2, None, False), (1, plain, False)):
        core.forget_metrics()
        own = SETTINGS[0] if speculative is None else replace(SETTINGS[0], speculative=speculative)
        run(core, prompts[:count], [own] * count)
        metrics = core.current_metrics()
        assert metrics.num_undrafted == (0 if drafts else metrics.num_drafts)
        assert metrics.num_drafts > 0


def test_requests_that_want_no_drafts_get_none(target_dir: Path, head_dir: Path) -> None:
    prompts, plain = random_prompts(2, seed=5, longest=9), SpeculativeParams(enabled=False)
    core = make_captured(target_dir, head_dir, (1, 1, 2), (2,), speculative_tree="adaptive")
    run(core, prompts, [replace(SETTINGS[0], speculative=plain)] * 2)
    assert core.current_metrics().num_undrafted == core.current_metrics().num_drafts > 0


def test_large_batches_draft_nothing_where_that_is_asked_for(target_dir: Path, head_dir: Path) -> None:
    core = make_captured(target_dir, head_dir, (2, 1, 3), (1, 2), speculative_disable_by_batch_size=1)
    prompts = random_prompts(2, seed=5, longest=9)
    run(core, prompts[:1], SETTINGS[:1])
    assert core.current_metrics().num_undrafted == 0
    core.forget_metrics()
    run(core, prompts, [SETTINGS[0]] * 2)
    assert core.current_metrics().num_undrafted >= 2 * 6
