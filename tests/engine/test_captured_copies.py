"""What texts repeat in captured steps: found on the device, beside what a head drafts and without one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import guessable
import pytest
from captured import SETTINGS
from engine.test_capturable import captured_callable, watching
from engines import make_config, make_core, random_prompts, run

from eagle_rt import resolve
from eagle_rt.config import EngineConfig
from eagle_rt.engine import graphs
from eagle_rt.engine.build import build_core
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.load import model_info
from eagle_rt.engine.params import SamplingParams, SpeculativeParams
from eagle_rt.speculate import copies
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

GREEDY = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of which each token tells most of what comes next."""
    return guessable.write_pair(tmp_path_factory.mktemp("repeating"), "llama", loudness=0.05)


@pytest.fixture(scope="module")
def prompts(pair: tuple[Path, Path]) -> list[list[int]]:
    """That hold the replies to them."""
    questions = random_prompts(3, seed=4, longest=9)
    replies = run(make_core(pair[0]), questions, replace(GREEDY, max_new_tokens=16))
    return [question + reply + question for question, reply in zip(questions, replies, strict=True)]


def captured(target_dir: Path, head_dir: Path | None, batch_sizes: tuple[int, ...], **options: Any) -> EngineCore:
    """As on a GPU: all is captured when the engine is built."""
    options = {"attention_backend": "triton", "max_total_tokens": 512, "context_length": 64, "max_running_requests": 4, **options}
    tree = (2, 2, 5) if head_dir else None
    options = ({"speculative_algorithm": "EAGLE"} if head_dir else {}) | options
    config = make_config(target_dir, head_dir, tree, cuda_graph_bs=batch_sizes, **options)
    with patch.object(EngineConfig, "captures_steps", True), patch.object(graphs, "NUM_TIMED", 1):
        core, notes = build_core(config, model_info(config))
    assert any("captured a step" in note for note in notes)
    return core


class InTurns:
    """Another tree in every step."""

    def __init__(self, trees: list[TreeShape]) -> None:
        self._trees = cycle(trees)

    def best(self, batch_size: int, *, is_sampled: bool) -> TreeShape:
        return next(self._trees)

    def learn(self, tree: TreeShape, gains: Sequence[int], ms: float, *, is_sampled: bool) -> None:
        assert all(1 <= gain <= tree.max_depth + 1 for gain in gains)


@pytest.mark.parametrize("batch_sizes", [(4,), (1,)], ids=str)
def test_beside_a_head_no_text_is_changed(
    pair: tuple[Path, Path], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, batch_sizes: tuple[int, ...]
) -> None:
    """Captured, and in batches that are too large; in steps of any tree, of which each may follow any other."""
    monkeypatch.setattr(resolve, "COPIED_BESIDE", 6)
    settings = [replace(own, max_new_tokens=12) for own in SETTINGS]
    core = captured(*pair, batch_sizes, speculative_tree="adaptive")
    trees, largest = core.runner.graphs.trees, TreeShape(2, 2, 5, num_copied=6)
    assert trees[:2] == [largest, replace(largest, num_copied=0)]
    assert trees[-1] == NO_SPECULATION
    core.runner.choice = InTurns(trees)
    assert run(core, prompts, settings) == run(make_core(pair[0]), prompts, settings)


def test_copies_gain_more_than_the_head_alone(pair: tuple[Path, Path], prompts: list[list[int]]) -> None:
    core, accepted = captured(*pair, (1,), speculative_tree="adaptive"), []
    for tree in core.runner.graphs.trees[:2]:
        core.runner.choice = InTurns([tree])
        core.forget_metrics()
        run(core, prompts[1:2], GREEDY)
        accepted.append(core.current_metrics().mean_accepted_tokens)
    assert accepted[0] > accepted[1] + 0.2


@pytest.mark.parametrize("ngram", ["auto", "off"])
def test_fixed_trees_are_the_heads_alone(pair: tuple[Path, Path], ngram: str) -> None:
    core = captured(*pair, (1,), speculative_ngram=ngram)
    assert core.runner.graphs.trees == [TreeShape(2, 2, 5)]
    assert core.runner.stepper.texts is None
    adaptive = captured(*pair, (1,), speculative_ngram=ngram, speculative_tree="adaptive")
    assert any(tree.num_copied for tree in adaptive.runner.graphs.trees) == (ngram == "auto")


@pytest.mark.parametrize(
    "options",
    [{}, {"max_total_tokens": 72, "page_size": 2, "disable_radix_cache": True}, {"chunked_prefill_size": 8}],
    ids=["at once", "of which someone has to give way", "in chunks"],
)
def test_without_a_head_steps_are_those_of_the_host(
    pair: tuple[Path, Path], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Both copy all of the same copies: step by step the same is accepted. A text that was read again, or that begins as another
    does, which is cached, is in the table from its first token on."""
    for name in ("MOST_AHEAD", "MOST_EARNED"):
        monkeypatch.setattr(copies, name, 1e9)
    options = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 7, "page_size": 4, **options}
    texts = [prompts[0], prompts[0] + [11, 12, 5, 6], prompts[1]]
    settings = [replace(GREEDY, max_new_tokens=12, temperature=0.3 * (index % 2), seed=index) for index in range(3)]
    on_device, on_host = captured(pair[0], None, (1, 3), **options), make_core(pair[0], context_length=64, **options)
    told: list[dict[str, list]] = []
    for core in (on_device, on_host):
        found: dict[str, list] = {}
        for turn in range(2):
            for index, (prompt, setting) in enumerate(zip(texts, settings, strict=True)):
                core.submit(f"{turn} {index}", prompt, setting)
            while core.has_work:
                for event in core.step():
                    found.setdefault(event.request_id, []).extend(event.tokens)
                    if event.finish_reason:
                        found[event.request_id].append((event.stats.accepted_histogram, event.stats.num_broken_drafts))
        told.append(found)
    gives_way, metrics = "max_total_tokens" in options, on_device.current_metrics()
    assert bool(on_device.scheduler.num_preemptions) == gives_way
    if gives_way:  # at another time than on the host, after which steps are other ones
        told = [{name: own[:-1] for name, own in found.items()} for found in told]
    assert told[0] == told[1]
    assert metrics.num_accepted_tokens > 5
    assert (metrics.num_cached_prompt_tokens > 0) != gives_way


def test_a_choice_of_copies(pair: tuple[Path, Path], prompts: list[list[int]]) -> None:
    """A long one, a short one, and none."""
    options = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 9}
    core = captured(pair[0], None, (2,), speculative_tree="auto", **options)
    trees = core.runner.graphs.trees
    assert trees == [TreeShape(0, 0, 1, 8), TreeShape(0, 0, 1, 4), NO_SPECULATION]
    core.runner.choice = InTurns(trees)
    assert run(core, prompts[:2], GREEDY) == run(make_core(pair[0]), prompts[:2], GREEDY)
    metrics = core.current_metrics()
    assert 0 < metrics.num_undrafted < metrics.num_drafts


def test_what_steps_are_told_of(pair: tuple[Path, Path], prompts: list[list[int]]) -> None:
    """A request that wants its trees is stepped eagerly, with the same table; one that wants none has none."""
    core, told = captured(pair[0], None, (1,), speculative_algorithm="NGRAM", speculative_num_draft_tokens=5), {}
    for name, speculative in (("a", SpeculativeParams(trace=True)), ("b", SpeculativeParams(trace=True, enabled=False))):
        core.submit(name, prompts[0], replace(GREEDY, speculative=speculative))
        while core.has_work:
            for event in core.step():
                told.setdefault(name, []).extend([event.trace] * (event.trace is not None))
    assert max(len(trace.path) for trace in told["a"]) > 1
    assert all(trace.parents == list(range(-1, len(trace.tokens) - 1)) for trace in told["a"])
    assert all(trace.copied == list(range(1, len(trace.tokens))) for trace in told["a"])


@pytest.mark.usefixtures("on_gpu_kernels")
@pytest.mark.parametrize("has_head", [True, False])
def test_the_host_stays_out_of_it(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, has_head: bool) -> None:
    options: dict[str, Any] = {} if has_head else {"speculative_algorithm": "NGRAM"}
    core = captured(pair[0], pair[1] if has_head else None, (2,), speculative_tree="adaptive", **options)
    graph = core.runner.graphs.find(2, core.runner.tree_shape)
    with watching(monkeypatch):
        captured_callable(graph)()
