"""Heads with weights of eight bits."""

from pathlib import Path

import head_layouts
import pytest
import torch
from engines import load_target, make_config, make_core, random_prompts, run
from head_layouts import EAGLE3_LAYOUTS, LAYOUTS, write_head
from torch import Tensor

from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.attention.rows import RowAttention
from eagle_rt.engine import load
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SamplingParams
from eagle_rt.kernels.products import has_own_kernels
from eagle_rt.models.decoder import Decoder
from eagle_rt.models.heads.base import Head
from eagle_rt.models.heads.load import load_head
from eagle_rt.models.linear import Linear
from eagle_rt.models.reading import text_batch, text_pool

TEXT = random_prompts(1, seed=5, longest=40)[0]
GREEDY = SamplingParams(temperature=0, max_new_tokens=24)

pytestmark = pytest.mark.skipif(not has_own_kernels(torch.zeros(1)), reason="no kernels of our own on this processor")


def load_own(name: str, directory: Path, target: Decoder, target_dir: Path) -> Head:
    kind = "EAGLE3" if name in EAGLE3_LAYOUTS else "EAGLE"
    return load_head(write_head(name, directory, target_dir).directory, target, kind, torch.float32, "cpu")[0]


@torch.inference_mode()
def read(head: Head, target: Decoder, backend: ReferenceAttention | RowAttention) -> tuple[Tensor, Tensor]:
    """States and logits after a text."""
    batch = text_batch([TEXT], torch.device("cpu"))
    pool = text_pool(batch, target.rows, target.embedding)
    features = target.forward(batch, pool, backend, head.feature_layers).features
    assert features is not None
    own_pool = text_pool(batch, head.rows, target.embedding)
    states = head.forward(batch.tokens, head.fuse(features), batch, own_pool, backend)
    return states, head.logits(states)


def with_rounded_weights(self: Linear) -> Linear:
    """What is multiplied is float32, and the weights are what eight bits hold of them."""
    return Linear(Linear(self.weight, self.bias, "int8").weight, self.bias)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only weights are rounded, in parts and as whole layers."""
    target = load_target(target_dir)
    head = load_own(name, tmp_path / "head", target, target_dir)
    quantized = head.quantized()
    monkeypatch.setattr(Linear, "quantized", with_rounded_weights)
    rounded = head.quantized()
    for backend in (ReferenceAttention(torch.float32), RowAttention(torch.float32)):
        exact = read(head, target, backend)
        for found, expected, other in zip(read(quantized, target, backend), read(rounded, target, backend), exact, strict=True):
            error = (found - expected).abs().max()
            assert error < 2e-3 * expected.std()
            assert error < 0.1 * (found - other).abs().max(), "the head was not rounded"


@torch.inference_mode()
def test_small_features_count_beside_huge_ones(target_dir: Path, tmp_path: Path) -> None:
    """As residual streams have them, which `fc` reads as they are."""
    target = load_target(target_dir)
    head = load_own("eagle3-yuhuili", tmp_path / "head", target, target_dir)
    features = torch.zeros(2, len(head.feature_layers) * target.spec.shape.hidden_size)
    features[:, 0], features[1, 1:9] = 1e4, 0.1
    few, more = head.quantized().fuse(features)
    expected_few, expected_more = head.fuse(features)
    torch.testing.assert_close(more - few, expected_more - expected_few)


def test_the_target_keeps_its_output_layer(target_dir: Path, tmp_path: Path) -> None:
    target = load_target(target_dir)
    head = load_own("eagle-llama3", tmp_path / "head", target, target_dir)
    before = target.lm_head.weight.clone()
    assert head._lm_head is target.lm_head
    assert head.quantized()._lm_head is not target.lm_head
    assert torch.equal(target.lm_head.weight, before)


def test_a_head_narrowed_after_it_was_rounded(target_dir: Path, tmp_path: Path) -> None:
    target = load_target(target_dir)
    head = load_own("eagle3-yuhuili", tmp_path / "head", target, target_dir)
    kept = head.token_map.target_ids[::3]
    states = torch.randn(4, head.shape.hidden_size)
    torch.testing.assert_close(head.quantized().narrowed(kept).quantized().logits(states), head.quantized().logits(states)[:, ::3])


def is_quantized(core: EngineCore) -> bool:
    assert core.runner.host_stepper
    return core.runner.host_stepper.drafter.head._lm_head.product.num_bits == 8


@pytest.mark.parametrize(
    ("asked_for", "expected"),
    [("auto", True), ("none", False), ("int8", True)],
)
def test_when_weights_are_rounded(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_for: str, expected: bool
) -> None:
    head = head_layouts.write_head("eagle3-yuhuili", tmp_path / "head", target_dir).directory
    config = make_config(target_dir, head, (3, 2, 8), speculative_draft_model_quantization=asked_for)
    assert load.quantizes_head(config, torch.zeros(1)) == expected
    prompts = random_prompts(2, seed=3)
    core = make_core(target_dir, head, (3, 2, 8), speculative_draft_model_quantization=asked_for, speculative_tree="adaptive")
    assert run(core, prompts, GREEDY) == run(make_core(target_dir), prompts, GREEDY)
    assert is_quantized(core) == expected
    monkeypatch.setattr(load, "has_own_kernels", lambda weight: False)
    if asked_for != "int8":  # which is refused then
        assert not load.quantizes_head(config, torch.zeros(1))


def test_a_precision_without_kernels_is_refused(target_dir: Path, tmp_path: Path) -> None:
    head = head_layouts.write_head("eagle3-yuhuili", tmp_path / "head", target_dir).directory
    with pytest.raises(ValueError, match=r"--speculative-draft-model-quantization int8 needs .* not cpu and float16: leave it out"):
        make_core(target_dir, head, (3, 2, 8), speculative_draft_model_quantization="int8", dtype="float16")
    with pytest.raises(ValueError, match=r"is int4, but must be one of auto, none, int8"):
        make_config(target_dir, head, (3, 2, 8), speculative_draft_model_quantization="int4")
