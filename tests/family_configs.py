"""Tiny configs of every family that is served, in transformers' classes."""

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    HunYuanDenseV1Config,
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SeedOssConfig,
)

VOCAB_SIZE = 256 + 6
SIZES = dict(  # noqa: C408
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=3,
    # Large weights make a random model's choices depend on its context.
    initializer_range=0.15,
)
# With what they count as it is, where Mixtral's adds up to one.
QWEN3_EXPERTS = dict(  # noqa: C408
    head_dim=32, num_experts=12, num_experts_per_tok=4, moe_intermediate_size=32, norm_topk_prob=False
)
# Small enough a limit that gates are held to it.
GPT_OSS = dict(  # noqa: C408
    head_dim=32, num_local_experts=8, num_experts_per_tok=3, sliding_window=24, swiglu_limit=0.5
)
PHI3 = dict(pad_token_id=0, sliding_window=24)  # noqa: C408
TRAINED_LENGTH = 64
# Of a head's sixteen numbers twelve are turned.
PHI3_LONG = dict(  # noqa: C408
    pad_token_id=0,
    original_max_position_embeddings=TRAINED_LENGTH,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8],
        "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 9.0],
    },
)
# As Hunyuan's published configs say it.
NTK = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 20.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
# Of six layers the third and the last see all of a text.
GEMMA3 = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# Of a head's numbers half are turned.
GLM4_EXPERTS = {
    "head_dim": 32,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
# Attention over latents of 32 numbers, and a turned key of 16; not as many of a head's values as of its keys.
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
}
# What DeepSeek's published configs stretch by, and raise scores with.
STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": TRAINED_LENGTH,
}
# As Ministral 3's published configs stretch, of texts that may be longer; queries past the trained length are scaled.
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# Of a head's numbers half are turned; norms are over all heads.
MINIMAX = {
    "head_dim": 32,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "rotary_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
# Of a head's numbers half are turned, in pairs that lie side by side.
GLM4 = {
    "head_dim": 32,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
# Every third layer turns nothing; every second one has experts, of which a token takes one beside one that all share.
LLAMA4 = {
    "head_dim": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# Of eight layers the third, the sixth and the last see all of a text, with heads of their own, whose values are made as keys are.
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 2.0,
    "initializer_range": 0.1,
}
GEMMA4_EXPERTS = {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
# The last four layers see what others keep, and have twice the channels; tokens bring something to every layer.
GEMMA4_SMALL = {
    **GEMMA4,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
QWEN2_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
QWEN3_VL_EXPERTS = {"head_dim": 32, "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
# Three of four layers have memories; two heads of values share one of keys.
QWEN3_5 = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "initializer_range": 0.04,  # with more, rounding in the first layers is large in the last
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
QWEN3_5_EXPERTS = {
    **QWEN3_5,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
EYES = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
PLACES = {"rope_type": "default", "rope_theta": 10000.0}


def family_config(name: str, **overrides):
    """A tiny config of one family, by name; a name may carry a variant after a dash."""
    configs = {
        "llama": lambda: LlamaConfig(**{**SIZES, **overrides}),
        "llama-tied": lambda: LlamaConfig(**{**SIZES, "tie_word_embeddings": True, **overrides}),
        "llama-biased": lambda: LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True, **overrides}),
        "mistral": lambda: MistralConfig(**{**SIZES, "sliding_window": 24, **overrides}),
        "qwen2": lambda: Qwen2Config(**{**SIZES, **overrides}),
        "qwen2-window": lambda: Qwen2Config(
            **{**SIZES, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 4, **overrides}
        ),
        "qwen3": lambda: Qwen3Config(**{**SIZES, "head_dim": 32, **overrides}),
        "mixtral": lambda: MixtralConfig(**{**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, **overrides}),
        "qwen2-moe": lambda: Qwen2MoeConfig(**{**SIZES, **QWEN2_EXPERTS, **overrides}),
        "qwen3-moe": lambda: Qwen3MoeConfig(**{**SIZES, **QWEN3_EXPERTS, **overrides}),
        "qwen3-moe-mixed": lambda: Qwen3MoeConfig(
            **{**SIZES, **QWEN3_EXPERTS, "mlp_only_layers": [5], "decoder_sparse_step": 2, **overrides}
        ),
        "glm4": lambda: Glm4Config(**{**SIZES, **GLM4, **overrides}),
        "ernie4.5": lambda: Ernie4_5Config(**{**SIZES, "head_dim": 32, **overrides}),
        "llama4": lambda: Llama4TextConfig(**{**SIZES, **LLAMA4, **overrides}),
        "llama4-vl": lambda: Llama4Config(
            text_config={**SIZES, **LLAMA4, **overrides},
            vision_config={**EYES, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "projector_input_dim": 16},
        ),
        "glm4-moe": lambda: Glm4MoeConfig(**{**SIZES, **GLM4_EXPERTS, **overrides}),
        "glm4-moe-lite": lambda: Glm4MoeLiteConfig(**{**SIZES, **LATENTS, **overrides}),
        "deepseek-v2": lambda: DeepseekV2Config(**{**SIZES, **LATENTS, "q_lora_rank": None, **overrides}),
        "deepseek-v3": lambda: DeepseekV3Config(**{**SIZES, **LATENTS, "rope_parameters": STRETCHED, **overrides}),
        "phi3": lambda: Phi3Config(**{**SIZES, **PHI3, **overrides}),
        "phi3-long": lambda: Phi3Config(**{**SIZES, **PHI3_LONG, **overrides}),
        "hunyuan": lambda: HunYuanDenseV1Config(**{**SIZES, "head_dim": 32, "rope_parameters": NTK, **overrides}),
        "gpt-oss": lambda: GptOssConfig(**{**SIZES, **GPT_OSS, **overrides}),
        "seed-oss": lambda: SeedOssConfig(**{**SIZES, "head_dim": 32, **overrides}),
        "minimax-m2": lambda: MiniMaxM2Config(**{**SIZES, **MINIMAX, **overrides}),
        "qwen3.5": lambda: Qwen3_5TextConfig(**{**SIZES, **QWEN3_5, **overrides}),
        "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(**{**SIZES, **QWEN3_5_EXPERTS, **overrides}),
        "qwen3-next": lambda: Qwen3NextConfig(**{**SIZES, **QWEN3_5_EXPERTS, **overrides}),
        "gemma3": lambda: Gemma3TextConfig(**{**SIZES, **GEMMA3, **overrides}),
        "gemma3-vl": lambda: Gemma3Config(
            text_config={**SIZES, **GEMMA3, **overrides},
            vision_config={**EYES, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16},
            mm_tokens_per_image=16,
        ),
        "gemma4": lambda: Gemma4TextConfig(**{**SIZES, **GEMMA4, **overrides}),
        "gemma4-unified": lambda: Gemma4UnifiedTextConfig(
            **{**SIZES, **{name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"}, **overrides}
        ),
        "gemma4-small": lambda: Gemma4TextConfig(**{**SIZES, **GEMMA4_SMALL, **overrides}),
        "gemma4-moe": lambda: Gemma4TextConfig(**{**SIZES, **GEMMA4_EXPERTS, **overrides}),
        "gemma4-vl": lambda: Gemma4Config(
            text_config={**SIZES, **GEMMA4_EXPERTS, **overrides},
            vision_config={**EYES, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
            audio_config=None,
        ),
        "mistral3": lambda: Mistral3Config(
            text_config={**SIZES, "model_type": "mistral", "sliding_window": None, **overrides},
            vision_config={**EYES, "model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2},
        ),
        "ministral3": lambda: Ministral3Config(**{**SIZES, "head_dim": 32, "rope_parameters": MINISTRAL, **overrides}),
        "ministral3-vl": lambda: Mistral3Config(
            text_config={**SIZES, "model_type": "ministral3", "head_dim": 32, "rope_parameters": MINISTRAL, **overrides},
            vision_config={**EYES, "model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2},
        ),
        "qwen2.5-vl": lambda: Qwen2_5_VLConfig(
            text_config={**SIZES, "rope_parameters": {**PLACES, "mrope_section": [2, 3, 3]}, **overrides},
            vision_config={**EYES, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
        ),
        "qwen3-vl": lambda: Qwen3VLConfig(
            text_config={**SIZES, "head_dim": 32, "rope_parameters": {**PLACES, "mrope_section": [6, 5, 5]}, **overrides},
            vision_config={**EYES, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        ),
        "qwen3-vl-moe": lambda: Qwen3VLMoeConfig(
            text_config={**SIZES, **QWEN3_VL_EXPERTS, "rope_parameters": {**PLACES, "mrope_section": [6, 5, 5]}, **overrides},
            vision_config={**EYES, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        ),
    }
    return configs[name]()
