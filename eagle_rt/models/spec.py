"""What a checkpoint's config.json says about a decoder. Families are flags, see `families.py`."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle_rt.kernels.delta_net import DeltaNetShape
from eagle_rt.kernels.gate import GEGLU, SWIGLU
from eagle_rt.models.families import (
    FAMILIES,
    GEMMA4S,
    GEMMAS,
    HARMLESS,
    HYBRIDS,
    LATENTS,
    LEFT_OUT,
    LLAMA4S,
    NORMS_ALL_HEADS,
    READING_PARTS,
    RENAMED,
    UNSUPPORTED,
    architecture_of,
)
from eagle_rt.models.layer_kinds import (
    ExpertShape,
    layer_delta_nets,
    layer_experts,
    layer_windows,
    llama4_windows,
    longest_llama4_text,
)
from eagle_rt.models.layer_shape import LayerShape, gemma4_shapes, latent_shape, layer_shape, row_layers
from eagle_rt.models.quantized import Storage, storage_of
from eagle_rt.models.rope import RopeSpec, ropes_from_config
from eagle_rt.resolve import DTYPES

GATES = {"silu": SWIGLU, "gelu_pytorch_tanh": GEGLU}


@dataclass(frozen=True)
class LayerInputShape:
    """Of what each of vocab_size tokens brings to every layer, `size` numbers (Gemma 4's small models)."""

    size: int
    vocab_size: int


@dataclass(frozen=True)
class ModelSpec:
    """shape: of layers, if they are alike, and else of those with a window; row_layers: per layer, that whose keys and values it
    sees. windows: per layer, how far back a query sees, or None; experts: per layer, those of its feed-forward part, or None;
    delta_nets: per layer, what stands in attention's place, or None; dtype: the one the checkpoint was saved in; storage: how its
    weights are stored, if not as they are.

    window_rope: of layers with a window, if they have one of their own. layer_inputs: what tokens bring to each layer, if anything.
    longest_text: that is served, where longer ones need what is not supported: attention within chunks of a text, and scaled
    queries besides. embedding_scale: what embeddings are multiplied by; query_scale: what queries are, besides what attention
    takes them by. logit_cap: what logits stay below: it is multiplied with the hyperbolic tangents of their parts of it.
    """

    architecture: str
    shape: LayerShape
    layer_shapes: tuple[LayerShape, ...]
    row_layers: tuple[int, ...]
    num_layers: int
    vocab_size: int
    rope: RopeSpec
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: torch.dtype
    experts: tuple[ExpertShape | None, ...]
    delta_nets: tuple[DeltaNetShape | None, ...]
    storage: Storage | None = None
    window_rope: RopeSpec | None = None
    layer_inputs: LayerInputShape | None = None
    longest_text: int | None = None
    embedding_scale: float = 1.0
    query_scale: float = 1.0
    logit_cap: float | None = None

    def shape_of(self, name: str) -> LayerShape:
        """That of the layer to which a tensor of this name belongs."""
        own = re.search(r"\.layers\.(\d+)\.", name)
        return self.layer_shapes[int(own[1])] if own and int(own[1]) < self.num_layers else self.shape

    @property
    def usual_length(self) -> int:
        """Of the longest text that is served unless others are asked for: those need queries that are scaled."""
        return self.rope.trained_length if self.rope.query_growth else self.max_position_embeddings

    @property
    def delta_net(self) -> DeltaNetShape | None:
        """That of all layers which remember a text instead of looking back at it; None if all look back."""
        return next(filter(None, self.delta_nets), None)


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; what it says of a part that reads stands beside the rest.

    Raises:
        FileNotFoundError, ValueError: there is none, or it holds none.
    """
    file = model_dir / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: {model_dir} is not a Hugging Face checkpoint folder")
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): download it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds {config!r:.40} and no settings: download it again")
    return config | config.get("text_config", {}) if architecture_of(config) in READING_PARTS else config


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """The decoder that a config.json describes.

    Raises:
        ValueError: the architecture, its activation, its rope scaling or how its weights are stored is not supported, or something
            is missing.
    """
    name = architecture_of(config)
    family, *types = READING_PARTS.get(name, (name,))
    if family not in FAMILIES:
        raise ValueError(f"architecture {name} is not supported; supported are {', '.join((*FAMILIES, *READING_PARTS))}")
    if types and config.get("model_type") not in types:
        raise ValueError(f"the part of {name} that reads is of type {config.get('model_type')}, which is not {' or '.join(types)}")
    config = LEFT_OUT.get(family, {}) | config
    config |= {own: config[given] for given, own in RENAMED.get(family, {}).items() if given in config}
    unsupported = [own for own in UNSUPPORTED if config.get(own) and config[own] != HARMLESS.get(own)]
    if unsupported:
        raise ValueError(f"{unsupported[0]} {config[unsupported[0]]!r} in config.json is not supported")
    try:
        return spec_of_family(config, name, family)
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}, which {name} needs: download it again") from None


def spec_of_family(config: dict[str, Any], name: str, family: str) -> ModelSpec:
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if activation not in GATES:
        raise ValueError(f"activation {activation!r} is not supported; supported are {', '.join(GATES)}")
    shape = replace(
        layer_shape(config),
        gate=GATES[activation],
        gates_attention=name in HYBRIDS,
        norms_all_heads=name in NORMS_ALL_HEADS,
        norms_turned=name in LLAMA4S and config.get("use_qk_norm", True),
        norms_values=name in GEMMA4S,
        score_scale=1.0 if name in GEMMA4S else None,
    )
    if rotary_dim := config.get("rotary_dim"):
        config = {"partial_rotary_factor": rotary_dim / shape.head_dim} | config
    windows, longest = layer_windows(config, FAMILIES[family]), None
    shapes = gemma4_shapes(config, shape, windows) if name in GEMMA4S else (shape,) * config["num_hidden_layers"]
    head_dim = config["qk_rope_head_dim"] if name in LATENTS else shape.head_dim
    global_head_dims = {own.head_dim for own, window in zip(shapes, windows, strict=True) if not window}
    rope, window_rope = ropes_from_config(config, head_dim, next(iter(global_head_dims), None))
    if name in LATENTS:
        latent = latent_shape(config, rope)
        shape = replace(shape, num_kv_heads=1, head_dim=latent.rank + latent.rope_dim, latent=latent)
        shapes = (shape,) * len(shapes)
    if name in LLAMA4S:
        longest = longest_llama4_text(config)
        windows = llama4_windows(config, longest)
        rope, window_rope = replace(rope, kind="default", rotary_dim=0), rope
    return ModelSpec(
        architecture=name,
        shape=shape,
        layer_shapes=shapes,
        row_layers=row_layers(shapes, windows),
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        rope=rope,
        windows=windows,
        # Where two configs say it they disagree: an output layer that is there is used.
        tie_word_embeddings=config.get("tie_word_embeddings", False) and name not in READING_PARTS,
        max_position_embeddings=longest or config.get("max_position_embeddings", 2048),
        dtype=DTYPES.get(config.get("dtype") or config.get("torch_dtype") or "float32", torch.float32),
        experts=layer_experts(config),
        delta_nets=layer_delta_nets(config, name),
        storage=storage_of(config),
        window_rope=window_rope,
        layer_inputs=layer_inputs(config),
        longest_text=longest,
        embedding_scale=shape.hidden_size**0.5 if name in GEMMAS else 1.0,
        query_scale=(shape.head_dim / config.get("query_pre_attn_scalar", shape.head_dim)) ** 0.5,
        logit_cap=config.get("final_logit_softcapping"),
    )


def layer_inputs(config: dict[str, Any]) -> LayerInputShape | None:
    size = config.get("hidden_size_per_layer_input")
    return LayerInputShape(size, config["vocab_size_per_layer_input"]) if size else None
