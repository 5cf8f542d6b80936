"""Targets with weights of eight or four bits: another model, of which all else holds."""

from pathlib import Path

import checkpoints
import family_configs
import pytest
import torch
from engines import load_target, make_config, make_core, random_prompts, run, text_logits
from head_layouts import write_head
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle_rt.engine import load
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.profile import subject_of
from eagle_rt.kernels.products import has_own_kernels
from eagle_rt.models.decoder import load_decoder
from eagle_rt.models.heads.load import load_head
from eagle_rt.models.spec import model_spec, read_config

TEXT = random_prompts(1, seed=5, longest=60)[0]

pytestmark = pytest.mark.skipif(not has_own_kernels(torch.zeros(1)), reason="no kernels of our own on this processor")


def in_eight_bits(weight: Tensor) -> Tensor:
    """Whole numbers of 127ths of the largest of a row."""
    largest = weight.abs().amax(1, keepdim=True).clamp(min=1e-9)
    return torch.round(127 * weight / largest) / 127 * largest


def in_four_bits(weight: Tensor) -> Tensor:
    """Whole numbers of fifteenths of what the 32 numbers of a group and 0 span, of steps that float16 holds beside the largest."""
    groups = weight.unflatten(1, (-1, 32))
    least, most = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    steps = (most - least) / 15
    largest = steps.amax(1, keepdim=True)
    nothings = torch.round(-least / steps)[..., None]
    steps = ((steps / largest).half().float() * largest)[..., None]
    return ((torch.round(groups / steps) + nothings).clamp(0, 15) - nothings).mul(steps).flatten(1)


# Of few outputs, which decide on more than one channel.
LEFT_AS_THEY_ARE = ("in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate", "kv_b_proj", "router", "router.proj")
ROUNDED = {"int8": in_eight_bits, "int4": in_four_bits}


@torch.inference_mode()
def rounded_logits(directory: Path, quantization: str) -> Tensor:
    """By transformers, with weights that are rounded so; the output layer's have eight bits at least."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    for place, module in model.named_modules():
        rounded = in_eight_bits if place == "lm_head" else ROUNDED[quantization]
        weights = {"weight"} if isinstance(module, torch.nn.Linear) else {"gate_up_proj", "down_proj"} & module._parameters.keys()
        if place.endswith(LEFT_AS_THEY_ARE):
            continue
        for name in weights:
            weight = getattr(module, name)
            has_inputs_first = type(module).__name__ in ("GptOssExperts", "Llama4TextExperts")
            turn = (lambda own: own.transpose(-1, -2)) if has_inputs_first else (lambda own: own)
            turned = turn(weight)
            # Several shared experts, which lie in one, are rounded one by one.
            is_shared = place.endswith(("shared_experts.down_proj", "shared_expert.down_proj"))
            size = getattr(model.config, "moe_intermediate_size", model.config.intermediate_size)
            parts = turned.split(size, 1) if is_shared else (turned,)
            own = torch.cat([rounded(part.flatten(0, -2)).view(part.shape) for part in parts], dim=-1)
            setattr(module, name, torch.nn.Parameter(turn(own)))
    return model(torch.tensor([TEXT])).logits[0]


@pytest.mark.parametrize("name", checkpoints.FAMILIES)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_every_family(tmp_path: Path, name: str, quantization: str) -> None:
    checkpoints.write_target(tmp_path, name)
    spec, longest = model_spec(read_config(tmp_path)), family_configs.TRAINED_LENGTH
    decoder = load_decoder(tmp_path, spec, context_length=longest, dtype=torch.float32, device="cpu", quantization=quantization)
    found, exact = text_logits(decoder, TEXT), text_logits(load_target(tmp_path, longest), TEXT)
    errors, rounding = (found - rounded_logits(tmp_path, quantization)).abs(), (found - exact).abs()
    if quantization == "int8":
        assert errors.max() < 2e-3 * exact.std()
        assert errors.max() < 0.1 * rounding.max(), "the model was not rounded"
    else:  # what is multiplied with four bits is rounded, too, ten times as finely
        assert errors.mean() < 0.12 * rounding.mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_trees_change_no_text(built_in: Path, dtype: str, kind: str, quantization: str) -> None:
    options = {"quantization": quantization, "dtype": dtype}
    prompts = random_prompts(6, seed=3, longest=30, vocab_size=4000)
    settings = [SamplingParams(temperature=index % 2, seed=index, max_new_tokens=40) for index in range(6)]
    alone = make_core(built_in / "target", **options)
    assert alone.runner.stepper.target.count_bits().keys() == {int(quantization[-1])}, "something was not rounded"
    plain = run(alone, prompts, settings)
    core = make_core(built_in / "target", built_in / "eagle3", (4, 3, 12), speculative_tree=kind, **options)
    assert run(core, prompts, settings) == plain
    if kind == "fixed":
        assert core.metrics.mean_accepted_tokens > 2


def test_a_head_shares_the_output_layer(target_dir: Path, tmp_path: Path) -> None:
    spec = model_spec(read_config(target_dir))
    target = load_decoder(target_dir, spec, context_length=512, dtype=torch.float32, device="cpu", quantization="int8")
    directory = write_head("eagle-llama3", tmp_path / "head", target_dir).directory
    head = load_head(directory, target, "EAGLE", torch.float32, "cpu")[0]
    assert head.quantized()._lm_head is target.lm_head
    assert target.lm_head.product.num_bits == 8


@pytest.mark.parametrize(("quantization", "bits"), [("int8", "eight"), ("int4", "four")])
def test_it_is_said(target_dir: Path, quantization: str, bits: str) -> None:
    config = make_config(target_dir, quantization=quantization)
    notes = load.load_models(config, load.model_info(config)).notes
    assert f"--quantization {quantization}: the model's weights are rounded to {bits} bits" in notes


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_it_is_refused(target_dir: Path, quantization: str) -> None:
    with pytest.raises(ValueError, match=rf"--quantization {quantization} needs .* not cpu and float16: leave it out"):
        make_core(target_dir, quantization=quantization, dtype="float16")
    with pytest.raises(ValueError, match="--quantization is fp8, but must be one of none, int8, int4"):
        make_config(target_dir, quantization="fp8")


def test_a_profile_is_of_one_of_them(target_dir: Path, head_dir: Path) -> None:
    configs = [make_config(target_dir, head_dir, (3, 2, 8), quantization=name) for name in ("none", "int8", "int4")]
    info = load.model_info(configs[0])
    assert len({subject_of(config, info) for config in configs}) == 3
