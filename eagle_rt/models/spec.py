"""What a checkpoint's config.json says about a decoder. Families are flags, see `families.py`."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle_rt.cache.pool import RowShape
from eagle_rt.kernels.delta_net import DeltaNetShape
from eagle_rt.kernels.gate import GEGLU, SWIGLU, Gate
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
from eagle_rt.models.quantized import Storage, storage_of
from eagle_rt.models.rope import RopeSpec, ropes_from_config, warmth
from eagle_rt.resolve import DTYPES

GATES = {"silu": SWIGLU, "gelu_pytorch_tanh": GEGLU}


@dataclass(frozen=True)
class LatentShape:
    """Attention over latents (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1): of every token `rank` numbers are kept for all heads,
    which make keys of nope_dim numbers and values of value_dim of them, and a key of rope_dim numbers that is turned by its
    position. query_rank: of what queries are made of; None: of the layer's input. scale: of scores. in_pairs: the two numbers that
    are turned together are stored side by side."""

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None
    scale: float
    in_pairs: bool

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class LayerShape:
    """The numbers that size one attention and feed-forward block; target layers and head layers share them. gates_attention: what
    attention gives is multiplied with gates of its input's; norms_all_heads: norms of queries and keys are over all heads;
    norms_turned: where they are turned they are normed, by norms that have no weights; norms_values: values are, by such.
    values_as_keys: values are made by what makes keys. score_scale: what scores are multiplied with, if not 1 / sqrt(head_dim).
    latent: of attention over latents, which are what all heads see: there is one head of keys, of as many numbers as are kept."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    gate: Gate = SWIGLU
    gates_attention: bool = False
    norms_all_heads: bool = False
    norms_turned: bool = False
    norms_values: bool = False
    values_as_keys: bool = False
    score_scale: float | None = None
    latent: LatentShape | None = None

    @property
    def row(self) -> RowShape:
        """What the cache keeps of a token."""
        if self.latent is None:
            return RowShape(self.num_kv_heads, self.head_dim, scale=self.score_scale)
        return RowShape(self.num_kv_heads, self.head_dim, self.latent.rank, self.latent.scale)


@dataclass(frozen=True)
class ModelSpec:
    """windows: per layer, how far back a query sees, or None; experts: per layer, those of its feed-forward part, or None;
    delta_nets: per layer, what stands in attention's place, or None; dtype: the one the checkpoint was saved in; storage: how its
    weights are stored, if not as they are.

    window_rope: of layers with a window, if they have one of their own; global_shape: of those without, if they do. longest_text:
    that is served, where longer ones need what is not supported: attention within chunks of a text, and scaled queries besides.
    embedding_scale: what embeddings are multiplied by; query_scale: what queries are, besides what attention takes them by.
    logit_cap: what logits stay below: it is multiplied with the hyperbolic tangents of their parts of it.
    """

    architecture: str
    shape: LayerShape
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
    global_shape: LayerShape | None = None
    longest_text: int | None = None
    embedding_scale: float = 1.0
    query_scale: float = 1.0
    logit_cap: float | None = None

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """Of each layer its own."""
        return tuple(self.shape if window else self.global_shape or self.shape for window in self.windows)

    def shape_of(self, name: str) -> LayerShape:
        """That of the layer to which a tensor of this name belongs."""
        own = re.search(r"\.layers\.(\d+)\.", name)
        return self.layer_shapes[int(own[1])] if own else self.shape

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


def layer_shape(config: dict[str, Any]) -> LayerShape:
    num_heads = config["num_attention_heads"]
    return LayerShape(
        hidden_size=config["hidden_size"],
        # Where all layers have experts there may be no other.
        intermediate_size=config.get("intermediate_size") or config["moe_intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
    )


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
    global_shape = gemma4_global_shape(config, shape) if name in GEMMA4S else None
    if rotary_dim := config.get("rotary_dim"):
        config = {"partial_rotary_factor": rotary_dim / shape.head_dim} | config
    head_dim = config["qk_rope_head_dim"] if name in LATENTS else shape.head_dim
    rope, window_rope = ropes_from_config(config, head_dim, global_shape and global_shape.head_dim)
    if name in LATENTS:
        latent = latent_shape(config, rope)
        shape = replace(shape, num_kv_heads=1, head_dim=latent.rank + latent.rope_dim, latent=latent)
    windows, longest = layer_windows(config, FAMILIES[family]), None
    if name in LLAMA4S:
        longest = longest_llama4_text(config)
        windows = llama4_windows(config, longest)
        rope, window_rope = replace(rope, kind="default", rotary_dim=0), rope
    return ModelSpec(
        architecture=name,
        shape=shape,
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
        global_shape=global_shape,
        longest_text=longest,
        embedding_scale=shape.hidden_size**0.5 if name in GEMMAS else 1.0,
        query_scale=(shape.head_dim / config.get("query_pre_attn_scalar", shape.head_dim)) ** 0.5,
        logit_cap=config.get("final_logit_softcapping"),
    )


def gemma4_global_shape(config: dict[str, Any], shape: LayerShape) -> LayerShape:
    """Of layers without a window, whose heads are others: in published configs they have settings of their own, in those that
    transformers writes each layer has.

    Raises:
        ValueError: these layers differ from each other, or some with a window do from the others.
    """
    own = {"head_dim": config["global_head_dim"]}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        own["num_kv_heads"] = config["num_global_key_value_heads"]
    of_layers = config.get("per_layer_config")
    if of_layers is not None:
        settings = next(iter(of_layers.values()), {})
        if of_layers and of_layers != {
            str(layer): settings for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention"
        }:
            raise ValueError(
                "per_layer_config in config.json is not supported: it makes others of more than layers without a window"
            )
        names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
        own = {name: settings[given] for given, name in names.items() if given in settings}
    return replace(shape, values_as_keys=bool(config.get("attention_k_eq_v")), **own)


def latent_shape(config: dict[str, Any], rope: RopeSpec) -> LatentShape:
    sizes = (config[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    in_pairs = config.get("rope_interleave", True)
    shape = LatentShape(*sizes, query_rank=config.get("q_lora_rank"), scale=1.0, in_pairs=in_pairs)
    # YaRN's temperature is for all of a key, and not for what is turned alone.
    mscale = rope.parameters.get("mscale_all_dim") if rope.kind == "yarn" else None
    stretch = warmth(rope.parameters["factor"], mscale) if mscale else 1.0
    return replace(shape, scale=shape.query_dim**-0.5 * stretch**2)
