"""Draft heads: small models that extrapolate the target's hidden states."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool
from eagle_rt.models.decoder import Decoder
from eagle_rt.models.layers import Attention, FeedForward, ForwardContext, Linear, linear, norm
from eagle_rt.models.rope import Rope, RopeSpec, rope_from_config
from eagle_rt.models.spec import LayerShape, ModelSpec, layer_shape, read_config
from eagle_rt.models.weights import Checkpoint
from eagle_rt.token_map.token_map import TokenMap, from_offsets, identity_map


class DraftHead(Protocol):
    """What drafting needs of a head.

    A head's row t is made from the token at t + 1 and the hidden state at t, has position t, and predicts the token at t + 2.
    """

    feature_layers: tuple[int, ...]
    token_map: TokenMap
    shape: LayerShape
    num_layers: int

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [T, F * H] to the head's hidden states [T, H]."""
        ...

    def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, pool: KVPool, backend: AttentionBackend) -> Tensor:
        """One pass over T rows, target ids [T] and hidden states [T, H]: the states [T, H] that stand in for the hidden
        states one token later."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """States [R, H] to [R, W] over the draft vocabulary."""
        ...


@dataclass(frozen=True)
class Eagle3Spec:
    """An EAGLE-3 head's config.json, read against its target's."""

    shape: LayerShape
    rope: RopeSpec
    draft_vocab_size: int
    feature_layers: tuple[int, ...]


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Inputs of a low, a middle and a high layer: 2, N // 2, N - 3 (EAGLE-3 reference implementation)."""
    return (2, num_layers // 2, num_layers - 3)


def eagle3_spec(config: dict[str, Any], target: ModelSpec) -> Eagle3Spec:
    """Raises ValueError where the config contradicts the target's."""
    shape = layer_shape(config)
    if shape.hidden_size != target.shape.hidden_size:
        raise ValueError(
            f"the head's hidden_size is {shape.hidden_size} and the target's {target.shape.hidden_size}: "
            "this head was made for another target"
        )
    if config["vocab_size"] != target.vocab_size:
        raise ValueError(
            f"the head's vocab_size is {config['vocab_size']} and the target's {target.vocab_size}: "
            "this head was made for another target"
        )
    given = config.get("eagle_aux_hidden_state_layer_ids") or (config.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    feature_layers = default_feature_layers(target.num_layers)
    if given:
        # Lists that begin with 1 name layers whose output is meant; others name layers whose input is.
        offset = 1 if given[0] == 1 else 0
        feature_layers = tuple(layer + offset for layer in given)
    outside = [layer for layer in feature_layers if not 0 <= layer <= target.num_layers]
    if outside:
        raise ValueError(f"the head wants features of layer {outside[0]}, but the target has {target.num_layers} layers")
    return Eagle3Spec(
        shape=shape,
        rope=rope_from_config(config, shape.head_dim),
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        feature_layers=feature_layers,
    )


class Eagle3Head:
    """EAGLE-3 (Li et al., 2025): one layer over [token embedding; fused target features].

    g = fc(features); z = [norm(embedding); norm(g)]; r = g + attention(z); o = r + feed_forward(norm(r)).
    o is the state that the next pass takes in place of g; its norm goes to the head's own output layer.
    """

    num_layers = 1

    def __init__(self, checkpoint: Checkpoint, spec: Eagle3Spec, target: Decoder, dtype: torch.dtype, device: str) -> None:
        shape = spec.shape
        size, vocab_size = shape.hidden_size, target.spec.vocab_size
        self.shape, self.feature_layers = shape, spec.feature_layers
        own_embedding = checkpoint.take_optional("embed_tokens.weight", (vocab_size, size))
        self._embedding = target.embedding if own_embedding is None else own_embedding
        self._fuse = linear(checkpoint, "fc", size, len(spec.feature_layers) * target.spec.shape.hidden_size)
        self._embedding_norm = norm(checkpoint, "midlayer.input_layernorm", shape)
        self._hidden_norm = norm(checkpoint, "midlayer.hidden_norm", shape)
        self._attention = Attention(checkpoint, "midlayer.self_attn", shape, 2 * size, window=None)
        self._feed_forward_norm = norm(checkpoint, "midlayer.post_attention_layernorm", shape)
        self._feed_forward = FeedForward(checkpoint, "midlayer.mlp", shape)
        self._final_norm = norm(checkpoint, "norm", shape)
        self._lm_head: Linear = linear(checkpoint, "lm_head", spec.draft_vocab_size, size)
        self.token_map = read_token_map(checkpoint, spec.draft_vocab_size, vocab_size).to(torch.device(device))
        self._rope = Rope(spec.rope, spec.rope.max_position_embeddings, dtype, device)

    def fuse(self, features: Tensor) -> Tensor:
        return self._fuse(features)

    def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, pool: KVPool, backend: AttentionBackend) -> Tensor:
        context = ForwardContext(batch, pool, backend, backend.plan(batch), *self._rope.cos_sin(batch.positions))
        embedded = functional.embedding(tokens, self._embedding)
        x = torch.cat((self._embedding_norm(embedded), self._hidden_norm(hidden)), dim=-1)
        x = hidden + self._attention(x, 0, context)
        return x + self._feed_forward(self._feed_forward_norm(x))

    def logits(self, states: Tensor) -> Tensor:
        return self._lm_head(self._final_norm(states))


def read_token_map(checkpoint: Checkpoint, draft_vocab_size: int, target_vocab_size: int) -> TokenMap:
    """The head's `d2t`, or the identity where both vocabularies are one."""
    if "t2d" in checkpoint:
        checkpoint.take_raw("t2d", (target_vocab_size,))  # a mask of the ids that d2t reaches: nothing new in it
    if "d2t" in checkpoint:
        return from_offsets(checkpoint.take_raw("d2t", (draft_vocab_size,)), target_vocab_size)
    if draft_vocab_size != target_vocab_size:
        raise ValueError(
            f"the head has a draft vocabulary of {draft_vocab_size} for a target vocabulary of {target_vocab_size}, "
            f"but no d2t tensor in {checkpoint.model_dir} to map one to the other"
        )
    return identity_map(target_vocab_size)


def load_eagle3_head(head_dir: Path, target: Decoder, dtype: torch.dtype, device: str) -> tuple[Eagle3Head, list[str]]:
    """Read a head from disk; also returns the names of tensors that were not used.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is incomplete or damaged, or does not fit its target.
    """
    spec = eagle3_spec(read_config(head_dir), target.spec)
    checkpoint = Checkpoint(head_dir, dtype, device, "head")
    try:
        head = Eagle3Head(checkpoint, spec, target, dtype, device)
    finally:
        unused = checkpoint.finish()
    return head, unused
