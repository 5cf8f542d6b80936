"""What Gemma 4 has of its own: layers that see all of a text with heads of their own, values that are made as keys are, and experts
beside a feed-forward part of one gate."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from captured import make_captured
from engines import load_target, make_core, random_prompts, run, text_logits
from safetensors.torch import load_file, save_file

from eagle_rt.cache.pool import RowShape
from eagle_rt.engine.load import num_weights
from eagle_rt.engine.params import SamplingParams
from eagle_rt.kernels.gate import GEGLU
from eagle_rt.models.spec import LayerInputShape, model_spec
from models.test_decoder import TOKENS, assert_equals_transformers

# As google/gemma-4-31B-it's and google/gemma-4-26B-A4B-it's say it.
DENSE: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
    "vocab_size": 262144,
    "enable_moe_block": False,
    "num_experts": None,
}
EXPERTS = DENSE | {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "num_attention_heads": 16,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}


ALL_TURNED = {"rope_theta": 1e4, "rope_type": "proportional", "factor": 4.0}


# google/gemma-4-E2B-it's.
SMALL = DENSE | {
    "attention_k_eq_v": False,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 262144,
}


def change_config(folder: Path, *left_out: str, **changes: Any) -> None:
    file = folder / "config.json"
    config = {name: value for name, value in json.loads(file.read_text()).items() if name not in left_out}
    file.write_text(json.dumps(config | changes))


def test_what_published_configs_say() -> None:
    spec = model_spec(DENSE)
    assert spec.windows == ((1024,) * 5 + (None,)) * 10
    assert [shape.row for shape in spec.layer_shapes] == ([RowShape(16, 256, scale=1.0)] * 5 + [RowShape(4, 512, scale=1.0)]) * 10
    assert [shape.values_as_keys for shape in spec.layer_shapes[:6]] == [False] * 5 + [True]
    assert (spec.shape.gate, spec.embedding_scale, spec.logit_cap, spec.query_scale) == (GEGLU, 5376**0.5, 30.0, 1.0)
    assert spec.window_rope
    assert [(rope.head_dim, rope.rotary_dim, rope.theta) for rope in (spec.rope, spec.window_rope)] == [
        (512, 512, 1e6),
        (256, 256, 1e4),
    ]
    assert num_weights(spec, of_all_experts=True) / 1e9 == pytest.approx(30.8, abs=0.1)
    assert set(spec.experts) == {None}


def test_what_published_configs_with_experts_say() -> None:
    spec = model_spec(EXPERTS)
    (experts,) = set(spec.experts)
    assert experts
    assert (experts.count, experts.intermediate_size, experts.beside_gate, spec.shape.intermediate_size) == (128, 704, True, 2112)
    assert (experts.mixing.top_k, experts.mixing.normalizes, experts.mixing.gate) == (8, True, GEGLU)
    assert [num_weights(spec, of_all_experts=own) / 1e9 for own in (False, True)] == pytest.approx([3.8, 25.2], abs=0.1)


def test_what_published_configs_of_small_ones_say() -> None:
    spec = model_spec(SMALL)
    assert [shape.shares_rows for shape in spec.layer_shapes] == [False] * 15 + [True] * 20
    assert [shape.intermediate_size for shape in spec.layer_shapes] == [6144] * 15 + [12288] * 20
    assert spec.row_layers == (*range(15), *((13, 13, 13, 13, 14) * 4))
    assert {shape.row for shape in spec.layer_shapes} == {RowShape(1, 256, scale=1.0), RowShape(1, 512, scale=1.0)}
    assert spec.layer_inputs == LayerInputShape(256, 262144)
    assert num_weights(spec) / 1e9 == pytest.approx(2.27, abs=0.02)
    left_out = model_spec({name: value for name, value in SMALL.items() if "per_layer_input" not in name})
    assert left_out.layer_inputs == spec.layer_inputs
    with pytest.raises(ValueError, match=r"leaves no layer whose keys and values layer 4 could see$"):
        model_spec(SMALL | {"num_kv_shared_layers": 31})


@pytest.mark.parametrize(
    "unlike",
    [
        {"use_bidirectional_attention": "all"},
        {"attn_logit_softcapping": 50.0},
    ],
    ids=str,
)
def test_what_would_be_another_model(unlike: dict[str, Any]) -> None:
    ((name, value),) = unlike.items()
    with pytest.raises(ValueError, match=rf"^{name} {value!r} in config\.json is not supported"):
        model_spec(DENSE | unlike)


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_k_eq_v": False},
        {"num_global_key_value_heads": 2, "global_head_dim": 32, "final_logit_softcapping": None},
        {"global_head_dim": 80, "tie_word_embeddings": False},
        {
            "rope_parameters": DENSE["rope_parameters"]
            | {"full_attention": {"rope_theta": 1e4, "rope_type": "proportional", "factor": 4.0}}
        },
    ],
    ids=["own values", "alike", "untied", "all turned"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert_equals_transformers(checkpoints.write_target(tmp_path, "gemma4", **overrides))


def test_configs_of_layers_one_by_one(tmp_path: Path) -> None:
    """As transformers writes them; published ones have a setting for all."""
    expected = text_logits(load_target(checkpoints.write_target(tmp_path, "gemma4")), TOKENS)
    change_config(tmp_path, "per_layer_config", global_head_dim=64, num_global_key_value_heads=1)
    assert torch.equal(text_logits(load_target(tmp_path), TOKENS), expected)
    for unlike in ({"5": {"head_dim": 64}}, {"1": {"head_dim": 64}}):
        with pytest.raises(ValueError, match=r"^per_layer_config in config\.json is not supported"):
            model_spec(DENSE | {"per_layer_config": unlike})


def test_only_values_that_are_made_as_keys_are_may_be_missing(tmp_path: Path) -> None:
    checkpoints.write_target(tmp_path, "gemma4")
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.layers.2.self_attn.v_proj.weight" not in tensors
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^tensor model\.layers\.1\.self_attn\.v_proj\.weight is missing"):
        load_target(tmp_path)


def test_experts_that_are_tensors_of_their_own(tmp_path: Path) -> None:
    """As checkpoints in few bits have them."""
    expected = text_logits(load_target(checkpoints.write_target(tmp_path, "gemma4-moe")), TOKENS)
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        stem, part = name.rsplit(".", 1)
        parts = {part: tensor}
        if part == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
        for own_part, of_all in parts.items():
            each = {f"{stem}.{number}.{own_part}.weight": own.contiguous() for number, own in enumerate(of_all)}
            tensors |= each if stem.endswith(".experts") else {name: tensor}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(text_logits(load_target(tmp_path), TOKENS), expected)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-small", "gemma4-moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_change_no_text(tmp_path: Path, head_dir: Path, name: str, dtype: str) -> None:
    checkpoints.write_target(tmp_path, name)
    prompts = random_prompts(4, seed=5)
    settings = [SamplingParams(temperature=index % 2, seed=index, max_new_tokens=24, ignore_eos=True) for index in range(4)]
    plain = run(make_core(tmp_path, dtype=dtype), prompts, settings)
    for tree in ("fixed", "adaptive"):
        assert run(make_core(tmp_path, head_dir, (4, 3, 12), speculative_tree=tree, dtype=dtype), prompts, settings) == plain


@pytest.mark.usefixtures("on_gpu_kernels")
@pytest.mark.parametrize("name", ["gemma4", "gemma4-small"])
def test_captured_steps_write_the_same_texts(tmp_path: Path, head_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of either kind are moved."""
    checkpoints.write_target(tmp_path, name)
    prompts, setting = random_prompts(2, seed=5), SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    core = make_captured(tmp_path, head_dir, (2, 2, 4), (2,), context_length=100)
    texts = run(core, prompts, setting)
    assert "step" in core.runner.clock.seconds
    assert core.metrics.num_draft_tokens > 0
    monkeypatch.undo()
    assert texts == run(make_core(tmp_path, context_length=100), prompts, setting)


def test_memory_of_either_kind_is_counted(tmp_path: Path) -> None:
    target = load_target(checkpoints.write_target(tmp_path, "gemma4", num_global_key_value_heads=2))
    pool = target.make_pool(10, 1)
    assert len(pool.storages) == 2
    assert target.bytes_per_slot == sum(storage.nbytes for storage in pool.storages.values()) // 10
    alike = replace(target.spec, layer_shapes=(target.spec.shape,) * target.spec.num_layers)
    assert num_weights(alike) < num_weights(target.spec)


def test_layers_that_see_what_others_keep_keep_nothing(tmp_path: Path) -> None:
    """Published files have what would make it, all the same."""
    target = load_target(checkpoints.write_target(tmp_path, "gemma4-small"))
    assert len(target.make_pool(10, 1).layers) == 4
    expected = text_logits(target, TOKENS)
    tensors = load_file(tmp_path / "model.safetensors")
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.6.self_attn.{part}.weight"] = tensors[f"model.layers.2.self_attn.{part}.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(text_logits(load_target(tmp_path), TOKENS), expected)


def test_the_one_whose_eyes_and_ears_are_the_same(tmp_path: Path) -> None:
    """google/gemma-4-12B-it is of another type, and reads as the others do."""
    checkpoints.write_target(tmp_path, "gemma4-unified")
    assert_equals_transformers(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert model_spec(config).architecture == "Gemma4UnifiedForCausalLM"
    seeing = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified_text"}
    assert model_spec(config | seeing).layer_shapes == model_spec(config).layer_shapes
