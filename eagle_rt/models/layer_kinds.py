"""What kind each layer of a decoder is, of what config.json says: how far back it sees, which experts it has, and whether it
remembers a text instead of looking back at it."""

from dataclasses import dataclass
from typing import Any

from eagle_rt.kernels.delta_net import DeltaNetShape
from eagle_rt.kernels.experts import Mixing
from eagle_rt.kernels.gate import SWIGLU, Gate
from eagle_rt.models.families import GEMMA4S, HYBRIDS, MIXINGS, architecture_of


@dataclass(frozen=True)
class ExpertShape:
    """A feed-forward part of `count` experts, beside those that all tokens share, and how tokens take some. beside_gate: they
    stand beside a feed-forward part of one gate, and not in its place."""

    count: int
    intermediate_size: int
    mixing: Mixing
    beside_gate: bool = False


def has_gate(experts: ExpertShape | None) -> bool:
    """Whether a layer with these experts, or with none, has a feed-forward part of one gate."""
    return experts is None or experts.beside_gate


def layer_experts(config: dict[str, Any]) -> tuple[ExpertShape | None, ...]:
    """Of Qwen3 some layers may have none, of GLM the first, and Llama 4 may name those that have some.

    Raises:
        ValueError: as `expert_shape`.
    """
    num_layers, shape = config["num_hidden_layers"], expert_shape(config)
    if kinds := config.get("mlp_layer_types"):
        return tuple(shape if kind == "sparse" else None for kind in kinds)
    if with_experts := config.get("moe_layers"):
        return tuple(shape if layer in with_experts else None for layer in range(num_layers))
    first = config.get("first_k_dense_replace", 0)
    without, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    return tuple(None if layer < first or layer in without or (layer + 1) % every else shape for layer in range(num_layers))


def expert_shape(config: dict[str, Any]) -> ExpertShape | None:
    """Of Mixtral and gpt-oss, whose sizes are those of other models' one feed-forward part, of Qwen3, of GLM and Llama 4, where
    tokens share some, and of Qwen3-Next and 3.5, where a gate says how much these count; None if there are no experts.

    Raises:
        ValueError: more are to be taken than there are, or there are no such groups of them; or the shared ones are of another
            size.
    """
    name = architecture_of(config)
    count = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if not count or config.get("enable_moe_block") is False:
        return None
    size = config.get("moe_intermediate_size")
    normalizes = config.get("norm_topk_prob", False) or config.get("model_type") == "qwen3_vl_moe_text"
    if size is None:
        size, normalizes = config["intermediate_size"], True
    top_k, gate = config["num_experts_per_tok"], SWIGLU
    if not 1 <= top_k <= count:
        raise ValueError(f"num_experts_per_tok is {top_k}, but config.json names {count} experts")
    if name == "GptOssForCausalLM":
        gate = Gate(config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0), shift=1.0)
    mixing = Mixing(top_k, normalizes, gate)
    if "n_routed_experts" in config:
        scale, num_shared = config["routed_scaling_factor"], config["n_shared_experts"] or 0
        mixing = mixing._replace(by_sigmoid=True, scale=scale, num_shared=num_shared, **expert_groups(config, count))
    mixing = mixing._replace(**MIXINGS.get(name, {}))
    if shared_size := config.get("shared_expert_intermediate_size"):
        if shared_size % size:
            raise ValueError(f"shared_expert_intermediate_size {shared_size} in config.json is no multiple of the experts' {size}")
        mixing = mixing._replace(num_shared=shared_size // size, gates_shared=True)
    return ExpertShape(count, size, mixing, beside_gate=name in GEMMA4S)


def expert_groups(config: dict[str, Any], count: int) -> dict[str, int]:
    """Those of DeepSeek's large models: experts are taken from the best only."""
    num_groups, top_groups = config.get("n_group") or 1, config.get("topk_group") or 1
    if num_groups == 1 or config.get("topk_method") == "greedy":
        return {}
    if count % num_groups or not 1 <= top_groups <= num_groups or top_groups * count // num_groups < config["num_experts_per_tok"]:
        raise ValueError(
            f"{config['num_experts_per_tok']} of {count} experts cannot be taken from {top_groups} of {num_groups} groups "
            "(num_experts_per_tok, n_routed_experts, topk_group and n_group in config.json)"
        )
    return {"num_groups": num_groups, "top_groups": top_groups}


def layer_delta_nets(config: dict[str, Any], name: str) -> tuple[DeltaNetShape | None, ...]:
    num_layers = config["num_hidden_layers"]
    if name not in HYBRIDS:
        return (None,) * num_layers
    sizes = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    shape, every = DeltaNetShape(*(config[f"linear_{size}"] for size in sizes)), config["full_attention_interval"]
    if shape.num_heads % shape.num_key_heads:
        raise ValueError(f"linear_num_value_heads is {shape.num_heads} in config.json, not a multiple of {shape.num_key_heads}")
    types = config.get("layer_types") or ["linear_attention" if (layer + 1) % every else "" for layer in range(num_layers)]
    return tuple(shape if kind == "linear_attention" else None for kind in types)


def layer_windows(config: dict[str, Any], applies_by_default: bool | None) -> tuple[int | None, ...]:
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window")
    if not window or applies_by_default is None or not config.get("use_sliding_window", applies_by_default):
        return (None,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types:
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    pattern = config.get("sliding_window_pattern")
    if pattern:
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    first_windowed = config.get("max_window_layers", 0)
    return tuple(window if layer >= first_windowed else None for layer in range(num_layers))


def longest_llama4_text(config: dict[str, Any]) -> int:
    """That lies in one chunk of those within which most layers see, and whose queries are scaled in none."""
    scaled_from = config["floor_scale"] if config["attn_temperature_tuning"] else None
    limits = config["max_position_embeddings"], config["attention_chunk_size"], scaled_from and scaled_from - 1
    return min(filter(None, limits))


def llama4_windows(config: dict[str, Any], longest: int) -> tuple[int | None, ...]:
    """The layers that turn queries and keys have windows, of all of a text; those without turn nothing."""
    num_layers, every = config["num_hidden_layers"], config["no_rope_layer_interval"]
    turns = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(num_layers)]
    return tuple(longest if own else None for own in turns)
