"""What Gemma 3 has of its own: two kinds of layers, norms of what is added, and configs that leave much out."""

import json
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from captured import make_captured
from engines import load_target, make_core, random_prompts, run, text_logits
from safetensors.torch import load_file

from eagle_rt.engine.params import SamplingParams
from eagle_rt.kernels import dispatch
from eagle_rt.kernels.gate import GEGLU
from eagle_rt.models import linear
from eagle_rt.models.spec import model_spec

TOKENS = list(range(10, 90))
# As google/gemma-3-4b-it's, whose other numbers are transformers' defaults.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


@pytest.fixture(scope="module")
def gemma_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_target(tmp_path_factory.mktemp("gemma"), "gemma3")


def test_what_a_published_config_leaves_out() -> None:
    spec = model_spec(PUBLISHED)
    assert (spec.shape.num_heads, spec.shape.num_kv_heads, spec.shape.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert spec.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert (spec.shape.gate, spec.query_scale, spec.embedding_scale) == (GEGLU, 1.0, 2560**0.5)
    assert spec.window_rope
    assert (spec.rope.kind, spec.rope.theta, spec.window_rope.kind, spec.window_rope.theta) == ("linear", 1e6, "default", 1e4)


@pytest.mark.parametrize("name", ["attn_logit_softcapping", "use_bidirectional_attention"])
def test_what_would_be_another_model(name: str) -> None:
    assert model_spec(PUBLISHED | {name: None})
    with pytest.raises(ValueError, match=rf"^{name} 30\.0 in config\.json is not supported"):
        model_spec(PUBLISHED | {name: 30.0})


def test_the_spelling_of_transformers_4(gemma_dir: Path, tmp_path: Path) -> None:
    for file in gemma_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((gemma_dir / "config.json").read_text())
    full, sliding = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    for name in ("rope_parameters", "layer_types", "tie_word_embeddings"):
        del config[name]
    config |= {"rope_theta": full.pop("rope_theta"), "rope_local_base_freq": sliding["rope_theta"], "rope_scaling": full}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window_pattern": 3}))
    assert torch.equal(*(text_logits(load_target(directory), TOKENS) for directory in (gemma_dir, tmp_path)))


def test_captured_steps_write_the_same_texts(gemma_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels for GPUs."""
    prompts, setting = random_prompts(2, seed=5), SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    expected = run(make_core(gemma_dir, context_length=100), prompts, setting)
    monkeypatch.setattr(dispatch, "prefers_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    monkeypatch.setattr(linear, "product_with", lambda weight, bias, quantization: None)
    core = make_captured(gemma_dir, head_dir, (2, 2, 4), (2,), context_length=100)
    assert run(core, prompts, setting) == expected
    assert "step" in core.runner.clock.seconds
    assert core.metrics.num_draft_tokens > 0


def test_norms_are_exact_in_half_precision(gemma_dir: Path) -> None:
    stored = load_file(gemma_dir / "model.safetensors")["model.norm.weight"].bfloat16()
    weight = load_target(gemma_dir, dtype=torch.bfloat16).final_norm.weight
    assert torch.equal(weight, stored.float() + 1)
    assert not torch.equal(weight, (stored + 1).float())
