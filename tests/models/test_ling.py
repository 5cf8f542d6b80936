"""Ling 2.0, of which transformers has no model: GLM-4.5's is the same with other names, and heads that lie in one tensor."""

import json
from contextlib import closing
from pathlib import Path

import checkpoints
import pytest
import torch
from engines import load_target, make_core, random_prompts, run, text_logits
from safetensors.torch import load_file, save_file

from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.spec import model_spec, read_config

TOKENS = random_prompts(1, seed=3, longest=60)[0]
GROUPS = {"use_qk_norm": True, "attention_bias": False, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn": "attention",
    "o_proj": "dense",
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    "e_score_correction_bias": "expert_bias",
}
SETTINGS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def write_ling(folder: Path, glm: Path) -> Path:
    """As inclusionAI publishes it, of GLM-4.5's files."""
    tensors, renamed = load_file(glm / "model.safetensors"), {}
    for name, tensor in tensors.items():
        own = ".".join(NAMES.get(part, part) for part in name.split("."))
        if "q_proj" in own:
            of_all = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            renamed[own.replace("q_proj", "query_key_value")] = torch.cat(of_all)
        elif "k_proj" not in own and "v_proj" not in own:
            renamed[own] = tensor
    folder.mkdir()
    save_file(renamed, folder / "model.safetensors")
    config = {SETTINGS.get(name, name): value for name, value in json.loads((glm / "config.json").read_text()).items()}
    rotary = config.pop("rope_parameters")
    config |= {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "score_function": "sigmoid"}
    config |= {"rope_theta": rotary["rope_theta"], "partial_rotary_factor": 0.5, "rotary_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoints.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_target(tmp_path_factory.mktemp("glm") / "glm", "glm4-moe", **GROUPS)


@pytest.fixture(scope="module")
def ling(glm: Path) -> Path:
    return write_ling(glm.parent / "ling", glm)


@torch.inference_mode()
def test_logits_are_those_of_the_same_model_by_other_names(glm: Path, ling: Path) -> None:
    expected = checkpoints.transformers_model(glm, dtype=torch.float32)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(text_logits(load_target(ling), TOKENS), expected, atol=2e-4, rtol=1e-3)


def test_what_its_config_says(ling: Path) -> None:
    spec = model_spec(read_config(ling))
    experts = spec.experts[-1]
    assert spec.experts[0] is None
    assert experts
    assert (experts.count, experts.mixing.num_groups, experts.mixing.top_groups) == (12, 4, 2)
    assert (experts.mixing.by_sigmoid, experts.mixing.num_shared) == (True, 1)
    assert (spec.rope.head_dim, spec.rope.rotary_dim) == (32, 16)


def test_trees_and_parts_write_the_same_texts(ling: Path, tmp_path: Path) -> None:
    head = checkpoints.write_eagle3_head(tmp_path / "head")
    prompts, sampling = random_prompts(3, seed=2), SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
    plain = run(make_core(ling), prompts, sampling)
    assert run(make_core(ling, head, (3, 2, 6)), prompts, sampling) == plain
    with closing(make_core(ling, tensor_parallel_size=2)) as core:
        assert run(core, prompts, sampling) == plain
