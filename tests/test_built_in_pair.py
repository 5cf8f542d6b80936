"""What the built-in pair promises."""

import json
from pathlib import Path

import pytest
from engines import make_core
from safetensors.torch import load_file

from eagle_rt.bench.sweep import generate
from eagle_rt.bench.workload import load_workload
from eagle_rt.config import EngineConfig
from eagle_rt.engine.load import model_info
from eagle_rt.engine.request import SamplingParams


def test_it_is_small_and_in_published_layouts(built_in: Path) -> None:
    files = [file for file in built_in.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 24_000_000
    tensors = load_file(built_in / "eagle3" / "model.safetensors")
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.hidden_norm.weight"} <= tensors.keys()
    assert "embed_tokens.weight" not in tensors
    assert tensors["lm_head.weight"].shape[0] == len(tensors["d2t"]) == int(tensors["t2d"].sum()) == 2048
    assert json.loads((built_in / "eagle3" / "config.json").read_text())["draft_vocab_size"] == 2048


def mean_accepted(built_in: Path, tree: tuple[int, int, int], batch_size: int) -> float:
    tokenizer = model_info(EngineConfig()).tokenizer
    prompts = load_workload("builtin", None, tokenizer, 6).prompts  # the first six are sums, as in GSM8K
    core = make_core(built_in / "target", built_in / "eagle3", tree, max_running_requests=batch_size, max_total_tokens=8192)
    generate(core, prompts, SamplingParams(temperature=0, max_new_tokens=48, ignore_eos=True))
    return core.metrics.mean_accepted_tokens


def test_larger_trees_accept_more(built_in: Path) -> None:
    lengths = [mean_accepted(built_in, tree, 6) for tree in ((1, 1, 2), (3, 1, 4), (5, 4, 16), (8, 10, 60))]
    assert lengths == sorted(lengths)
    assert lengths[2] >= 2.0


def test_acceptance_does_not_depend_on_the_batch(built_in: Path) -> None:
    assert mean_accepted(built_in, (5, 4, 16), 1) == pytest.approx(mean_accepted(built_in, (5, 4, 16), 6), abs=0.02)
