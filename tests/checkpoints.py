"""Small random checkpoints in the published layouts, written by transformers or by hand."""

import json
from pathlib import Path

import torch
from family_configs import VOCAB_SIZE, family_config
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

# Models that see, too.
SEEING = ("mistral3", "ministral3-vl", "gemma3-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "llama4-vl", "gemma4-vl")
WITH_LATENTS = ("glm4-moe-lite", "deepseek-v2", "deepseek-v3")
WITH_EXPERTS = (
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "gpt-oss",
    "glm4-moe",
    "minimax-m2",
    "llama4",
    "gemma4-moe",
    *WITH_LATENTS,
    "qwen3.5-moe",
    "qwen3-next",
)
# Models most of whose layers have memories instead of attention.
HYBRIDS = ("qwen3.5", "qwen3.5-moe", "qwen3-next")
# Of whose layers there is no one function for a CPU.
IN_PARTS = (*HYBRIDS, *WITH_LATENTS, "minimax-m2", "llama4", "gemma4", "gemma4-small", "gemma4-moe")
# Which several processes can't hold together.
WHOLE = (*HYBRIDS, "minimax-m2")
# Weights with which no token of the tests' texts has two experts that are nearly as likely: any rounding chooses between those.
NO_NEAR_TIES = {
    "qwen3-moe": 3,
    "qwen3-moe-mixed": 3,
    "glm4-moe": 4,
    "minimax-m2": 6,
    "glm4-moe-lite": 9,
    "deepseek-v2": 9,
    "deepseek-v3": 12,
    "llama4": 10,
    "gemma4-moe": 1,
    "qwen3.5": 5,
    "qwen3.5-moe": 5,
    "qwen3-next": 3,
}
FAMILIES = (
    "llama",
    "llama-tied",
    "llama-biased",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "phi3",
    "phi3-long",
    "hunyuan",
    "gemma3",
    "gemma4",
    "gemma4-small",
    "seed-oss",
    "ministral3",
    "glm4",
    "ernie4.5",
    "qwen3.5",
    *WITH_EXPERTS,
)


def auto_class(config) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """What makes transformers' model of it."""
    return AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM


def transformers_model(directory: Path, **options) -> PreTrainedModel:
    return auto_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory, **options)


def random_model(config, seed: int = 0) -> PreTrainedModel:
    """Random weights, the norms and biases included, so that a test notices each of them."""
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    less_one = config.model_type.startswith(("gemma3", "qwen3_5", "qwen3_next"))  # which these add to what is stored
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif name.endswith("sinks"):
                parameter.normal_(0, 2)
            elif name.endswith(("router.scale", "per_expert_scale")):
                parameter.uniform_(0.6, 1.4)
            elif "norm" in name:
                one = 0.0 if less_one and not name.endswith("linear_attn.norm.weight") else 1.0
                parameter.uniform_(one - 0.4, one + 0.4)
                if name.endswith("q_norm.weight") and config.model_type.startswith("gemma4"):
                    parameter.mul_(0.2)  # scores are not divided by anything
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.2)
    return model


def byte_tokenizer(more_special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """One token per byte, after six special tokens and before more."""
    special = ["<|pad|>", "<|bos|>", "<|system|>", "<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet, *more_special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([*special, *more_special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = (
        "{{ bos_token }}{% if tools %}{{ '<|system|>' + tools | tojson }} as <tool_call>{'name', 'arguments'}<|end|>{% endif %}"
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
        "{% for call in message.tool_calls %}{{ call.function.name + call.function.arguments.keys() | join }}{% endfor %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>", chat_template=template
    )


def write_target(directory: Path, name: str = "llama", max_shard_size: str = "5GB", **overrides) -> Path:
    """A target checkpoint with a tokenizer, as transformers writes it."""
    model = random_model(family_config(name, **overrides), NO_NEAR_TIES.get(name, 0))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(directory)
    if name == "qwen3-vl-moe":  # of which published files have inputs first, unlike what transformers 5 writes
        tensors = load_file(directory / "model.safetensors")
        tensors |= {own: tensor.transpose(1, 2).contiguous() for own, tensor in tensors.items() if ".experts." in own}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def eagle3_tensors(hidden_size: int = 64, vocab_size: int = VOCAB_SIZE, draft_vocab_size: int = 160) -> dict[str, torch.Tensor]:
    """Random tensors of an EAGLE-3 head under their published names."""
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.15

    def norm_weight() -> torch.Tensor:
        return torch.rand(hidden_size, generator=generator) * 0.8 + 0.6

    used = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    is_used = torch.zeros(vocab_size, dtype=torch.bool)
    is_used[used] = True
    return {
        "fc.weight": matrix(hidden_size, 3 * hidden_size),
        "midlayer.input_layernorm.weight": norm_weight(),
        "midlayer.hidden_norm.weight": norm_weight(),
        "midlayer.post_attention_layernorm.weight": norm_weight(),
        "midlayer.self_attn.q_proj.weight": matrix(hidden_size, 2 * hidden_size),
        "midlayer.self_attn.k_proj.weight": matrix(hidden_size // 2, 2 * hidden_size),
        "midlayer.self_attn.v_proj.weight": matrix(hidden_size // 2, 2 * hidden_size),
        "midlayer.self_attn.o_proj.weight": matrix(hidden_size, hidden_size),
        "midlayer.mlp.gate_proj.weight": matrix(96, hidden_size),
        "midlayer.mlp.up_proj.weight": matrix(96, hidden_size),
        "midlayer.mlp.down_proj.weight": matrix(hidden_size, 96),
        "norm.weight": norm_weight(),
        "lm_head.weight": matrix(draft_vocab_size, hidden_size),
        "d2t": used - torch.arange(draft_vocab_size),
        "t2d": is_used,
    }


EAGLE3_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": 160,
}


def write_eagle3_head(directory: Path, **config_overrides) -> Path:
    """A random EAGLE-3 head in the layout of yuhuili/EAGLE3-*, as safetensors. Its context is shorter than the target's."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(eagle3_tensors(), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**EAGLE3_CONFIG, **config_overrides}))
    return directory
