"""Draft heads as trainable modules whose parameters carry the published tensor names.

A head is trained unrolled on its own outputs (training-time test; Li et al., "EAGLE-3", 2025, section 3.2): at unroll step j,
slot t holds the token at t + 1 + j and what the head made of slot t at step j - 1, and predicts the token at t + 2 + j. One that
drafts in parallel is given neither of them beyond step 0, but one token and one state that stand for what is not known yet.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from eagle_rt.kernels.rotary import rotate
from eagle_rt.models.rope import Rope, rope_from_config

# Of one layer: keys and values of every unroll step so far.
Rows = list[tuple[Tensor, Tensor]]


class HeadAttention(nn.Module):
    """Attention of an unrolled head: slot t at step j sees the true rows of slots <= t, and its own rows of steps 1 .. j."""

    def __init__(self, config: dict[str, Any], input_size: int) -> None:
        super().__init__()
        self.head_dim = config["head_dim"]
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config["hidden_size"], bias=False)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], rows: Rows) -> Tensor:
        """x: [B, T, input_size]; `rows` collects keys and values [B, heads, T, head_dim] of the steps so far, this one included."""
        batch_size, length, _ = x.shape

        def heads(projected: Tensor, turn: bool) -> Tensor:
            split = projected.view(batch_size, length, -1, self.head_dim)
            split = rotate(split, *cos_sin) if turn else split
            return split.transpose(1, 2).repeat_interleave(self.num_heads // split.shape[2], dim=1)

        queries = heads(self.q_proj(x), True)
        rows.append((heads(self.k_proj(x), True), heads(self.v_proj(x), False)))
        true_keys, true_values = rows[0]
        scale = self.head_dim**-0.5
        is_future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = [(queries @ true_keys.transpose(2, 3) * scale).masked_fill(is_future, -torch.inf)]
        scores += [(queries * keys).sum(-1, keepdim=True) * scale for keys, _ in rows[1:]]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1).to(queries.dtype)
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
    """x + attention(attention_input), and the feed-forward part after it."""

    def __init__(self, config: dict[str, Any], input_size: int) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.self_attn = HeadAttention(config, input_size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config["rms_norm_eps"])
        self.mlp = FeedForward(size, config["intermediate_size"])

    def forward(self, x: Tensor, attention_input: Tensor, cos_sin: tuple[Tensor, Tensor], rows: Rows) -> Tensor:
        x = x + self.self_attn(attention_input, cos_sin, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Layer(HeadLayer):
    def __init__(self, config: dict[str, Any]) -> None:
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        super().__init__(config, 2 * size)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)


class LaterLayer(HeadLayer):
    """A layer after the first, as a Llama's."""

    def __init__(self, config: dict[str, Any]) -> None:
        size = config["hidden_size"]
        super().__init__(config, size)
        self.input_layernorm = nn.RMSNorm(size, eps=config["rms_norm_eps"])


class Trainee(nn.Module):
    """What training needs of a head. config: the head's config.json."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self._rope_spec = rope_from_config(config, config["head_dim"])

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, F] to the head's hidden states [B, T, H]."""

    def inputs(self, step: int, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What an unroll step is made over, of the true tokens' embeddings [B, T, H] and the last step's states [B, T, H]."""
        return embedded, hidden

    @abstractmethod
    def step(self, embedded: Tensor, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], rows: list[Rows]) -> Tensor:
        """One pass over token embeddings and hidden states [B, T, H]: the states [B, T, H]. rows: of each layer."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """States [R, H] to [R, W] over the draft vocabulary."""

    @abstractmethod
    def labels(self, target_logits: Tensor) -> Tensor:
        """The target's logits [R, V] as the probabilities [R, W] that the head should give."""

    @abstractmethod
    def loss(self, states: Tensor, logits: Tensor, labels: Tensor, target_states: Tensor, is_draftable: Tensor) -> Tensor:
        """Sum over R states, given what the target makes of the same tokens; is_draftable: [R] bool, the draft vocabulary holds the
        target's favourite."""

    @abstractmethod
    def start_from(self, lm_head: Tensor, final_norm: Tensor) -> None:
        """Begin as what the target, with output layer [V, H] and final norm [H], makes of its own states."""

    def to_target(self, draft_tokens: Tensor) -> Tensor:
        return draft_tokens

    def after(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Logits [R, W] of what follows these tokens [R], where they have a say in it."""
        return logits

    def unroll(self, embeddings: Tensor, features: Tensor, num_unrolled: int) -> Iterator[tuple[slice, Tensor]]:
        """Per unroll step, the positions that the states stand for, and the states [B, T - num_unrolled, H].

        embeddings: [B, T, H] of the tokens; features: [B, T, F] at them.
        """
        num_slots = features.shape[1] - num_unrolled
        rope = Rope(self._rope_spec, 0, torch.float32, str(features.device))
        hidden = self.fuse(features[:, :num_slots])
        rows: list[Rows] = [[] for _ in range(self.config["num_hidden_layers"])]
        for step in range(num_unrolled):
            shifted = slice(1 + step, 1 + step + num_slots)
            cos_sin = rope.cos_sin(torch.arange(step, step + num_slots, device=features.device))
            hidden = self.step(*self.inputs(step, embeddings[:, shifted], hidden), cos_sin, rows)
            yield shifted, hidden

    def unrolled_losses(
        self,
        tokens: Tensor,
        embeddings: Tensor,
        features: Tensor,
        target_states: Tensor,
        target_logits: Tensor,
        counts: Tensor,
        num_unrolled: int,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(sums of the losses, numbers of agreements) of steps 0 .. num_unrolled - 1.

        tokens: [B, T]; features: [B, T, F] that the head is given; counts: [B, T] bool, the positions whose next token is worth
        predicting; target_states: [B, T, H] the target's final hidden states; target_logits: [R, V] at the R counted
        positions. An agreement is a position where the head's favourite token is the target's.
        """
        row_numbers = (counts.flatten().cumsum(0) - 1).view_as(counts)
        labels = self.labels(target_logits)
        favourites = target_logits.argmax(dim=-1)
        is_draftable = torch.isin(favourites, self.to_target(torch.arange(labels.shape[1], device=labels.device)))
        losses, agreements = [], []
        for shifted, states in self.unroll(embeddings, features, num_unrolled):
            counted = counts[:, shifted]
            rows = row_numbers[:, shifted][counted]
            states = states[counted]
            logits = self.after(tokens[:, shifted][counted], self.logits(states)).float()
            losses.append(self.loss(states, logits, labels[rows], target_states[:, shifted][counted], is_draftable[rows]))
            agreements.append((self.to_target(logits.argmax(dim=-1)) == favourites[rows]).sum())
        return losses, agreements


class Eagle3Trainee(Trainee):
    """draft_tokens: [W] int64, ascending target ids of the draft vocabulary; num_features: layers whose states are fused."""

    draft_tokens: Tensor

    def __init__(self, config: dict[str, Any], draft_tokens: Tensor, num_features: int = 3) -> None:
        super().__init__(config)
        size = config["hidden_size"]
        self.fc = nn.Linear(num_features * size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.layers = nn.ModuleDict({str(index): LaterLayer(config) for index in range(1, config["num_hidden_layers"])})
        self.norm = nn.RMSNorm(size, eps=config["rms_norm_eps"])
        self.lm_head = nn.Linear(size, len(draft_tokens), bias=False)
        self.register_buffer("draft_tokens", draft_tokens)

    @property
    def _later_layers(self) -> list[LaterLayer]:
        return cast(list[LaterLayer], list(self.layers.values()))

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def step(self, embedded: Tensor, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], rows: list[Rows]) -> Tensor:
        x = self.midlayer(hidden, self.midlayer.attention_input(embedded, hidden), cos_sin, rows[0])
        for layer, own_rows in zip(self._later_layers, rows[1:], strict=True):
            x = layer(x, layer.input_layernorm(x), cos_sin, own_rows)
        return x

    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head(self.norm(states))

    def labels(self, target_logits: Tensor) -> Tensor:
        return target_logits[:, self.draft_tokens].softmax(dim=-1)

    def loss(self, states: Tensor, logits: Tensor, labels: Tensor, target_states: Tensor, is_draftable: Tensor) -> Tensor:
        """Cross-entropy to the target's distribution over the draft vocabulary, where that holds the target's favourite."""
        return (functional.cross_entropy(logits, labels, reduction="none") * is_draftable).sum()

    def to_target(self, draft_tokens: Tensor) -> Tensor:
        return self.draft_tokens[draft_tokens]

    @torch.no_grad()
    def start_from(self, lm_head: Tensor, final_norm: Tensor) -> None:
        """Begin as the target's output layer (weights [V, H] and [H]) on its highest captured state, with layers in between
        that add nothing yet."""
        size = len(final_norm)
        self.lm_head.weight.copy_(lm_head[self.draft_tokens])
        self.norm.weight.copy_(final_norm)
        self.fc.weight.zero_()
        self.fc.weight[:, -size:].fill_diagonal_(1.0)
        for layer in (self.midlayer, *self._later_layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()


class ParallelTrainee(Eagle3Trainee):
    """A P-EAGLE head (Hui et al., 2026), which guesses all levels in one pass: an EAGLE-3 head that is fed, beyond the
    last token that is known, with a token and a hidden state that are the same everywhere.

    mask_embedding: [H] the target's of that token.
    """

    mask_embedding: Tensor

    def __init__(self, config: dict[str, Any], draft_tokens: Tensor, mask_embedding: Tensor, num_features: int = 3) -> None:
        super().__init__(config, draft_tokens, num_features)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, num_features * config["hidden_size"]))
        self.register_buffer("mask_embedding", mask_embedding, persistent=False)

    def inputs(self, step: int, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if step == 0:
            return embedded, hidden
        return self.mask_embedding.expand_as(embedded), self.fuse(self.mask_hidden).expand_as(hidden)


class EagleTrainee(Trainee):
    """An EAGLE-1 / EAGLE-2 head, which foresees the target's final hidden states and has the target's output layer, [V, H]."""

    def __init__(self, config: dict[str, Any], lm_head: Tensor) -> None:
        super().__init__(config)
        size = config["hidden_size"]
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config, size)])
        self.register_buffer("lm_head", lm_head, persistent=False)

    lm_head: Tensor

    @property
    def _layer(self) -> HeadLayer:
        return cast(HeadLayer, self.layers[0])

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def step(self, embedded: Tensor, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], rows: list[Rows]) -> Tensor:
        x = self.fc(torch.cat((embedded, hidden), dim=-1))
        return self._layer(x, x, cos_sin, rows[0])

    def logits(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.lm_head)

    def labels(self, target_logits: Tensor) -> Tensor:
        return target_logits.softmax(dim=-1)

    def loss(self, states: Tensor, logits: Tensor, labels: Tensor, target_states: Tensor, is_draftable: Tensor) -> Tensor:
        """Smooth L1 to the target's state plus a tenth of the cross-entropy (Li et al., "EAGLE", 2024, section 4.2)."""
        regression = functional.smooth_l1_loss(states.float(), target_states, reduction="none").mean(dim=-1)
        return (regression + 0.1 * functional.cross_entropy(logits, labels, reduction="none")).sum()

    @torch.no_grad()
    def start_from(self, lm_head: Tensor, final_norm: Tensor) -> None:
        """Begin by passing the hidden state on, with a layer that adds nothing yet."""
        size = len(final_norm)
        self.fc.weight.zero_()
        self.fc.weight[:, size:].fill_diagonal_(1.0)
        self._layer.self_attn.o_proj.weight.zero_()
        self._layer.mlp.down_proj.weight.zero_()


def most_frequent_tokens(tokens: Tensor, vocab_size: int, draft_vocab_size: int) -> Tensor:
    """A draft vocabulary: the most frequent of the tokens, as ascending ids [W]."""
    frequencies = torch.bincount(tokens, minlength=vocab_size)
    return frequencies.sort(descending=True, stable=True).indices[:draft_vocab_size].sort().values
