"""The numbers that size the layers of a decoder, of what config.json says."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle_rt.cache.pool import RowShape
from eagle_rt.kernels.gate import SWIGLU, Gate
from eagle_rt.models.rope import RopeSpec, warmth


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
    values_as_keys: values are made by what makes keys; shares_rows: neither are made, those that another layer keeps are seen.
    score_scale: what scores are multiplied with, if not 1 / sqrt(head_dim). latent: of attention over latents, which are what all
    heads see: there is one head of keys, of as many numbers as are kept."""

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
    shares_rows: bool = False
    score_scale: float | None = None
    latent: LatentShape | None = None

    @property
    def row(self) -> RowShape:
        """What the cache keeps of a token."""
        if self.latent is None:
            return RowShape(self.num_kv_heads, self.head_dim, scale=self.score_scale)
        return RowShape(self.num_kv_heads, self.head_dim, self.latent.rank, self.latent.scale)


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


def latent_shape(config: dict[str, Any], rope: RopeSpec) -> LatentShape:
    sizes = (config[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    in_pairs = config.get("rope_interleave", True)
    shape = LatentShape(*sizes, query_rank=config.get("q_lora_rank"), scale=1.0, in_pairs=in_pairs)
    # YaRN's temperature is for all of a key, and not for what is turned alone.
    mscale = rope.parameters.get("mscale_all_dim") if rope.kind == "yarn" else None
    stretch = warmth(rope.parameters["factor"], mscale) if mscale else 1.0
    return replace(shape, scale=shape.query_dim**-0.5 * stretch**2)


def gemma4_shapes(config: dict[str, Any], shape: LayerShape, windows: Sequence[int | None]) -> tuple[LayerShape, ...]:
    """Of each layer: those without a window have other heads, and the last may see what the others keep.

    Raises:
        ValueError: as `gemma4_global_shape`.
    """
    global_shape, num_sharing = gemma4_global_shape(config, shape), config.get("num_kv_shared_layers") or 0
    shapes = [shape if window else global_shape for window in windows]
    first = len(shapes) - num_sharing
    width = shape.intermediate_size * (2 if config.get("use_double_wide_mlp") else 1)
    return (*shapes[:first], *(replace(own, shares_rows=True, intermediate_size=width) for own in shapes[first:]))


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


def row_layers(shapes: Sequence[LayerShape], windows: Sequence[int | None]) -> tuple[int, ...]:
    """Of each layer the one whose keys and values it sees: itself, or the last before it that is like it and keeps some.

    Raises:
        ValueError: there is none.
    """
    found, keeps = [], {}
    for layer, (shape, window) in enumerate(zip(shapes, windows, strict=True)):
        if not shape.shares_rows:
            keeps[window] = layer
        elif window not in keeps:
            raise ValueError(f"num_kv_shared_layers in config.json leaves no layer whose keys and values layer {layer} could see")
        found.append(keeps[window])
    return tuple(found)
