"""Small DFlash and DSpark heads with exactly the tensor names, dtypes and config fields of each published layout, next to their
slow twins."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from family_configs import VOCAB_SIZE
from head_layouts import DRAFT_VOCAB, HEAD_DIM, HIDDEN, MASK_TOKEN, Maker, Written, base_config, layer_tensors, save, target_tensors
from models.slow_blocks import SlowBlocks
from models.slow_head import HeadParts

BLOCK_SIZE = 8
# Inputs of these layers, which are the outputs of those before them.
LAYERS = (2, 4, 6)
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class BlockOptions:
    """What sets heads apart: fields of their config and, where these do not say so, of `dflash_config`."""

    config: dict[str, Any]
    own: dict[str, Any]
    types: tuple[str, ...] = (FULL, FULL)
    is_nested: bool = False
    pair_rank: int = 0
    is_shifted: bool = False

    @property
    def has_own_outputs(self) -> bool:
        """And embeddings."""
        return self.is_nested or "DSpark" in self.config.get("architectures", [""])[0]


DFLASH_LAYOUTS = {
    # z-lab's first heads: Qwen3 and Llama 3.1
    "dflash": BlockOptions({"block_size": BLOCK_SIZE}, {"mask_token_id": MASK_TOKEN}),
    # those of Qwen3.5 and 3.6
    "dflash-windows": BlockOptions(
        {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 6},
        {"mask_token_id": MASK_TOKEN, "block_size": BLOCK_SIZE},
        types=(SLIDING, FULL, SLIDING),
    ),
    # a target whose embeddings and logits are scaled
    "dflash-scaled": BlockOptions(
        {"is_causal": False, "layer_types": [SLIDING] * 2, "sliding_window": 9},
        {
            "mask_token_id": MASK_TOKEN,
            "block_size": BLOCK_SIZE,
            "input_embedding_scale": 1.5,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 2.0,
        },
        types=(SLIDING, SLIDING),
    ),
    "dflash-speculators": BlockOptions(
        {"block_size": BLOCK_SIZE, "mask_token_id": MASK_TOKEN, "speculators_model_type": "dflash"}, {}, is_nested=True
    ),
    # DeepSeek's for Qwen3
    "dspark": BlockOptions(
        {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": BLOCK_SIZE - 1,
            "mask_token_id": MASK_TOKEN,
            "markov_rank": 16,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
        },
        {},
        pair_rank=16,
        is_shifted=True,
    ),
    "dspark-speculators": BlockOptions(
        {"block_size": BLOCK_SIZE - 1, "mask_token_id": MASK_TOKEN, "speculators_model_type": "dspark", "markov_rank": 16},
        {},
        is_nested=True,
        pair_rank=16,
        is_shifted=True,
    ),
    # both: DFlash's places, and pairs
    "dflash-pairs": BlockOptions({"block_size": BLOCK_SIZE, "markov_rank": 8}, {"mask_token_id": MASK_TOKEN}, pair_rank=8),
}


def write_block_head(name: str, directory: Path, target_dir: Path) -> Written:
    o, make = DFLASH_LAYOUTS[name], Maker(torch.bfloat16)
    embedding, lm_head = target_tensors(target_dir)
    used = make.draft_vocabulary() if o.is_nested else None
    parts = HeadParts(
        kind="DFLASH",
        embedding=make.matrix(VOCAB_SIZE, HIDDEN) if o.has_own_outputs else embedding,
        layers=[make.layer(HIDDEN, input_norm=make.norm()) for _ in o.types],
        lm_head=make.matrix(DRAFT_VOCAB if used is not None else VOCAB_SIZE, HIDDEN) if o.has_own_outputs else lm_head,
        head_dim=HEAD_DIM,
        fc=make.matrix(HIDDEN, len(LAYERS) * HIDDEN),
        hidden_norm=make.norm(),
        final_norm=make.norm(),
        target_ids=used,
        rope_theta=1e6,
    )
    head_norms = [(make.norm(HEAD_DIM), make.norm(HEAD_DIM)) for _ in o.types]
    tensors = {"fc.weight": parts.fc, "hidden_norm.weight": parts.hidden_norm, "norm.weight": parts.final_norm}
    for index, (layer, (query_norm, key_norm)) in enumerate(zip(parts.layers, head_norms, strict=True)):
        prefix = f"layers.{index}."
        tensors |= layer_tensors(layer, prefix) | {
            f"{prefix}input_layernorm.weight": layer.input_norm,
            f"{prefix}self_attn.q_norm.weight": query_norm,
            f"{prefix}self_attn.k_norm.weight": key_norm,
        }
    pairs = None
    if o.pair_rank:
        pairs = make.matrix(VOCAB_SIZE, o.pair_rank, 0.5), make.matrix(len(parts.lm_head), o.pair_rank, 0.5)
        tensors |= {"markov_head.markov_w1.weight": pairs[0], "markov_head.markov_w2.weight": pairs[1]}
        tensors |= {
            "confidence_head.proj.weight": make.matrix(1, HIDDEN + o.pair_rank),
            "confidence_head.proj.bias": make.vector(1),
        }
    if o.has_own_outputs:
        tensors |= {"embed_tokens.weight": parts.embedding, "lm_head.weight": parts.lm_head}
    config = base_config(num_hidden_layers=len(o.types), head_dim=HEAD_DIM, rope_theta=1e6, model_type="qwen3", **o.config)
    if used is not None:
        is_used = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        is_used[used] = True
        tensors |= {"d2t": used - torch.arange(len(used)), "t2d": is_used}
        config = nested(config | {"aux_hidden_state_layer_ids": list(LAYERS), "draft_vocab_size": DRAFT_VOCAB})
    else:
        config |= {"num_target_layers": 8, **o.config}
        own = {**o.own, "target_layer_ids": [layer - 1 for layer in LAYERS]}
        config |= own if o.has_own_outputs else {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    save(directory, tensors, config, torch.bfloat16, pickled=False)
    is_causal = [kind == SLIDING and o.config.get("is_causal", True) for kind in o.types]
    slow = SlowBlocks(
        parts,
        MASK_TOKEN,
        windows=[o.config["sliding_window"] if kind == SLIDING else None for kind in o.types],
        is_causal=is_causal,
        head_norms=head_norms,
        embedding_scale=o.own.get("input_embedding_scale", 1.0),
        logit_scale=o.own.get("output_multiplier", 1.0),
        logit_cap=o.own.get("final_logit_softcapping"),
        is_shifted=o.is_shifted,
        pairs=pairs,
    )
    return Written(directory, slow, LAYERS)


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """The form of the speculators library."""
    outside = {
        "aux_hidden_state_layer_ids",
        "draft_vocab_size",
        "block_size",
        "mask_token_id",
        "markov_rank",
        "speculators_model_type",
    }
    return {
        "architectures": ["DSparkDraftModel" if config["speculators_model_type"] == "dspark" else "DFlashDraftModel"],
        "transformer_layer_config": {name: value for name, value in config.items() if name not in outside},
        **{name: value for name, value in config.items() if name in outside},
    }
