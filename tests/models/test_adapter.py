"""Targets with adapters merged into them, against transformers' models whose weights were changed in the open."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from engines import make_core, random_prompts, run, text_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.decoder import Decoder, load_decoder
from eagle_rt.models.spec import model_spec, read_config

TOKENS = random_prompts(1, seed=3, longest=50)[0]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False, "alpha_pattern": {}}


def write_adapter(folder: Path, target: Path, modules: list[str], more: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """For these modules of every layer, in PEFT's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(5), dict(more or {})
    for name, weight in load_file(target / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(modules)):
            rank = 2 if module.endswith("k_proj") else 4
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def adapted(target: Path, adapter: Path, **options: Any) -> Decoder:
    spec, defaults = model_spec(read_config(target)), {"context_length": 512, "dtype": torch.float32, "device": "cpu"}
    return load_decoder(target, spec, adapter_dir=adapter, **{**defaults, **options})


@torch.inference_mode()
def changed_model(target: Path, adapter: Path, scale_of: Any) -> torch.nn.Module:
    """transformers' model, with scale_of(module, rank) times B A added to its weights."""
    model, tensors = checkpoints.transformers_model(target, dtype=torch.float32), load_file(adapter / "adapter_model.safetensors")
    parameters = dict(model.named_parameters())
    for name, b in tensors.items():
        if name.endswith("lora_B.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            a = tensors[name.replace("lora_B", "lora_A")]
            parameters[f"{module}.weight"] += scale_of(module, len(a)) * b @ a
    return model


@pytest.mark.parametrize(
    ("family", "modules", "config", "scale_of"),
    [
        ("llama", ["q_proj", "v_proj"], {}, lambda module, rank: 8 / rank),
        ("qwen3", ["q_proj", "k_proj", "o_proj", "down_proj"], {"use_rslora": True}, lambda module, rank: 8 / rank**0.5),
        ("phi3", ["qkv_proj", "gate_up_proj", "lm_head"], {}, lambda module, rank: 8 / rank),
        (
            "llama-biased",
            ["q_proj", "up_proj"],
            {"alpha_pattern": {"proj": 99, "q_proj": 2, r"layers\.[01]\.mlp\.up_proj": 1}},  # the first names no module
            lambda module, rank: (2 if "q_proj" in module else 1 if ".0.mlp" in module or ".1.mlp" in module else 8) / rank,
        ),
        ("gemma3", ["q_proj", "gate_proj"], {}, lambda module, rank: 8 / rank),
        ("gemma4", ["k_proj", "down_proj"], {}, lambda module, rank: 8 / rank),  # and so values of some layers
    ],
    ids=["llama", "rank stabilized", "fused", "alphas", "gemma3", "gemma4"],
)
def test_logits_are_those_of_the_changed_model(
    tmp_path: Path, family: str, modules: list[str], config: dict[str, Any], scale_of: Any
) -> None:
    target = checkpoints.write_target(tmp_path / "target", family)
    adapter = write_adapter(tmp_path / "adapter", target, modules, **config)
    with torch.inference_mode():
        expected = changed_model(target, adapter, scale_of)(torch.tensor([TOKENS])).logits[0]
        plain = checkpoints.transformers_model(target, dtype=torch.float32)(torch.tensor([TOKENS])).logits[0]
    assert (expected - plain).abs().max() > 0.5
    torch.testing.assert_close(text_logits(adapted(target, adapter), TOKENS), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("infix", ["", ".modules_to_save.default", ".modules_to_save"])
def test_whole_tensors_take_the_place_of_the_targets(tmp_path: Path, infix: str) -> None:
    target = checkpoints.write_target(tmp_path / "target", "llama-biased")
    shape = load_file(target / "model.safetensors")["lm_head.weight"].shape
    head, bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)), torch.full((64,), 0.7)
    more = {
        f"base_model.model.lm_head{infix}.weight": head,
        "base_model.model.model.layers.1.self_attn.q_proj.base_layer.bias": bias,
    }
    adapter = write_adapter(tmp_path / "adapter", target, [], more)
    model = checkpoints.transformers_model(target, dtype=torch.float32)
    with torch.inference_mode():
        model.lm_head.weight.copy_(head)
        model.model.layers[1].self_attn.q_proj.bias.copy_(bias)
        expected = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(text_logits(adapted(target, adapter), TOKENS), expected, atol=2e-4, rtol=1e-3)


def test_an_engine_serves_it_as_it_would_a_merged_checkpoint(tmp_path: Path) -> None:
    target = checkpoints.write_target(tmp_path / "target")
    adapter = write_adapter(tmp_path / "adapter", target, ["v_proj", "down_proj"])
    checkpoints.write_eagle3_head(tmp_path / "head")
    changed_model(target, adapter, lambda module, rank: 8 / rank).save_pretrained(tmp_path / "merged")
    checkpoints.byte_tokenizer().save_pretrained(tmp_path / "merged")
    prompts, sampling = random_prompts(3, seed=2), SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
    merged = run(make_core(tmp_path / "merged"), prompts, sampling)
    assert run(make_core(target), prompts, sampling) != merged
    assert run(make_core(target, lora_path=str(adapter)), prompts, sampling) == merged
    assert run(make_core(target, tmp_path / "head", (3, 2, 6), lora_path=str(adapter)), prompts, sampling) == merged
    with closing(make_core(target, lora_path=str(adapter), tensor_parallel_size=2)) as core:
        assert run(core, prompts, sampling) == merged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "of type IA3; only LORA"),
        ({"use_dora": True}, "with use_dora, which is not supported"),
        ({"more": {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}}, "layers.9.* does not have"),
        (
            {"more": {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}},
            "only one of lora_A and lora_B",
        ),
        ({"more": {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(4)}}, "only pairs"),
        ({"more": {"base_model.model.model.norm.weight": torch.ones(65)}}, r"norm.weight in the shape \[65\], but .*\[64\]"),
        ({"modules": ["q_proj"], "width": 65}, r"q_proj.weight in the shape \[64, 65\], but .*\[64, 64\]"),
    ],
    ids=["kind", "dora", "layer", "half", "magnitudes", "whole shape", "shape"],
)
def test_adapters_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    target = checkpoints.write_target(tmp_path / "target")
    more, modules = change.pop("more", None), change.pop("modules", ["v_proj"])
    width = change.pop("width", 64)
    adapter = write_adapter(tmp_path / "adapter", target, modules, more, **change)
    if width != 64:
        tensors = load_file(adapter / "adapter_model.safetensors")
        wide = {name: torch.ones(4, width) if "lora_A" in name else tensor for name, tensor in tensors.items()}
        save_file(wide, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=message):
        adapted(target, adapter)


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    target = checkpoints.write_target(tmp_path / "target")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        adapted(target, tmp_path / "target")
    adapter = write_adapter(tmp_path / "adapter", target, ["v_proj"])
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors is missing"):
        adapted(target, adapter)
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        make_core(target, lora_path="./nothing")
