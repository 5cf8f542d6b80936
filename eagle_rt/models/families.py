"""The architectures that are served, by the names that config.json has for them, and what each takes for granted."""

from typing import Any

from eagle_rt.kernels.gate import GEGLU

# Architectures, and whether the config's `sliding_window` applies where `use_sliding_window` is not set (None: it never does).
# Everything else in which they differ (biases, norms on queries and keys) is read off the tensors in the file.
FAMILIES = {
    "LlamaForCausalLM": None,
    "MistralForCausalLM": True,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": False,
    "MiMoForCausalLM": False,
    "MixtralForCausalLM": True,
    "Qwen3MoeForCausalLM": False,
    "GptOssForCausalLM": True,
    "Phi3ForCausalLM": True,
    "HunYuanDenseV1ForCausalLM": None,
    "Gemma3ForCausalLM": True,
    "Glm4MoeForCausalLM": None,
    "Glm4MoeLiteForCausalLM": None,
    "DeepseekV2ForCausalLM": None,
    "DeepseekV3ForCausalLM": None,
    "Qwen3_5ForCausalLM": None,
    "Qwen3_5MoeForCausalLM": None,
    "Qwen3NextForCausalLM": None,
    "SeedOssForCausalLM": None,
    "MiniMaxM2ForCausalLM": None,
    "Ministral3ForCausalLM": True,
    "Glm4ForCausalLM": None,
    "Ernie4_5ForCausalLM": None,
    "Qwen2MoeForCausalLM": False,
    "BailingMoeV2ForCausalLM": None,
    "Llama4ForCausalLM": None,
    "Gemma4ForCausalLM": True,
    "Gemma4UnifiedForCausalLM": True,
}
# Models that see, too: the part of them that reads is served. What that is, and of which type its `text_config` may be (or all of
# its config.json, in which the first Qwen2.5-VL have it).
READING_PARTS = {
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", "mistral", "ministral3"),
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text"),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2ForCausalLM", "qwen2_5_vl_text", "qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", "qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3MoeForCausalLM", "qwen3_vl_moe_text"),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "Llama4ForConditionalGeneration": ("Llama4ForCausalLM", "llama4_text"),
    "Gemma4ForConditionalGeneration": ("Gemma4ForCausalLM", "gemma4_text"),
    "Gemma4UnifiedForConditionalGeneration": ("Gemma4UnifiedForCausalLM", "gemma4_unified_text"),
}
GEMMA3S = "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"
GEMMA4S = tuple(f"Gemma4{kind}For{task}" for kind in ("", "Unified") for task in ("CausalLM", "ConditionalGeneration"))
GEMMAS = *GEMMA3S, *GEMMA4S
LLAMA4S = "Llama4ForCausalLM", "Llama4ForConditionalGeneration"
# Of their layers attention is over latents.
LATENTS = "Glm4MoeLiteForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
# The layer for multi-token prediction stands behind the others.
NEXTN = "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM"
# Of their layers most have memories, and attention in the others has gates.
HYBRIDS = (
    "Qwen3NextForCausalLM",
    *(f"Qwen3_5{experts}For{kind}" for experts in ("", "Moe") for kind in ("CausalLM", "ConditionalGeneration")),
)
# Of their queries all heads are normed together, and so are those of their keys.
NORMS_ALL_HEADS = ("MiniMaxM2ForCausalLM",)
# The two numbers of a head that are turned together are stored side by side.
IN_TURNS = "Glm4ForCausalLM", "Ernie4_5ForCausalLM", *LLAMA4S
HYBRID = {"partial_rotary_factor": 0.25, "full_attention_interval": 4, "norm_topk_prob": True}
# What published configs leave out: transformers' defaults.
LEFT_OUT = {
    "Gemma3ForCausalLM": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "Gemma4ForCausalLM": {
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "global_head_dim": 512,
        "tie_word_embeddings": True,
    },
    "Gemma4UnifiedForCausalLM": {"global_head_dim": 512, "tie_word_embeddings": True},
    "Ernie4_5ForCausalLM": {"rope_theta": 500000.0, "tie_word_embeddings": True},
    "Glm4ForCausalLM": {"partial_rotary_factor": 0.5},
    "Glm4MoeForCausalLM": {"norm_topk_prob": True, "partial_rotary_factor": 0.5},
    "Glm4MoeLiteForCausalLM": {"norm_topk_prob": True, "first_k_dense_replace": 1},
    "DeepseekV2ForCausalLM": {"topk_method": "greedy"},
    "Qwen3NextForCausalLM": HYBRID,
    "Qwen3_5ForCausalLM": HYBRID,
    "Qwen3_5MoeForCausalLM": HYBRID,
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64},
    "Llama4ForCausalLM": {
        "rope_theta": 500000.0,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 131072,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "no_rope_layer_interval": 4,
    },
}
# What their configs call otherwise than others do that have the same.
RENAMED = {
    "BailingMoeV2ForCausalLM": {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    "Gemma4ForCausalLM": {"top_k_experts": "num_experts_per_tok"},
    "Llama4ForCausalLM": {
        "num_local_experts": "n_routed_experts",
        "intermediate_size": "moe_intermediate_size",
        "intermediate_size_mlp": "intermediate_size",
        "interleave_moe_layer_step": "decoder_sparse_step",
    },
}
# How their experts are mixed otherwise than others' whose configs say the same: fields of `kernels.experts.Mixing`.
MIXINGS = {
    "DeepseekV2ForCausalLM": {"by_sigmoid": False},
    "MiniMaxM2ForCausalLM": {"by_sigmoid": True},
    **{name: {"weighs_inputs": True} for name in LLAMA4S},
    **{name: {"normalizes": True, "gate": GEGLU} for name in GEMMA4S},
}
# What would make other models of these, were it set; Gemma 4's pictures are seen from both sides, which texts are not.
UNSUPPORTED = "attn_logit_softcapping", "use_bidirectional_attention"
HARMLESS = {"use_bidirectional_attention": "vision"}


def architecture_of(config: dict[str, Any]) -> str:
    return (config.get("architectures") or ["(none)"])[0]
