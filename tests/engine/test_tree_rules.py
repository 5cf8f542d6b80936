"""Engines whose trees are drawn in a file, or grow by a class of the user's."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from engine.test_capturable import captured_callable, watching
from engines import make_config, make_core, random_prompts, run
from guessable import make_drafting, write_pair

from eagle_rt.config import EngineConfig
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.load import model_info
from eagle_rt.engine.params import SamplingParams, SpeculativeParams
from eagle_rt.engine.profile import Profile, subject_of, with_profile
from eagle_rt.resolve import resolve_tree, unused_options
from eagle_rt.speculate.costs import PartCost, StepCosts
from eagle_rt.speculate.tree_rules import RuledPolicy
from eagle_rt.tree.paths import write_paths
from eagle_rt.tree_shape import TreeShape

PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0)]
PROMPTS = random_prompts(5, seed=8)
SETTINGS = [SamplingParams(temperature=float(index % 2), seed=index, max_new_tokens=30, ignore_eos=True) for index in range(5)]
DOCS = Path(__file__).parents[2] / "docs"
RULE = '''
import numpy as np

def first_children(nodes):
    return np.flatnonzero(np.diff(1000 * nodes.owners + nodes.parents, prepend=-2))

class Mine:
    """Every other step chains, and a leaf for the first of all in the others."""

    num_steps = 0

    def __init__(self):
        {at_start}

    def expand(self, level, sequences):
        self.num_steps += int(level.depths[0]) == 1
        if self.num_steps > {most}:
            raise RuntimeError("tired")
        return first_children(level) if self.num_steps % 2 else []

    def keep(self, candidates, sequences):
        return first_children(candidates) if self.num_steps % 2 else [0]
'''


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> list[list[int]]:
    return run(make_core(pair[0]), PROMPTS, SETTINGS)


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(PATHS))
    return file


def rule_in(folder: Path, *, most: int = 10**6, at_start: str = "pass") -> str:
    (folder / "mine.py").write_text(RULE.format(most=most, at_start=at_start))
    return f"{folder / 'mine.py'}:Mine"


def with_rule(pair: tuple[Path, Path], rule: object, **options: Any) -> EngineCore:
    numbers = dict.fromkeys(("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"))
    return make_drafting(pair, speculative_tree=str(rule), **{**numbers, **options})


@pytest.mark.parametrize("options", [{}, {"dtype": "float32", "page_size": 4, "max_total_tokens": 200}], ids=["roomy", "crowded"])
def test_drawn_trees_change_no_text(pair: tuple, plain: list[list[int]], drawn: Path, options: dict[str, Any]) -> None:
    core = with_rule(pair, drawn, **options)
    assert core.runner.tree_shape == TreeShape(3, 3, 8)
    assert run(core, PROMPTS, SETTINGS) == plain
    metrics = core.current_metrics()
    assert metrics.num_draft_tokens == 7 * metrics.num_drafts > 0
    assert metrics.num_accepted_tokens > 0.2 * metrics.num_drafts


@pytest.mark.parametrize("paths", [PATHS, [(0,), (0, 0), (0, 0, 0)], [(1,), (3,), (3, 2)]], ids=["bushy", "chain", "odd"])
def test_captured_steps_draft_what_those_of_the_host_do(pair: tuple, tmp_path: Path, paths: list[tuple[int, ...]]) -> None:
    """Node by node: what is kept of them in each step is the same."""
    write_paths(tmp_path / "tree.json", paths)
    settings = [replace(own, max_new_tokens=6) for own in (*SETTINGS[:2], replace(SETTINGS[3], frequency_penalty=0.5))]
    with patch.object(EngineConfig, "captures_steps", True):  # as on a GPU
        options = {"attention_backend": "triton", "context_length": 80, "max_running_requests": 3, "cuda_graph_bs": (3,)}
        captured = with_rule(pair, tmp_path / "tree.json", **options)
    texts = run(captured, PROMPTS[:3], settings)
    assert captured.runner.on_host is None
    assert "step" in captured.runner.clock.seconds
    host = with_rule(pair, tmp_path / "tree.json")
    assert run(host, PROMPTS[:3], settings) == texts == run(make_core(pair[0]), PROMPTS[:3], settings)
    kept, expected = (core.current_metrics() for core in (captured, host))
    assert kept.accepted_per_position == expected.accepted_per_position
    assert kept.num_draft_tokens == expected.num_draft_tokens == len(paths) * kept.num_drafts
    assert kept.num_accepted_tokens > 0


@pytest.mark.usefixtures("on_gpu_kernels")
def test_nothing_of_a_drawn_tree_is_read_on_the_host(pair: tuple, drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with patch.object(EngineConfig, "captures_steps", True):
        core = with_rule(pair, drawn, attention_backend="triton", context_length=80, max_running_requests=1)
    step = captured_callable(core.runner.graphs.find(1, core.runner.tree_shape))
    with watching(monkeypatch):
        step()


def test_what_was_drawn_is_what_is_verified(pair: tuple, drawn: Path) -> None:
    core, traced = with_rule(pair, drawn), SpeculativeParams(trace=True)
    core.submit("a", PROMPTS[0], SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True, speculative=traced))
    traces = []
    while core.has_work:
        traces += [event.trace for event in core.step() if event.trace]
    assert traces
    for trace in traces:
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(trace.parents[1:], start=1):
            below.setdefault(parent, []).append(node)
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for parent, nodes in sorted(below.items()):
            ranked = sorted(nodes, key=lambda node: -trace.scores[node])
            drawn_ranks = sorted(path[-1] for path in PATHS if path[:-1] == paths[parent])
            paths |= {node: (*paths[parent], rank) for node, rank in zip(ranked, drawn_ranks, strict=True)}
        assert sorted(paths.values()) == sorted([(), *PATHS])


def test_a_class_of_the_users_changes_no_text(pair: tuple, plain: list[list[int]], tmp_path: Path) -> None:
    options = {"speculative_num_steps": 4, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    core = with_rule(pair, rule_in(tmp_path), **options)
    assert run(core, PROMPTS, SETTINGS) == plain
    stepper = core.runner.host_stepper
    assert stepper
    assert isinstance(stepper.policy, RuledPolicy)
    assert not stepper.policy.failure
    assert stepper.policy.rule.num_steps > 20  # pyright: ignore[reportAttributeAccessIssue]
    assert core.current_metrics().num_accepted_tokens > 0


def test_one_that_fails_at_once_is_refused(pair: tuple, tmp_path: Path) -> None:
    for options, message in [
        ({"most": 0}, r"--speculative-tree .*mine.py:Mine fails: Mine.expand: RuntimeError: tired"),
        ({"at_start": "1 / 0"}, r"--speculative-tree .*mine.py:Mine can't be made: ZeroDivisionError"),
    ]:
        with pytest.raises(ValueError, match=message):
            with_rule(pair, rule_in(tmp_path, **options))


def test_one_that_fails_later_stops_nobody(
    pair: tuple, plain: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    core = with_rule(pair, rule_in(tmp_path, most=12), **options)
    with caplog.at_level(logging.ERROR):
        assert run(core, PROMPTS, SETTINGS) == plain
    assert caplog.text.count("EAGLE-2's takes its place: Mine.expand: RuntimeError: tired") == 1


def test_the_rule_in_the_docs_does_what_it_says(pair: tuple, plain: list[list[int]], tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?class OnlyLikely.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    (tmp_path / "my_trees.py").write_text(code)
    core = with_rule(pair, tmp_path / "my_trees.py:OnlyLikely")
    assert core.runner.tree_shape == TreeShape(6, 4, 24)
    assert run(core, PROMPTS, SETTINGS) == plain
    assert 0 < core.current_metrics().num_draft_tokens < 23 * core.current_metrics().num_drafts


def test_the_numbers_cut_what_is_drawn(drawn: Path) -> None:
    config = EngineConfig(speculative_algorithm="EAGLE3", speculative_tree=str(drawn), speculative_num_steps=2)
    assert resolve_tree(config, "cpu")[0] == TreeShape(2, 3, 7)
    with pytest.raises(ValueError, match=r"-eagle-topk is 4, but must be 1 to 3, as in the tree .*tree.json, or left out"):
        resolve_tree(EngineConfig(speculative_algorithm="EAGLE3", speculative_tree=str(drawn), speculative_eagle_topk=4), "cpu")


def test_a_rule_may_want_wider_levels_than_a_beam(tmp_path: Path) -> None:
    numbers = {"speculative_num_steps": 3, "speculative_eagle_topk": 3}
    config = EngineConfig(speculative_algorithm="EAGLE3", speculative_tree="trees:Mine", speculative_num_draft_tokens=40, **numbers)
    assert resolve_tree(config, "cpu")[0] == TreeShape(3, 3, 40)
    with pytest.raises(ValueError, match=r"can supply \(40, the root included\)"):
        resolve_tree(
            EngineConfig(speculative_algorithm="EAGLE3", speculative_tree="a:B", speculative_num_draft_tokens=41, **numbers), "cpu"
        )


def test_no_profile_says_what_a_rule_drafts(pair: tuple, drawn: Path) -> None:
    numbers = dict.fromkeys(("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"))
    config = make_config(*pair, (1, 1, 2), speculative_algorithm="EAGLE", speculative_tree=str(drawn), **numbers)
    costs = StepCosts({name: PartCost([1.0], [1.0], 0.1) for name in ("start", "level", "verify")})
    profile = Profile(subject_of(config, model_info(config)), TreeShape(6, 4, 24), TreeShape(5, 4, 16), costs, [], [])
    assert with_profile(config, profile) == config
    assert with_profile(replace(config, speculative_tree="fixed"), profile).speculative_num_steps == 5


def test_what_goes_with_rules(pair: tuple, drawn: Path) -> None:
    on_gpu = {"device": "cuda", "attention_backend": "triton"}
    assert EngineConfig(speculative_algorithm="EAGLE3", **on_gpu).captures_steps
    ruled = EngineConfig(speculative_algorithm="EAGLE3", speculative_tree=str(drawn), **on_gpu)
    assert ruled.captures_steps
    assert not ruled.sizes_trees
    assert not replace(ruled, speculative_tree="trees:Mine").captures_steps
    assert EngineConfig(speculative_tree=str(drawn), **on_gpu).captures_steps  # nothing is drafted
    assert "--speculative-tree" in unused_options(EngineConfig(speculative_tree=str(drawn), device="cpu"))[0]
    profiled = make_config(*pair, speculative_algorithm="EAGLE", speculative_tree=str(drawn), speculative_profile="auto")
    assert f"--speculative-profile: trees grow as --speculative-tree {drawn} says" in unused_options(profiled)
    with pytest.raises(ValueError, match=r"--speculative-tree is .*tree.json, but must be .*NGRAM"):
        EngineConfig(speculative_algorithm="NGRAM", speculative_tree=str(drawn))
    with pytest.raises(
        ValueError, match=r"--speculative-tree is wide, but must be one of auto, adaptive, fixed, a tree's FILE.json"
    ):
        EngineConfig(speculative_tree="wide")
