"""Training an EAGLE-3 head by training-time test (Li et al., "EAGLE-3", 2025, section 3.2).

The head is unrolled on its own outputs: at unroll step j, slot t holds the token at t + 1 + j and what the head made of slot t
at step j - 1, and predicts the target's distribution after that token.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from eagle_rt.kernels.rotary import rotate
from eagle_rt.models.rope import Rope, rope_from_config

STEP_DECAY = 0.8


class HeadAttention(nn.Module):
    """Attention of an unrolled head: slot t at step j sees the true rows of slots <= t, and its own rows of steps 1 .. j."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, self.head_dim = config["hidden_size"], config["head_dim"]
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(2 * size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, size, bias=False)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x: [B, T, 2H]; `rows` collects the keys and values [B, heads, T, head_dim] of the steps so far, this one included."""
        batch_size, length, _ = x.shape

        def heads(projected: Tensor, turn: bool) -> Tensor:
            split = projected.view(batch_size, length, -1, self.head_dim)
            split = rotate(split, *cos_sin) if turn else split
            return split.transpose(1, 2).repeat_interleave(self.num_heads // split.shape[2], dim=1)

        queries = heads(self.q_proj(x), True)
        rows.append((heads(self.k_proj(x), True), heads(self.v_proj(x), False)))
        true_keys, true_values = rows[0]
        scale = self.head_dim**-0.5
        is_future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = [(queries @ true_keys.transpose(2, 3) * scale).masked_fill(is_future, -torch.inf)]
        scores += [(queries * keys).sum(-1, keepdim=True) * scale for keys, _ in rows[1:]]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1)
        output = weights[..., :length] @ true_values
        for step, (_, values) in enumerate(rows[1:]):
            output = output + weights[..., length + step, None] * values
        return self.o_proj(output.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.self_attn = HeadAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = FeedForward(size, config["intermediate_size"])

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], rows: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        hidden = hidden + self.self_attn(x, cos_sin, rows)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Trainee(nn.Module):
    """The trainable head; its parameters carry the published tensor names.

    config: the head's config.json. draft_tokens: [W] int64, ascending target ids of the draft vocabulary.
    """

    draft_tokens: Tensor

    def __init__(self, config: dict[str, Any], draft_tokens: Tensor) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.config = config
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = HeadLayer(config)
        self.norm = nn.RMSNorm(size, eps=config["rms_norm_eps"])
        self.lm_head = nn.Linear(size, len(draft_tokens), bias=False)
        self.register_buffer("draft_tokens", draft_tokens, persistent=False)
        self._rope = Rope(rope_from_config(config, config["head_dim"]), 0, torch.float32, "cpu")

    def unrolled_losses(
        self, embeddings: Tensor, features: Tensor, target_logits: Tensor, counts: Tensor, num_unrolled: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(losses, acceptance) of steps 0 .. num_unrolled - 1.

        embeddings: [B, T, H] of the tokens; features: [B, T, 3H], target_logits: [B, T, V] at them; counts: [B, T] bool, the
        positions whose next token is worth predicting. A loss is the cross-entropy to the target's distribution restricted to
        the draft vocabulary, where that holds the target's favourite; acceptance is how often the favourites agree.
        """
        num_slots = features.shape[1] - num_unrolled
        favourites = target_logits.argmax(dim=-1)
        is_draftable = torch.isin(favourites, self.draft_tokens)
        hidden = self.fc(features[:, :num_slots])
        rows: list[tuple[Tensor, Tensor]] = []
        losses, acceptance = [], []
        for step in range(num_unrolled):
            shifted = slice(1 + step, 1 + step + num_slots)
            cos_sin = self._rope.cos_sin(torch.arange(step, step + num_slots))
            hidden = self.midlayer(embeddings[:, shifted], hidden, cos_sin, rows)
            counted = counts[:, shifted] & is_draftable[:, shifted]
            logits = self.lm_head(self.norm(hidden[counted]))
            labels = target_logits[:, shifted][counted][:, self.draft_tokens].softmax(dim=-1)
            losses.append(functional.cross_entropy(logits, labels))
            agrees = self.draft_tokens[logits.argmax(dim=-1)] == favourites[:, shifted][counted]
            acceptance.append(agrees.sum() / counts[:, shifted].sum())
        return losses, acceptance


def most_frequent_tokens(tokens: Tensor, counts: Tensor, vocab_size: int, draft_vocab_size: int) -> Tensor:
    """The draft vocabulary: the most frequent of the counted tokens, as ascending ids [W]."""
    frequencies = torch.bincount(tokens[counts], minlength=vocab_size)
    return frequencies.sort(descending=True, stable=True).indices[:draft_vocab_size].sort().values


def export_head(trainee: Eagle3Trainee, output_dir: Path, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors as SpecForge and the reference implementation name things."""
    draft_tokens = trainee.draft_tokens
    is_used = torch.zeros(trainee.config["vocab_size"], dtype=torch.bool)
    is_used[draft_tokens] = True
    tensors = {name: parameter.detach().to(dtype).contiguous() for name, parameter in trainee.state_dict().items()}
    tensors["d2t"] = draft_tokens - torch.arange(len(draft_tokens))
    tensors["t2d"] = is_used
    output_dir.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output_dir / "model.safetensors", metadata={"format": "pt"})
    (output_dir / "config.json").write_text(json.dumps(trainee.config, indent=2) + "\n")
