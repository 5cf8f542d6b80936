"""Small heads with exactly the tensor names, dtypes and config fields of each published layout, next to their slow twins."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from family_configs import VOCAB_SIZE
from models.slow_head import HeadParts, LayerParts, SlowHead
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
DRAFT_VOCAB = 160
MASK_TOKEN = 61  # of heads that draft in parallel
FINAL = -1  # the target's final norm, in place of a layer
DEFAULT_LAYERS = (2, 4, 5)  # of the eight that the tests' targets have

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass
class Written:
    """A head on disk, its twin, and which target layers' inputs feed it."""

    directory: Path
    slow: SlowHead
    feature_layers: tuple[int, ...]


class Maker:
    """Random parts, rounded to the dtype that the file will have."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 7) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float = 0.15) -> Tensor:
        return (torch.randn(rows, columns, generator=self.generator) * scale).to(self.dtype).float()

    def vector(self, size: int) -> Tensor:
        return (torch.randn(size, generator=self.generator) * 0.2).to(self.dtype).float()

    def norm(self, size: int = HIDDEN) -> Tensor:
        return (torch.rand(size, generator=self.generator) * 0.8 + 0.6).to(self.dtype).float()

    def layer(self, input_size: int, size: int = HIDDEN, head_dim: int = HEAD_DIM, **extra: Any) -> LayerParts:
        return LayerParts(
            q=self.matrix(HEADS * head_dim, input_size),
            k=self.matrix(KV_HEADS * head_dim, input_size),
            v=self.matrix(KV_HEADS * head_dim, input_size),
            o=self.matrix(size, HEADS * head_dim),
            gate=self.matrix(FFN, size),
            up=self.matrix(FFN, size),
            down=self.matrix(size, FFN),
            post_norm=self.norm(size),
            **extra,
        )

    def biases(self, head_dim: int = HEAD_DIM) -> dict[str, Tensor]:
        sizes = {"q_bias": HEADS * head_dim, "k_bias": KV_HEADS * head_dim, "v_bias": KV_HEADS * head_dim}
        return {name: self.vector(size) for name, size in sizes.items()}

    def draft_vocabulary(self) -> Tensor:
        return torch.randperm(VOCAB_SIZE, generator=self.generator)[:DRAFT_VOCAB].sort().values


def layer_tensors(layer: LayerParts, prefix: str) -> dict[str, Tensor]:
    tensors = {
        f"{prefix}self_attn.q_proj.weight": layer.q,
        f"{prefix}self_attn.k_proj.weight": layer.k,
        f"{prefix}self_attn.v_proj.weight": layer.v,
        f"{prefix}self_attn.o_proj.weight": layer.o,
        f"{prefix}mlp.gate_proj.weight": layer.gate,
        f"{prefix}mlp.up_proj.weight": layer.up,
        f"{prefix}mlp.down_proj.weight": layer.down,
        f"{prefix}post_attention_layernorm.weight": layer.post_norm,
    }
    for part, bias in (("q", layer.q_bias), ("k", layer.k_bias), ("v", layer.v_bias)):
        if bias is not None:
            tensors[f"{prefix}self_attn.{part}_proj.bias"] = bias
    return tensors


def base_config(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        **more,
    }


def save(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any], dtype: torch.dtype, *, pickled: bool) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous() for name, t in tensors.items()}
    if pickled:
        torch.save(stored, directory / "pytorch_model.bin")
    else:
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


def target_tensors(target_dir: Path) -> tuple[Tensor, Tensor]:
    weights = load_file(target_dir / "model.safetensors")
    return weights["model.embed_tokens.weight"].float(), weights["lm_head.weight"].float()


# EAGLE-1 and EAGLE-2


def eagle_parts(make: Maker, target_dir: Path, *, own_embedding: bool, fc_bias: bool, qkv_bias: bool, theta: float) -> HeadParts:
    embedding, lm_head = target_tensors(target_dir)
    return HeadParts(
        kind="EAGLE",
        embedding=make.matrix(VOCAB_SIZE, HIDDEN) if own_embedding else embedding,
        layers=[make.layer(HIDDEN, **(make.biases() if qkv_bias else {}))],
        lm_head=lm_head,
        head_dim=HEAD_DIM,
        fc=make.matrix(HIDDEN, 2 * HIDDEN, 0.07),  # without norms, larger states grow from pass to pass, and rounding with them
        fc_bias=make.vector(HIDDEN) if fc_bias else None,
        rope_theta=theta,
    )


def eagle_tensors(parts: HeadParts, prefix: str = "", *, own_embedding: bool) -> dict[str, Tensor]:
    assert parts.fc is not None
    tensors = {f"{prefix}fc.weight": parts.fc, **layer_tensors(parts.layers[0], f"{prefix}layers.0.")}
    if parts.fc_bias is not None:
        tensors[f"{prefix}fc.bias"] = parts.fc_bias
    if own_embedding:
        tensors[f"{prefix}embed_tokens.weight"] = parts.embedding
    return tensors


def eagle(
    directory: Path,
    target_dir: Path,
    *,
    fc_bias: bool = False,
    qkv_bias: bool = False,
    own_embedding: bool = True,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float16,
    pickled: bool = True,
    prefix: str = "",
    extra: Callable[[Path], dict[str, Tensor]] = lambda target_dir: {},
    wrap: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config,
    **config: Any,
) -> Written:
    make = Maker(dtype)
    parts = eagle_parts(make, target_dir, own_embedding=own_embedding, fc_bias=fc_bias, qkv_bias=qkv_bias, theta=theta)
    tensors = {**eagle_tensors(parts, prefix, own_embedding=own_embedding), **extra(target_dir)}
    save(directory, tensors, wrap(base_config(**config)), dtype, pickled=pickled)
    return Written(directory, SlowHead(parts), (FINAL,))


def lm_head_copy(target_dir: Path) -> dict[str, Tensor]:
    return {"lm_head.weight": target_tensors(target_dir)[1]}


EAGLE_LAYOUTS: dict[str, dict[str, Any]] = {
    "eagle-llama3": {"theta": 500000.0, "rope_theta": 500000.0, "bias": False, "torch_dtype": "float16"},
    "eagle-vicuna": {"fc_bias": True, "torch_dtype": "float16"},
    "eagle-qwen2": {"fc_bias": True, "qkv_bias": True, "theta": 1e6, "rope_theta": 1e6, "model_type": "qwen2"},
    "eagle-mixtral": {
        "fc_bias": True,
        "theta": 1e6,
        "rope_theta": 1e6,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "eagle-lmsys": {"architectures": ["LlamaForCausalLMEagle"], "bias": False},
    "eagle-vllm": {
        "fc_bias": True,
        "pickled": False,
        "extra": lm_head_copy,
        "wrap": lambda config: {"model_type": "eagle", "model": {**config, "eagle_fc_bias": True}},
    },
    "eagle-prefixed": {"prefix": "model.", "own_embedding": False, "pickled": False, "dtype": torch.bfloat16, "bias": False},
}


# EAGLE-3


@dataclass
class Eagle3Options:
    """What sets one publisher's EAGLE-3 heads apart; `config` are its further fields."""

    config: dict[str, Any]
    layers: tuple[int, ...] = DEFAULT_LAYERS
    dtype: torch.dtype = torch.bfloat16
    pickled: bool = False
    layer_name: str = "midlayer."
    own_embedding: bool = False
    own_lm_head: bool = True
    is_tied: bool = False
    has_map: bool = True
    hidden_size: int = HIDDEN
    head_dim: int = HEAD_DIM
    feature_norm_names: tuple[str, ...] = ()
    has_features_norm: bool = False
    residual_is_normed: bool = False
    recursion_is_normed: bool = False
    second_layer_norm: str | None = None
    mask_shape: tuple[int, ...] | None = None
    theta: float = 10000.0
    llama3_scaling: dict[str, Any] | None = None
    wrap: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config


def eagle3(directory: Path, target_dir: Path, o: Eagle3Options) -> Written:
    make = Maker(o.dtype)
    embedding, lm_head = target_tensors(target_dir)
    size = o.hidden_size
    used = make.draft_vocabulary() if o.has_map else None
    parts = HeadParts(
        kind="EAGLE3",
        embedding=make.matrix(VOCAB_SIZE, size) if o.own_embedding else embedding,
        layers=[make.layer(2 * size, size, o.head_dim)],
        lm_head=make.matrix(DRAFT_VOCAB if o.has_map else VOCAB_SIZE, size) if o.own_lm_head else lm_head,
        head_dim=o.head_dim,
        fc=None if o.layers == (FINAL,) else make.matrix(size, len(o.layers) * HIDDEN),
        embedding_norm=make.norm(size),
        hidden_norm=make.norm(size),
        final_norm=make.norm(size),
        feature_norms=[make.norm() for _ in o.feature_norm_names],
        all_features_norm=make.norm(len(o.layers) * HIDDEN) if o.has_features_norm else None,
        target_ids=used,
        residual_is_normed=o.residual_is_normed,
        recursion_is_normed=o.recursion_is_normed,
        rope_theta=o.theta,
        llama3_scaling=o.llama3_scaling,
    )
    assert parts.embedding_norm is not None
    assert parts.hidden_norm is not None
    assert parts.final_norm is not None
    tensors = {
        **layer_tensors(parts.layers[0], o.layer_name),
        f"{o.layer_name}input_layernorm.weight": parts.embedding_norm,
        f"{o.layer_name}hidden_norm.weight": parts.hidden_norm,
        "norm.weight": parts.final_norm,
    }
    if parts.fc is not None:
        tensors["fc.weight"] = parts.fc
    if o.own_lm_head:
        tensors["lm_head.weight"] = parts.lm_head
    if o.own_embedding:
        tensors["embed_tokens.weight"] = parts.embedding
    tensors |= dict(zip(o.feature_norm_names, parts.feature_norms, strict=True))
    if parts.all_features_norm is not None:
        tensors["input_norm.weight"] = parts.all_features_norm
    if o.is_tied:
        parts.lm_head = parts.embedding
    if o.second_layer_norm:
        second = make.layer(size, size, o.head_dim, input_norm=make.norm(size))
        parts.layers.append(second)
        prefix = o.layer_name.replace("0", "1")
        assert second.input_norm is not None
        tensors |= layer_tensors(second, prefix) | {f"{prefix}{o.second_layer_norm}.weight": second.input_norm}
    if o.mask_shape:
        features = make.matrix(1, len(o.layers) * HIDDEN, 1.0)
        parts.mask = MASK_TOKEN, features[0]
        tensors["mask_hidden"] = features.view(*o.mask_shape)
    if used is not None:
        is_used = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        is_used[used] = True
        tensors |= {"d2t": used - torch.arange(len(used)), "t2d": is_used}
    draft_vocab_size = DRAFT_VOCAB if o.has_map else VOCAB_SIZE
    config = base_config(hidden_size=size, draft_vocab_size=draft_vocab_size, num_hidden_layers=len(parts.layers))
    save(directory, tensors, o.wrap({**config, **o.config}), o.dtype, pickled=o.pickled)
    return Written(directory, SlowHead(parts), o.layers)


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """The form of the speculators library."""
    outside = {
        *("draft_vocab_size", "norm_before_residual", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"),
        *("speculators_model_type", "mask_token_id"),
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": {name: value for name, value in config.items() if name not in outside},
        **{name: value for name, value in config.items() if name in outside},
    }


EAGLE31 = {"fc_norm": True, "norm_output": True, "architectures": ["LlamaForCausalLMEagle3"]}
EAGLE3_LAYOUTS: dict[str, Eagle3Options] = {
    "eagle3-yuhuili": Eagle3Options({"torch_dtype": "float16"}, dtype=torch.float16, pickled=True),
    "eagle3-vicuna": Eagle3Options({}, dtype=torch.float16, pickled=True, has_map=False),
    "eagle3-specforge": Eagle3Options(
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3_SCALING,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        },
        theta=500000.0,
        llama3_scaling=LLAMA3_SCALING,
    ),
    "eagle3-angelslim": Eagle3Options({"head_dim": 32, "rope_theta": 1e6}, head_dim=32, theta=1e6),
    "eagle3-nvidia": Eagle3Options(
        {
            "draft_vocab_size": None,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "norm_before_fc": True,
                "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
            },
        },
        layers=(2, 5, 7),
        own_lm_head=False,
        has_map=False,
        has_features_norm=True,
    ),
    "eagle3-nvidia-short": Eagle3Options({"eagle_config": {"use_aux_hidden_state": False}}, layers=(FINAL,)),
    "eagle3-speculators": Eagle3Options(
        {"norm_before_residual": True, "target_hidden_size": HIDDEN, "eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
        layers=(2, 4, 6),
        layer_name="layers.0.",
        own_embedding=True,
        residual_is_normed=True,
        wrap=nested,
    ),
    "eagle3.1": Eagle3Options(
        EAGLE31, feature_norm_names=tuple(f"fc_norm.{part}.weight" for part in range(3)), recursion_is_normed=True
    ),
    "eagle3.1-legacy": Eagle3Options(
        {**EAGLE31, "fc_norm": None, "use_aux_norm": True},
        feature_norm_names=tuple(f"aux_norm_{part}.weight" for part in ("low", "mid", "high")),
        recursion_is_normed=True,
    ),
    "eagle3-narrow": Eagle3Options(
        {"target_hidden_size": HIDDEN, "head_dim": HEAD_DIM}, hidden_size=48, own_embedding=True, head_dim=HEAD_DIM
    ),
    "eagle3-tied": Eagle3Options(
        {"tie_word_embeddings": True}, own_embedding=True, own_lm_head=False, has_map=False, is_tied=True, dtype=torch.float16
    ),
    "eagle3-two-layers-sglang": Eagle3Options({}, layer_name="layers.0.", second_layer_norm="hidden_norm"),
    "eagle3-two-layers-vllm": Eagle3Options(
        {"norm_before_residual": False}, layer_name="layers.0.", second_layer_norm="input_layernorm", wrap=nested
    ),
    "p-eagle": Eagle3Options(
        {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": MASK_TOKEN},
        layer_name="layers.0.",
        second_layer_norm="input_layernorm",
        own_embedding=True,
        mask_shape=(3 * HIDDEN,),
    ),
    "p-eagle-speculators": Eagle3Options(
        {"norm_before_residual": True, "mask_token_id": MASK_TOKEN, "speculators_model_type": "peagle"},
        layer_name="layers.0.",
        has_features_norm=True,
        residual_is_normed=True,
        mask_shape=(1, 1, 3 * HIDDEN),
        wrap=nested,
    ),
}

LAYOUTS = (*EAGLE_LAYOUTS, *EAGLE3_LAYOUTS)


def served_as(kind: str) -> str:
    """The algorithm that a head of a kind that can be trained is served with."""
    return {"PEAGLE": "EAGLE3", "DSPARK": "DFLASH"}.get(kind, kind)


def write_head(name: str, directory: Path, target_dir: Path) -> Written:
    if name in EAGLE_LAYOUTS:
        return eagle(directory, target_dir, **EAGLE_LAYOUTS[name])
    return eagle3(directory, target_dir, EAGLE3_LAYOUTS[name])
