"""A target that hardly looks past the last token, and a head that foresees it: what is accepted changes with every step."""

import json
from pathlib import Path
from typing import Any

import checkpoints
import family_configs
import torch
from engines import Tree, make_core
from safetensors.torch import save_file

from eagle_rt.engine.core import EngineCore

QUIET = ("o_proj.weight", "down_proj.weight", "out_proj.weight")


def write_guessable(directory: Path, name: str, loudness: float = 0.2, **overrides) -> Path:
    """A target of this family whose layers add little to what they read, so that a token tells most of what comes next."""
    model = checkpoints.random_model(family_configs.family_config(name, **{"initializer_range": 0.15, **overrides}))
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if own.endswith(QUIET):
                parameter *= loudness
    model.save_pretrained(directory)
    checkpoints.byte_tokenizer().save_pretrained(directory)
    return directory


def write_pair(directory: Path, name: str, **overrides: Any) -> tuple[Path, Path]:
    """Such a target and such a head."""
    target = write_guessable(directory / "target", name, **overrides)
    return target, write_guesser(directory / "head", target)


def make_drafting(pair: tuple[Path, Path], tree: Tree = (4, 3, 12), **options: Any) -> EngineCore:
    return make_core(*pair, tree, **{"speculative_algorithm": "EAGLE", **options})


def write_guesser(directory: Path, target_dir: Path) -> Path:
    """An EAGLE head for it that passes on the embedding of the token."""
    directory.mkdir(parents=True, exist_ok=True)
    model = checkpoints.transformers_model(target_dir)
    size, kept = model.config.hidden_size, {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config = family_configs.family_config("llama").to_dict() | kept
    norm = model.model.norm.weight + (1 if model.config.model_type.startswith("qwen3_5") else 0)
    layer = {
        "self_attn.q_proj": (size, size),
        "self_attn.k_proj": (size // 2, size),
        "self_attn.v_proj": (size // 2, size),
        "self_attn.o_proj": (size, size),
        "mlp.gate_proj": (96, size),
        "mlp.up_proj": (96, size),
        "mlp.down_proj": (size, 96),
    }
    tensors = {f"layers.0.{own}.weight": torch.zeros(shape) for own, shape in layer.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(size)
    tensors["fc.weight"] = torch.cat((norm.diag(), torch.zeros(size, size)), dim=1).contiguous()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory
