"""What the built-in pair promises."""

import json
from pathlib import Path

import pytest
import torch
from engines import make_core
from safetensors.torch import load_file

from eagle_rt.bench.workload import load_workload
from eagle_rt.config import EngineConfig
from eagle_rt.engine.core import run_to_end
from eagle_rt.engine.load import model_info
from eagle_rt.engine.params import SamplingParams


def test_it_is_small_and_in_published_layouts(built_in: Path) -> None:
    files = [file for file in built_in.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 24_000_000
    tensors = load_file(built_in / "eagle3" / "model.safetensors")
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.hidden_norm.weight"} <= tensors.keys()
    assert "embed_tokens.weight" not in tensors
    assert tensors["lm_head.weight"].shape[0] == len(tensors["d2t"]) == int(tensors["t2d"].sum()) == 4096
    assert json.loads((built_in / "eagle3" / "config.json").read_text())["draft_vocab_size"] == 4096


def test_the_eagle_head_and_its_map_are_in_published_layouts(built_in: Path) -> None:
    tensors = load_file(built_in / "eagle2" / "model.safetensors")
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.post_attention_layernorm.weight"} <= tensors.keys()
    assert not {"lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight", "fc.bias"} & tensors.keys()
    ids = torch.load(built_in / "freq_1024.pt", weights_only=True)
    assert isinstance(ids, list)
    assert len(ids) == len(set(ids)) == 1024


def mean_accepted(
    built_in: Path, tree: tuple[int, int, int], batch_size: int, head: str = "eagle3", **options: str
) -> tuple[list[list[int]], float]:
    """(texts, mean accepted tokens) of the built-in prompts that are sums, as in GSM8K."""
    tokenizer = model_info(EngineConfig()).tokenizer
    prompts = load_workload("builtin", None, tokenizer, 6).prompts
    options = {"speculative_algorithm": "EAGLE3" if head == "eagle3" else "EAGLE", **options}
    core = make_core(built_in / "target", built_in / head, tree, max_running_requests=batch_size, max_total_tokens=8192, **options)
    texts = run_to_end(core, prompts, [SamplingParams(temperature=0, max_new_tokens=48, ignore_eos=True)] * 6)
    return texts, core.metrics.mean_accepted_tokens


@pytest.mark.parametrize("head", ["eagle3", "eagle2"])
def test_larger_trees_accept_more(built_in: Path, head: str) -> None:
    results = [mean_accepted(built_in, tree, 6, head) for tree in ((1, 1, 2), (3, 1, 4), (5, 4, 16), (8, 10, 60))]
    lengths = [length for _, length in results]
    assert lengths == sorted(lengths)
    assert lengths[2] >= 2.5
    assert all(texts == results[0][0] for texts, _ in results)


def test_acceptance_does_not_depend_on_the_batch(built_in: Path) -> None:
    alone, together = (mean_accepted(built_in, (5, 4, 16), batch_size) for batch_size in (1, 6))
    assert alone[0] == together[0]
    assert alone[1] == pytest.approx(together[1], abs=0.02)


def test_the_token_map_drafts_less_and_accepts_nearly_as_much(built_in: Path) -> None:
    texts, full = mean_accepted(built_in, (5, 4, 16), 6, "eagle2")
    mapped_texts, mapped = mean_accepted(built_in, (5, 4, 16), 6, "eagle2", speculative_token_map=str(built_in / "freq_1024.pt"))
    assert mapped_texts == texts
    assert 0.9 * full < mapped <= 1.02 * full
