"""A DFlash head as a trainable module, see `eagle_rt.train.modules`: every token of a text is once the first of a block."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from eagle_rt.kernels.rotary import rotate
from eagle_rt.models.rope import Rope
from eagle_rt.train.modules import FeedForward, Trainee

Turn = tuple[Tensor, Tensor]


class BlockAttention(nn.Module):
    """Attention of blocks: that of slot t sees the text up to slot t, and all of itself."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, head_dim, eps = config["hidden_size"], config["head_dim"], config["rms_norm_eps"]
        self.head_dim, self.num_heads, self.num_kv_heads = head_dim, config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(size, self.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(size, self.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(size, self.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * head_dim, size, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim, eps=eps), nn.RMSNorm(head_dim, eps=eps)

    def forward(self, x: Tensor, context: Tensor, turn: Turn, context_turn: Turn) -> Tensor:
        """x: [B, T, D + 1, H] rows of a block for each slot; context: [B, T, H]. turn: of both, as `Rope.cos_sin` makes it of
        positions [T * (D + 1)] and [T]."""
        batch_size, num_slots, size, _ = x.shape
        flat = x.flatten(1, 2)
        queries = self._heads(self.q_norm(self._split(self.q_proj(flat))), turn)
        own_keys, own_values = self._keys_and_values(flat, turn)
        keys, values = self._keys_and_values(context, context_turn)

        def blocks(rows: Tensor) -> Tensor:
            return rows.unflatten(2, (num_slots, size))  # [B, heads, T, D + 1, head_dim]

        slots = torch.arange(num_slots, device=x.device)
        is_later = slots > slots.repeat_interleave(size)[:, None]
        scale = self.head_dim**-0.5
        scores = (queries @ keys.transpose(2, 3) * scale).masked_fill(is_later, -torch.inf)
        own_scores = (blocks(queries) @ blocks(own_keys).transpose(3, 4) * scale).flatten(2, 3)
        weights = torch.cat((scores, own_scores), dim=-1).softmax(dim=-1).to(queries.dtype)
        output = weights[..., :num_slots] @ values
        output = output + (blocks(weights[..., num_slots:]) @ blocks(own_values)).flatten(2, 3)
        return self.o_proj(output.transpose(1, 2).flatten(2)).view(batch_size, num_slots, size, -1)

    def _keys_and_values(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        return self._heads(self.k_norm(self._split(self.k_proj(x))), turn), self._heads(self._split(self.v_proj(x)), None)

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(2, (-1, self.head_dim))

    def _heads(self, split: Tensor, turn: Turn | None) -> Tensor:
        """[B, heads, R, head_dim] of [B, R, fewer heads, head_dim]."""
        split = rotate(split, *turn) if turn else split
        return split.transpose(1, 2).repeat_interleave(self.num_heads // split.shape[2], dim=1)


class BlockLayer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.self_attn = BlockAttention(config)
        self.mlp = FeedForward(size, config["intermediate_size"])

    def forward(self, x: Tensor, context: Tensor, turn: Turn, context_turn: Turn) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, turn, context_turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class Pairs(nn.Module):
    """What a token says of the one after it (DSpark); nothing at first."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab_size, rank), nn.Linear(rank, vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(tokens))


class DFlashTrainee(Trainee):
    """A DFlash head (Chen, Liang and Liu, 2026), with the target's output layer, [V, H]. All levels come of one pass: unroll step j
    is what mask j + 1 of each block tells. (The paper draws some first tokens of each text; here all are.) With a
    `markov_rank` in its config the token before has a say, as in DSpark.

    mask_embedding: [H] the target's of the mask token.
    """

    lm_head: Tensor
    mask_embedding: Tensor

    def __init__(self, config: dict[str, Any], lm_head: Tensor, mask_embedding: Tensor, num_features: int = 3) -> None:
        super().__init__(config)
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.fc = nn.Linear(num_features * size, size, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config["num_hidden_layers"])])
        self.markov_head = Pairs(config["vocab_size"], rank) if (rank := config.get("markov_rank")) else None
        self.register_buffer("lm_head", lm_head, persistent=False)
        self.register_buffer("mask_embedding", mask_embedding, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features))

    def unroll(self, embeddings: Tensor, features: Tensor, num_unrolled: int) -> Iterator[tuple[slice, Tensor]]:
        num_slots, size = features.shape[1] - num_unrolled, num_unrolled + 1
        rope = Rope(self._rope_spec, 0, torch.float32, str(features.device))
        context, firsts = self.fuse(features[:, :num_slots]), embeddings[:, 1 : 1 + num_slots, None]
        masks = self.mask_embedding.expand(*firsts.shape[:2], num_unrolled, -1)
        x = torch.cat((firsts, masks), dim=2)
        slots = torch.arange(num_slots, device=features.device)
        positions = (1 + slots[:, None] + torch.arange(size, device=features.device)).flatten()
        turns = rope.cos_sin(positions), rope.cos_sin(slots)
        for layer in cast(list[BlockLayer], list(self.layers)):
            x = layer(x, context, *turns)
        for step in range(num_unrolled):
            yield slice(1 + step, 1 + step + num_slots), x[:, :, step + 1]

    def logits(self, states: Tensor) -> Tensor:
        return functional.linear(self.norm(states), self.lm_head)

    def after(self, tokens: Tensor, logits: Tensor) -> Tensor:
        return logits + self.markov_head(tokens) if self.markov_head else logits

    def labels(self, target_logits: Tensor) -> Tensor:
        return target_logits.softmax(dim=-1)

    def loss(self, states: Tensor, logits: Tensor, labels: Tensor, target_states: Tensor, is_draftable: Tensor) -> Tensor:
        """Cross-entropy to the target's distribution."""
        return functional.cross_entropy(logits, labels, reduction="sum")

    @torch.no_grad()
    def start_from(self, lm_head: Tensor, final_norm: Tensor) -> None:
        """Begin with the highest captured state as what layers look at, and with the target's norm before its output layer."""
        size = len(final_norm)
        self.norm.weight.copy_(final_norm)
        self.fc.weight.zero_()
        self.fc.weight[:, -size:].fill_diagonal_(1.0)
