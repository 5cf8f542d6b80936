"""Small targets that hold a layer of their own which drafts, as published ones do, next to its slow twin."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import NO_NEAR_TIES, byte_tokenizer, random_model
from family_configs import family_config
from head_layouts import FINAL, HEAD_DIM, HIDDEN, Maker, Written, layer_tensors, target_tensors
from models.slow_head import HeadParts, SlowHead
from safetensors.torch import load_file, save_file
from torch import Tensor


def mtp_parts(directory: Path, make: Maker, **own: Any) -> HeadParts:
    """Of a layer beside the target in a directory."""
    embedding, lm_head = target_tensors(directory)
    return HeadParts(
        kind="MTP",
        embedding=embedding,
        lm_head=lm_head,
        fc=make.matrix(HIDDEN, 2 * HIDDEN),
        embedding_norm=make.norm(),
        hidden_norm=make.norm(),
        final_norm=make.norm(),
        recursion_is_normed=True,
        **own,
    )


def add_to_target(directory: Path, prefix: str, tensors: dict[str, Tensor]) -> None:
    """Tensors by names behind a prefix."""
    own = {prefix + name: tensor for name, tensor in tensors.items()}
    save_file(load_file(directory / "model.safetensors") | own, directory / "model.safetensors", metadata={"format": "pt"})


def write_mimo(directory: Path) -> Written:
    """A MiMo checkpoint: a Qwen2 decoder under its own architecture's name, and one multi-token-prediction layer."""
    random_model(family_config("qwen2")).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    assert config["hidden_size"] == HIDDEN
    make = Maker()
    layer = make.layer(HIDDEN, input_norm=make.norm(), **make.biases())
    own = {"hidden_first": True, "first_row_has_no_token": True, "eps": config["rms_norm_eps"]}
    parts = mtp_parts(directory, make, layers=[layer], head_dim=HEAD_DIM, **own)
    tensors = layer_tensors(layer, "") | {
        "token_layernorm.weight": parts.embedding_norm,
        "hidden_layernorm.weight": parts.hidden_norm,
        "final_layernorm.weight": parts.final_norm,
        "input_layernorm.weight": layer.input_norm,
        "input_proj.weight": parts.fc,
    }
    add_to_target(directory, "model.mtp_layers.0.", tensors)
    return Written(directory, SlowHead(parts), (FINAL,))


def layer_of_another(directory: Path, config: Any) -> tuple[Callable[[Tensor], Tensor], dict[str, Tensor]]:
    """The last layer of another model, as transformers runs it, and its tensors by their names within the layer."""
    other = random_model(config, seed=12).model
    layer = other.layers[-1]

    @torch.inference_mode()
    def run_layer(x: Tensor) -> Tensor:
        length = len(x)
        angles = other.rotary_emb(x[None], torch.arange(length)[None])
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        return layer(x[None], attention_mask=mask, position_embeddings=angles)[0]

    other.save_pretrained(directory / "other")
    last = f"layers.{config.num_hidden_layers - 1}."
    stored = load_file(directory / "other" / "model.safetensors")
    return run_layer, {name.partition(last)[2]: tensor for name, tensor in stored.items() if last in name}


def write_nextn(directory: Path, name: str = "glm4-moe") -> Written:
    """A checkpoint of GLM-4.5's or DeepSeek-V3's kind: behind its eight layers one for multi-token prediction, with experts, and
    copies of the embeddings and the output layer."""
    config = family_config(name)
    random_model(config, NO_NEAR_TIES.get(name, 0)).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    run_layer, tensors = layer_of_another(directory, config)
    own = {"whole_layer": run_layer, "eps": config.rms_norm_eps}
    parts = mtp_parts(directory, Maker(), layers=[], head_dim=config.head_dim, **own)
    tensors |= {
        "enorm.weight": parts.embedding_norm,
        "hnorm.weight": parts.hidden_norm,
        "eh_proj.weight": parts.fc,
        "shared_head.norm.weight": parts.final_norm,
        "embed_tokens.weight": parts.embedding.clone(),
        "shared_head.head.weight": parts.lm_head.clone(),
    }
    add_to_target(directory, f"model.layers.{config.num_hidden_layers}.", tensors)
    return Written(directory, SlowHead(parts), (FINAL,))


def write_qwen3_5(directory: Path, name: str = "qwen3.5") -> Written:
    """A Qwen3.5 checkpoint: one layer for multi-token prediction beside the others, which has attention, with gates."""
    config = family_config(name)
    random_model(config, NO_NEAR_TIES.get(name, 0)).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    run_layer, layer = layer_of_another(directory, config)
    own = {"whole_layer": run_layer, "eps": config.rms_norm_eps}
    parts = mtp_parts(directory, Maker(), layers=[], head_dim=config.head_dim, **own)
    tensors = {f"layers.0.{own}": tensor for own, tensor in layer.items()} | {
        "pre_fc_norm_embedding.weight": parts.embedding_norm - 1,
        "pre_fc_norm_hidden.weight": parts.hidden_norm - 1,
        "norm.weight": parts.final_norm - 1,
        "fc.weight": parts.fc,
    }
    add_to_target(directory, "mtp.", tensors)
    return Written(directory, SlowHead(parts), (FINAL,))
