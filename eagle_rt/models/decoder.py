"""The target: one decoder for all supported families."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool
from eagle_rt.models.layers import Attention, FeedForward, ForwardContext, Linear, linear, norm
from eagle_rt.models.rope import Rope
from eagle_rt.models.spec import ModelSpec
from eagle_rt.models.weights import Checkpoint


@dataclass(frozen=True)
class TargetOutput:
    """hidden: [T, H] after the final norm; features: [T, len(feature_layers) * H], the residual stream that enters those
    layers, side by side; None if no layers were asked for."""

    hidden: Tensor
    features: Tensor | None


class DecoderLayer:
    def __init__(self, checkpoint: Checkpoint, index: int, spec: ModelSpec) -> None:
        prefix, shape = f"model.layers.{index}", spec.shape
        self._index = index
        self._attention = Attention(checkpoint, f"{prefix}.self_attn", shape, shape.hidden_size, spec.windows[index])
        self._feed_forward = FeedForward(checkpoint, f"{prefix}.mlp", shape)
        self._attention_norm = norm(checkpoint, f"{prefix}.input_layernorm", shape)
        self._feed_forward_norm = norm(checkpoint, f"{prefix}.post_attention_layernorm", shape)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        x = x + self._attention(self._attention_norm(x), self._index, context)
        return x + self._feed_forward(self._feed_forward_norm(x))


class Decoder:
    """A Llama-like decoder on a paged cache.

    feature_layers: layers whose input is handed to the draft head; num_layers means the output of the last one.
    """

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, *, context_length: int, dtype: torch.dtype, device: str) -> None:
        self.spec = spec
        shape, vocab_size = spec.shape, spec.vocab_size
        self.embedding = checkpoint.take("model.embed_tokens.weight", (vocab_size, shape.hidden_size))
        self._layers = [DecoderLayer(checkpoint, index, spec) for index in range(spec.num_layers)]
        self._final_norm = norm(checkpoint, "model.norm", shape)
        is_tied = spec.tie_word_embeddings or "lm_head.weight" not in checkpoint
        self._lm_head = Linear(self.embedding) if is_tied else linear(checkpoint, "lm_head", vocab_size, shape.hidden_size)
        self._rope = Rope(spec.rope, context_length, dtype, device)

    def forward(self, batch: Batch, pool: KVPool, backend: AttentionBackend, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        """One pass over the batch's T tokens, which also writes their cache rows."""
        context = ForwardContext(batch, pool, backend, backend.plan(batch), *self._rope.cos_sin(batch.positions))
        x = functional.embedding(batch.tokens, self.embedding)
        captured = {}
        for index, layer in enumerate(self._layers):
            captured[index] = x
            x = layer(x, context)
        captured[len(self._layers)] = x
        features = torch.cat([captured[index] for index in feature_layers], dim=-1) if feature_layers else None
        return TargetOutput(self._final_norm(x), features)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] final hidden states to [R, V] float32 logits."""
        return self._lm_head(hidden).float()


def load_decoder(model_dir: Path, spec: ModelSpec, *, context_length: int, dtype: torch.dtype, device: str) -> Decoder:
    """Read a target from disk.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is incomplete, damaged, or not what its config.json says.
    """
    checkpoint = Checkpoint(model_dir, dtype, device, "target")
    try:
        return Decoder(checkpoint, spec, context_length=context_length, dtype=dtype, device=device)
    finally:
        checkpoint.finish()
