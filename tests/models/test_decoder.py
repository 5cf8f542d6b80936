"""Logits against transformers."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import family_configs
import pytest
import torch
from engines import load_target, text_logits
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eagle_rt.config import EngineConfig
from eagle_rt.engine.load import load_models, model_info
from eagle_rt.kernels import dispatch
from eagle_rt.models.experts import Experts
from eagle_rt.models.rearranged import name_of_text
from eagle_rt.models.spec import read_config

TOKENS = torch.randint(6, family_configs.VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(1)).tolist()


def assert_equals_transformers(directory: Path, context_length: int = 512, tokens: list[int] = TOKENS) -> None:
    model = checkpoints.transformers_model(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.1, "a model whose logits hardly differ would prove nothing"
    torch.testing.assert_close(text_logits(load_target(directory, context_length), tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_every_family(tmp_path: Path, name: str, max_shard_size: str) -> None:
    checkpoints.write_target(tmp_path, name, max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "100KB")
    assert_equals_transformers(tmp_path)


@pytest.mark.parametrize("name", checkpoints.SEEING)
def test_what_reads_of_those_that_see(tmp_path: Path, name: str) -> None:
    checkpoints.write_target(tmp_path, name)
    assert_equals_transformers(tmp_path)
    config = EngineConfig(model_path=str(tmp_path), device="cpu")
    assert any("it takes no images" in note for note in load_models(config, model_info(config)).notes)


def test_all_in_one_config(tmp_path: Path) -> None:
    """As the first Qwen2.5-VL have it."""
    expected = text_logits(load_target(checkpoints.write_target(tmp_path, "qwen2.5-vl")), TOKENS)
    config_file = tmp_path / "config.json"
    config = json.loads(config_file.read_text())
    config = config.pop("text_config") | config
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": scaling["mrope_section"]}}
    config_file.write_text(json.dumps(config))
    assert torch.equal(text_logits(load_target(tmp_path), TOKENS), expected)
    config_file.write_text(json.dumps(config | {"model_type": "ministral3"}))
    with pytest.raises(ValueError, match="is of type ministral3, which is not qwen2_5_vl_text or qwen2_5_vl"):
        load_target(tmp_path)


def test_shared_experts_that_are_several(tmp_path: Path) -> None:
    """And what GLM's published configs say, and what they may leave out."""
    assert_equals_transformers(checkpoints.write_target(tmp_path, "glm4-moe", n_shared_experts=2, first_k_dense_replace=2))
    expected = text_logits(load_target(tmp_path), TOKENS)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_parameters", "norm_topk_prob"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 10000, "rope_scaling": None}))
    assert torch.equal(text_logits(load_target(tmp_path), TOKENS), expected)


@pytest.mark.parametrize("name", ["ministral3", "ministral3-vl"])
def test_queries_are_scaled_past_the_trained_length(tmp_path: Path, name: str) -> None:
    """Which is as much as is served unless more is asked for."""
    checkpoints.write_target(tmp_path, name, max_position_embeddings=4096)
    config = EngineConfig(model_path=str(tmp_path), device="cpu")
    usual, longer = (load_models(replace(config, context_length=length), model_info(config)) for length in (None, 4096))
    assert (usual.context_length, longer.context_length) == (256, 4096)
    assert [any("past 256 tokens queries are scaled" in note for note in own.notes) for own in (usual, longer)] == [False, True]
    tokens = 9 * TOKENS
    assert_equals_transformers(tmp_path, 4096, tokens)
    unscaled, scaled = (text_logits(own.target, tokens) for own in (usual, longer))
    assert torch.equal(*(text_logits(own.target, tokens[:256]) for own in (usual, longer)))
    assert not torch.allclose(unscaled[256:], scaled[256:], atol=1e-2)


def test_minimax_as_published_configs_say(tmp_path: Path) -> None:
    """How many of a head's numbers are turned, by themselves or, left out, 64."""
    expected = text_logits(load_target(checkpoints.write_target(tmp_path, "minimax-m2")), TOKENS)
    config_file = tmp_path / "config.json"
    config = json.loads(config_file.read_text())
    for name in ("rope_parameters", "partial_rotary_factor"):
        config.pop(name, None)
    config |= {"rope_theta": 10000, "scoring_func": "sigmoid", "use_qk_norm": True, "shared_intermediate_size": 0}
    config_file.write_text(json.dumps(config | {"rotary_dim": 16}))
    assert torch.equal(text_logits(load_target(tmp_path), TOKENS), expected)
    del config["rotary_dim"]
    config_file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="turns 64 of a head's 32 numbers"):
        load_target(tmp_path)


def test_latents_as_configs_say(tmp_path: Path) -> None:
    """Norms within have an epsilon of their own; what is turned may be stored in halves; and what published configs leave out."""
    unlike = {"rms_norm_eps": 0.1, "rope_interleave": False, "first_k_dense_replace": 1}
    assert_equals_transformers(checkpoints.write_target(tmp_path, "glm4-moe-lite", **unlike))
    expected = text_logits(load_target(tmp_path), TOKENS)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("norm_topk_prob", "mlp_layer_types", "first_k_dense_replace"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(text_logits(load_target(tmp_path), TOKENS), expected)
    del config["rope_interleave"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not torch.equal(text_logits(load_target(tmp_path), TOKENS), expected)
    del config["kv_lora_rank"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json has no kv_lora_rank, which Glm4MoeLiteForCausalLM needs"):
        load_target(tmp_path)


@pytest.mark.parametrize(("name", "method"), [("deepseek-v3", "noaux_tc"), ("deepseek-v2", "group_limited_greedy")])
def test_experts_of_the_best_groups(tmp_path: Path, name: str, method: str) -> None:
    groups = {"n_group": 4, "topk_group": 2, "topk_method": method}
    assert_equals_transformers(checkpoints.write_target(tmp_path, name, **groups))
    config, found = json.loads((tmp_path / "config.json").read_text()), text_logits(load_target(tmp_path), TOKENS)
    for changed in ({"n_group": 1}, {"topk_group": 4}):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        assert not torch.equal(text_logits(load_target(tmp_path), TOKENS), found)
    for wrong, words in (
        ({"n_group": 5}, "from 2 of 5 groups"),
        ({"topk_group": 5}, "5 of 4"),
        ({"n_group": 12}, "3 of 12 experts"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(ValueError, match=words):
            load_target(tmp_path)


def test_shared_experts_with_a_gate(tmp_path: Path) -> None:
    """Which may be several, but not of another size."""
    checkpoints.write_target(tmp_path, "qwen3.5-moe", shared_expert_intermediate_size=64)
    assert_equals_transformers(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"shared_expert_intermediate_size": 48}))
    with pytest.raises(ValueError, match=r"shared_expert_intermediate_size 48 in config\.json is no multiple of the experts' 32"):
        load_target(tmp_path)


def test_which_layers_have_memories(tmp_path: Path) -> None:
    """Configs may leave out which, and by how much heads are turned."""
    checkpoints.write_target(tmp_path, "qwen3.5")
    expected = text_logits(load_target(tmp_path), TOKENS)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"], config["rope_parameters"]["partial_rotary_factor"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(text_logits(load_target(tmp_path), TOKENS), expected)
    (tmp_path / "config.json").write_text(json.dumps(config | {"full_attention_interval": 2}))
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.self_attn\.q_proj\.weight is missing"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"linear_num_value_heads": 5}))
    with pytest.raises(ValueError, match=r"linear_num_value_heads is 5 in config\.json, not a multiple of 2"):
        load_target(tmp_path)


def test_what_chooses_by_sigmoids_stays_in_float32(tmp_path: Path) -> None:
    checkpoints.write_target(tmp_path, "glm4-moe")
    feed_forward = load_target(tmp_path, dtype=torch.bfloat16)._blocks[1].feed_forward
    assert isinstance(feed_forward, Experts)
    stored = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert feed_forward.weights.choice_bias is not None
    assert torch.equal(feed_forward.weights.choice_bias, stored)
    assert feed_forward.weights.router.dtype == torch.float32


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_of_what_reads(stored: str, name: str) -> None:
    assert name_of_text(stored) == name


@pytest.mark.parametrize("name", ["qwen3", "phi3-long", "hunyuan", "gemma3", "glm4-moe", *checkpoints.IN_PARTS])
def test_in_torch_alone(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    checkpoints.write_target(tmp_path, name)
    assert_equals_transformers(tmp_path)


ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}


@pytest.mark.parametrize("style", ["transformers 5", "transformers 4"])
@pytest.mark.parametrize("name", ROPES)
def test_every_rope_in_both_spellings(tmp_path: Path, name: str, style: str) -> None:
    checkpoints.write_target(tmp_path, "llama", rope_parameters=ROPES[name])
    if style == "transformers 4":
        config_file = tmp_path / "config.json"
        config = json.loads(config_file.read_text())
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        config["rope_scaling"] = None if name == "theta" else scaling
        config["torch_dtype"] = config.pop("dtype")
        config_file.write_text(json.dumps(config))
    assert_equals_transformers(tmp_path)


def test_dynamic_rope_stretches_to_the_served_context(tmp_path: Path) -> None:
    """Transformers stretches to the text's length: both agree where the served context is exactly that."""
    checkpoints.write_target(tmp_path, "llama", rope_parameters=ROPES["dynamic"], max_position_embeddings=40)
    assert_equals_transformers(tmp_path, context_length=len(TOKENS))
    with pytest.raises(AssertionError, match="not close"):
        assert_equals_transformers(tmp_path, context_length=40)


def test_longrope_is_for_what_is_served(tmp_path: Path) -> None:
    """Transformers goes by the text: both agree on short texts where nothing else is served. In the spelling of transformers 4."""
    checkpoints.write_target(tmp_path, "phi3-long")
    config_file = tmp_path / "config.json"
    config = json.loads(config_file.read_text())
    scaling = config.pop("rope_parameters")
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        config[name] = scaling.pop(name)
    scaling["type"] = scaling.pop("rope_type")
    config_file.write_text(json.dumps(config | {"rope_scaling": scaling}))
    short = TOKENS[: family_configs.TRAINED_LENGTH]
    assert_equals_transformers(tmp_path, len(short), short)
    assert_equals_transformers(tmp_path, len(TOKENS))
    with pytest.raises(AssertionError, match="not close"):
        assert_equals_transformers(tmp_path, len(TOKENS), short)
    for context_length, is_said in ((len(TOKENS), True), (len(short), False)):
        config = EngineConfig(model_path=str(tmp_path), device="cpu", context_length=context_length)
        notes = load_models(config, model_info(config)).notes
        assert any("angles are those for long texts" in note for note in notes) == is_said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "config.json has no hidden_size, which LlamaForCausalLM needs"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' without factor"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor 2 in config.json turns 32 of a head's 16 numbers"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "1 numbers as short_factor"),
    ],
    ids=["size", "factor", "part", "frequencies"],
)
def test_what_a_config_lacks_is_named(target_dir: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    shutil.copytree(target_dir, tmp_path, dirs_exist_ok=True)
    config_file = tmp_path / "config.json"
    config = json.loads(config_file.read_text()) | change
    config_file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_target(tmp_path)


@pytest.mark.parametrize(("content", "message"), [("{", "is not valid JSON"), ("[1]", "holds [1] and no settings")])
def test_a_config_that_is_none(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_config(tmp_path)


def test_a_pickle_of_weights(tmp_path: Path) -> None:
    checkpoints.write_target(tmp_path)
    expected = text_logits(load_target(tmp_path), TOKENS)
    tensors = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert torch.equal(text_logits(load_target(tmp_path), TOKENS), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.35), (torch.float16, 0.05)])
def test_half_precision_stays_near(target_dir: Path, dtype: torch.dtype, tolerance: float) -> None:
    exact = text_logits(load_target(target_dir), TOKENS)
    rounded = text_logits(load_target(target_dir, dtype=dtype), TOKENS)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().max() < tolerance * exact.std()
