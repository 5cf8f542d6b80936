"""Llama 4: layers that turn nothing, norms without weights, experts that are given less the less they count, and texts that are no
longer than one of the chunks within which its other layers see."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from engines import load_target, text_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_rt.config import EngineConfig
from eagle_rt.engine.load import load_models, model_info
from eagle_rt.models.spec import model_spec, read_config
from models.test_decoder import TOKENS, assert_equals_transformers

# Scout's frequencies are either kept or divided.
SCOUT = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}


def change_config(folder: Path, *left_out: str, **changes: Any) -> None:
    file = folder / "config.json"
    config = {name: value for name, value in json.loads(file.read_text()).items() if name not in left_out}
    file.write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": SCOUT, "interleave_moe_layer_step": 1},
        {"use_qk_norm": False, "moe_layers": [1, 2, 5]},
        {"no_rope_layers": [0, 1, 1, 0, 0, 1, 1, 1], "attention_bias": True},
        {"num_experts_per_tok": 3},
    ],
    ids=["scout", "maverick", "listed", "several"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert_equals_transformers(checkpoints.write_target(tmp_path, "llama4", **overrides))


def test_which_layers_turn_and_which_have_experts(tmp_path: Path) -> None:
    config = read_config(checkpoints.write_target(tmp_path, "llama4"))
    spec = model_spec(config)
    assert [window is None for window in spec.windows] == [False, False, True] * 2 + [False, False]
    assert [own is None for own in spec.experts] == [True, False] * 4
    assert (spec.shape.intermediate_size, spec.experts[1].intermediate_size) == (96, 32)
    assert spec.window_rope
    assert (spec.rope.rotary_dim, spec.window_rope.rotary_dim) == (0, 32)
    assert model_spec(config | {"attention_chunk_size": None, "floor_scale": 81}).longest_text == 80


def test_what_published_configs_leave_out(tmp_path: Path) -> None:
    """And what they have as those before transformers 5 did."""
    checkpoints.write_target(tmp_path, "llama4", no_rope_layer_interval=4)
    expected = text_logits(load_target(tmp_path), TOKENS)
    implied = "no_rope_layer_interval", "layer_types", "moe_layers", "attention_chunk_size", "floor_scale", "use_qk_norm"
    change_config(tmp_path, *implied, "rope_parameters", no_rope_layers=[], rope_theta=10000.0, rope_scaling=None)
    assert torch.equal(text_logits(load_target(tmp_path), TOKENS), expected)
    change_config(tmp_path, "rope_theta")
    assert load_target(tmp_path).spec.window_rope.theta == 500000


def test_experts_that_are_tensors_of_their_own(tmp_path: Path) -> None:
    """As checkpoints in few bits have them."""
    expected = text_logits(load_target(checkpoints.write_target(tmp_path, "llama4")), TOKENS)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        stem, part = name.rsplit(".", 1)
        if not stem.endswith(".experts"):
            tensors[name] = tensor
            continue
        parts = {"down_proj": tensor}
        if part == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=2), strict=True))
        for own_part, of_all in parts.items():
            for number, own in enumerate(of_all):
                tensors[f"{stem}.{number}.{own_part}.weight"] = own.t().contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(text_logits(load_target(tmp_path), TOKENS), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("limits", "longest"),
    [
        ({"floor_scale": 61}, 60),
        ({"floor_scale": 61, "attn_temperature_tuning": False}, 512),
        ({"attention_chunk_size": 60}, 60),
        ({"attention_chunk_size": 60, "floor_scale": 81}, 60),
    ],
    ids=str,
)
def test_texts_are_as_long_as_all_is_as_in_short_ones(tmp_path: Path, limits: dict[str, Any], longest: int) -> None:
    checkpoints.write_target(tmp_path, "llama4", **limits)
    config = EngineConfig(model_path=str(tmp_path), device="cpu")
    assert load_models(config, model_info(config)).context_length == longest
    tokens = TOKENS[:longest]
    assert_equals_transformers(tmp_path, len(tokens), tokens)
    if longest == 512:
        return
    with pytest.raises(
        ValueError, match=f"--context-length is {longest + 1}, but past {longest} tokens Llama4ForCausalLM attends in another way"
    ):
        load_models(replace(config, context_length=longest + 1), model_info(config))
    # And no shorter than they can be: transformers' next token is not ours any more.
    with pytest.raises(AssertionError, match="not close"):
        assert_equals_transformers(tmp_path, longest, TOKENS[: longest + 1])
