"""The gate: on the built-in pair, speculation changes no token. `python -m eagle_rt.bench.lossless` runs the long version."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import checkpoints
import pytest
import torch
from engines import make_config, text_logits
from transformers import AutoModelForCausalLM

from eagle_rt.bench import lossless
from eagle_rt.bench.lossless import COPIES, Difference, Variant, check, drafting, in_all_settings
from eagle_rt.bench.workload import load_workload
from eagle_rt.config import EngineConfig
from eagle_rt.engine.load import LoadedModels, load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.kernels.products import Quantization, has_own_kernels
from eagle_rt.resolve import resolve_device
from eagle_rt.speculate.forest import Choose, PackedTrees
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape


@pytest.fixture(scope="module")
def pair() -> tuple[EngineConfig, LoadedModels, Path, list[list[int]]]:
    config = resolve_device(EngineConfig(speculative_algorithm="EAGLE3", device="cpu", dtype="float32"))
    info = model_info(config)
    return config, load_models(config, info), info.directory, load_workload("builtin", None, info.tokenizer, 8).prompts


@pytest.mark.parametrize("tree", [TreeShape(3, 1, 4), TreeShape(5, 4, 16), TreeShape(8, 10, 60)], ids=str)
def test_speculation_changes_no_token(pair: tuple, tree: TreeShape) -> None:
    config, models, directory, prompts = pair
    num_compared, found = check(models, config, directory, prompts[:4], 40, [tree])
    assert num_compared == 4 * (9 + 16)
    assert all(difference.is_rounding for difference in found), found
    assert len(found) <= 2


def test_nor_does_what_texts_repeat(pair: tuple) -> None:
    config, models, directory, prompts = pair
    num_compared, found = check(models, replace(config, speculative_algorithm="NGRAM"), directory, prompts[:4], 40, [COPIES[1]])
    assert num_compared == 4 * (9 + 16)
    assert not found


def test_trees_by_a_rule_are_checked_too(pair: tuple, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    config, models, _, prompts = pair
    ruled, shape = str(tmp_path / "tree.json"), TreeShape(2, 2, 4)
    more = in_all_settings(drafting(replace(config, speculative_tree=ruled), [TreeShape(3, 1, 4)]))[-3:]
    assert [(own.tree, own.rule, own.batch_size, own.is_adaptive) for own in more] == [
        (shape, ruled, size, False) for size in (1, 16, 16)
    ]
    assert f"trees by {ruled} up to (2, 2, 4)" in str(more[0])
    with patch.object(lossless, "core_for", wraps=lossless.core_for) as made:
        texts = lossless.generate(models, config, more[0], prompts[:1], [SamplingParams(temperature=0, max_new_tokens=8)])
    assert made.call_args.args[2].kind == ruled
    assert len(texts[0]) == 8


@pytest.mark.parametrize("name", ["phi3-long", "mistral3"])
def test_models_that_transformers_takes_otherwise(tmp_path: Path, head_dir: Path, name: str) -> None:
    """For long texts from their first token on; and as those that see."""
    checkpoints.write_target(tmp_path, name)
    options = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head_dir)}
    config = make_config(tmp_path, **options)
    prompts = [list(range(10, 40)), list(range(100, 150))]
    num_compared, found = check(load_models(config, model_info(config)), config, tmp_path, prompts, 8, [TreeShape(3, 2, 8)])
    assert num_compared == 2 * (9 + 16)
    assert not found


@pytest.mark.skipif(not has_own_kernels(torch.zeros(1)), reason="no kernels of our own on this processor")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_nor_does_it_of_a_model_of_fewer_bits(monkeypatch: pytest.MonkeyPatch, quantization: Quantization) -> None:
    """Which is not compared with what transformers makes of the weights as they are."""
    monkeypatch.setattr(lossless, "transformers_greedy", None)
    config = resolve_device(EngineConfig(speculative_algorithm="EAGLE3", device="cpu", dtype="float32", quantization=quantization))
    info = model_info(config)
    prompts, models = load_workload("builtin", None, info.tokenizer, 3).prompts, load_models(config, info)
    with patch.object(lossless, "round_weights", wraps=lossless.round_weights) as round_weights:
        num_compared, found = check(models, config, info.directory, prompts, 30, [TreeShape(5, 4, 16)])
    assert num_compared == 3 * (9 + 16)
    assert all(difference.is_rounding for difference in found)
    assert len(found) <= (3 if quantization == "int4" else 0)
    round_weights.assert_called_once()
    model = AutoModelForCausalLM.from_pretrained(info.directory, dtype=torch.float32)
    with torch.inference_mode():
        exact = model(torch.tensor(prompts[:1])).logits[0]
        lossless.round_weights(model, quantization)
        rounded = model(torch.tensor(prompts[:1])).logits[0]
    error = (text_logits(models.target, prompts[0]) - rounded).abs().mean()
    # What is multiplied with four bits is rounded, too, ten times as finely.
    assert error < {"int8": 0.02, "int4": 0.12}[quantization] * (rounded - exact).abs().mean()


def test_the_gate_notices_a_wrong_token(pair: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that takes the first child as it comes must not get past it."""
    walk = PackedTrees.walk

    def trusting_walk(trees: PackedTrees, choose: Choose) -> tuple[list[list[int]], list[list[int]]]:
        first_child = dict(zip(trees.starts, (min(row + 1, len(trees.tokens) - 1) for row in trees.starts), strict=True))

        def choose_first(rows: list[int]) -> list[int]:
            chosen = zip(rows, choose(rows), strict=True)
            return [int(trees.tokens[first_child[row]]) if row in first_child else token for row, token in chosen]

        return walk(trees, choose_first)

    monkeypatch.setattr(PackedTrees, "walk", trusting_walk)
    config, models, directory, prompts = pair
    _, found = check(models, config, directory, prompts[:2], 16, [TreeShape(3, 2, 6)])
    assert any(not difference.is_rounding for difference in found)


def test_a_gap_decides_what_is_rounding() -> None:
    variant = Variant(NO_SPECULATION, 1, True, 16)
    assert Difference(variant, 0, 0, 5e-5).is_rounding
    assert not Difference(variant, 0, 0, 5e-4).is_rounding
