"""Engines whose heads draft all levels in one pass."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from block_layouts import DFLASH_LAYOUTS, write_block_head
from captured import make_captured
from engine.test_capturable import captured_callable, watching
from engines import Tree, make_config, make_core, random_prompts, run
from head_layouts import MASK_TOKEN, write_head

from eagle_rt.config import EngineConfig
from eagle_rt.engine.load import load_models, model_info
from eagle_rt.engine.params import SamplingParams, SpeculativeParams

PROMPTS = random_prompts(3, seed=4, longest=20)
# The target says little but these, all of them in the head's vocabulary, which then guesses them, though in another order.
FEW = tuple((token, 30.0) for token in (4, 7, 10, 12, 40))
SETTINGS = [
    SamplingParams(temperature=temperature, seed=index, max_new_tokens=8, ignore_eos=True, logit_bias=FEW)
    for index, temperature in enumerate((0.0, 1.0, 0.0))
]
SETTINGS[2] = replace(SETTINGS[2], frequency_penalty=0.5)
DRAWN = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0)]


@dataclass(frozen=True)
class Served:
    """A head on disk, and the algorithm that it drafts with."""

    directory: Path
    algorithm: dict[str, str]


@pytest.fixture(scope="module", params=["p-eagle", "dflash-windows", "dspark-speculators"])
def head(request: pytest.FixtureRequest, target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    name, folder = request.param, tmp_path_factory.mktemp("head")
    if name in DFLASH_LAYOUTS:
        own, algorithm = write_block_head(name, folder, target_dir), "DFLASH"
    else:
        own, algorithm = write_head(name, folder, target_dir), "EAGLE3"
    assert {token for token, _ in FEW} <= set(own.slow.target_ids.tolist())
    return Served(own.directory, {"speculative_algorithm": algorithm})


def check_alike(target_dir: Path, head: Served, tree: Tree, **options: Any) -> None:
    """Captured steps keep as many drafts at every depth as those of the host."""
    options = {**head.algorithm, **options}
    as_on_gpu = {"attention_backend": "triton", "context_length": 80, "max_running_requests": 3, "cuda_graph_bs": (3,)}
    with patch.object(EngineConfig, "captures_steps", True):
        captured = make_core(target_dir, head.directory, tree, **as_on_gpu, **options)
    texts = run(captured, PROMPTS, SETTINGS)
    assert captured.runner.on_host is None
    host = make_core(target_dir, head.directory, tree, **options)
    assert run(host, PROMPTS, SETTINGS) == texts == run(make_core(target_dir), PROMPTS, SETTINGS)
    kept, expected = (core.current_metrics() for core in (captured, host))
    assert kept.accepted_per_position == expected.accepted_per_position
    assert all(kept.accepted_per_position[:2]), "of the second level, too"
    assert kept.num_accepted_tokens < kept.num_draft_tokens


@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 2, 6)], ids=str)
def test_captured_steps_draft_what_those_of_the_host_do(target_dir: Path, head: Served, tree: Tree) -> None:
    check_alike(target_dir, head, tree)


def test_so_do_those_of_a_drawn_tree(target_dir: Path, head: Served, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(json.dumps(DRAWN))
    numbers = dict.fromkeys(("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"))
    check_alike(target_dir, head, (1, 1, 2), speculative_tree=str(tmp_path / "tree.json"), **numbers)


def test_what_is_captured_never_reads_a_tensor(
    target_dir: Path, head: Served, on_gpu_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_captured(target_dir, head.directory, (3, 2, 6), (2,), **head.algorithm)
    with watching(monkeypatch):
        captured_callable(core.runner.graphs.find(2, core.runner.tree_shape))()


def test_requests_with_smaller_trees_beside_others(target_dir: Path, head: Served) -> None:
    """Each has the rows of the deepest among them, and none that it needs is overwritten."""
    small = [SpeculativeParams(num_steps=steps) for steps in (1, 2, 4)]
    settings = [replace(own, speculative=more) for own, more in zip(SETTINGS, small, strict=True)]
    core = make_core(target_dir, head.directory, (4, 3, 12), page_size=4, chunked_prefill_size=16, **head.algorithm)
    assert run(core, PROMPTS, settings) == run(make_core(target_dir), PROMPTS, SETTINGS)
    assert core.current_metrics().num_accepted_tokens > 0


def test_a_head_whose_features_were_read_long_ago(target_dir: Path, head: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for it when it drafts first, which shows in the first step of each text only."""
    prompts, settings = random_prompts(24, seed=6, longest=20), [replace(SETTINGS[0], max_new_tokens=5)] * 24
    monkeypatch.setattr("eagle_rt.speculate.host_step.MOST_WAITING_ROWS", 0)
    core = make_core(target_dir, head.directory, (3, 2, 6), **head.algorithm)
    assert run(core, prompts, settings) == run(make_core(target_dir), prompts, settings)
    expected = make_core(target_dir, head.directory, (3, 2, 6), **head.algorithm)
    monkeypatch.undo()
    run(expected, prompts, settings)
    assert core.current_metrics().accepted_per_position == expected.current_metrics().accepted_per_position


def test_one_is_told_of_it(target_dir: Path, head_dir: Path, head: Served) -> None:
    for own, is_parallel in ((head, True), (Served(head_dir, {}), False)):
        config = make_config(target_dir, own.directory, (3, 2, 6), **own.algorithm)
        notes = load_models(config, model_info(config)).notes
        assert any("drafts in parallel" in note for note in notes) == is_parallel


@pytest.mark.parametrize(("token", "words"), [(None, "names no mask token"), (262, "names the mask token 262")])
def test_a_mask_token_that_is_none(target_dir: Path, tmp_path: Path, token: int | None, words: str) -> None:
    directory = write_head("p-eagle", tmp_path, target_dir).directory
    file = directory / "config.json"
    config = json.loads(file.read_text())
    assert config["ptd_token_id"] == MASK_TOKEN
    file.write_text(json.dumps({**config, "ptd_token_id": token}))
    with pytest.raises(ValueError, match=f"drafts in parallel .* {words}: set ptd_token_id to one of the 262 tokens"):
        make_core(target_dir, directory, (3, 2, 6))
