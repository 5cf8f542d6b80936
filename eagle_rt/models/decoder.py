"""The target: one decoder for all supported families."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.attention.cached import Attend, CachedAttention
from eagle_rt.batch import Batch
from eagle_rt.cache.memories import Memories
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels.embed import embed, rounded_scale
from eagle_rt.kernels.products import Quantization, of_output_layer
from eagle_rt.kernels.whole_pass import layer_stack
from eagle_rt.models.adapter import AdaptedCheckpoint
from eagle_rt.models.compiled import CompilableLayers
from eagle_rt.models.layer_inputs import LayerInput, LayerInputs
from eagle_rt.models.layers import Block, norm
from eagle_rt.models.linear import Linear, linear
from eagle_rt.models.pass_context import PassContext, pass_context
from eagle_rt.models.quantized import open_checkpoint
from eagle_rt.models.rearranged import RearrangedCheckpoint, own_name
from eagle_rt.models.rope import Rope
from eagle_rt.models.shard import WHOLE, Shard, ShardedCheckpoint, Total, whole
from eagle_rt.models.spec import ModelSpec
from eagle_rt.models.weights import Checkpoint

# Stands for the final norm's output, what the output layer reads, where features of a layer are asked for.
FINAL_NORM = -1


@dataclass(frozen=True)
class TargetOutput:
    """hidden: [T, H] after the final norm; features: [T, len(feature_layers) * H], the residual stream that enters those
    layers (or FINAL_NORM), side by side; None if no layers were asked for."""

    hidden: Tensor
    features: Tensor | None


class Decoder(CompilableLayers):
    """A Llama-like decoder on a paged cache.

    feature_layers: layers whose input is handed to the draft head; num_layers means the output of the last one, and
    FINAL_NORM that output after the final norm. quantization: of the weights of products, see `products.product_with`, layer by
    layer as they are read. rows: what each of its layers that look back keeps of a token; places: where what each sees is, among
    those. shard: the part of it that this process holds, and total: the sum of what all hold.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        *,
        context_length: int,
        dtype: torch.dtype,
        device: str,
        quantization: Quantization = "none",
        shard: Shard = WHOLE,
        total: Total = whole,
    ) -> None:
        self.spec = spec
        shapes, vocab_size = [shard.layer_shape(own) for own in spec.layer_shapes], spec.vocab_size
        size, eps = spec.shape.hidden_size, spec.shape.rms_norm_eps
        is_part = shard != WHOLE
        if is_part:
            checkpoint = ShardedCheckpoint(checkpoint, shard, spec)
        self.embedding = checkpoint.take("model.embed_tokens.weight", (vocab_size, size))
        names = [f"model.layers.{index}" for index in range(spec.num_layers)]
        self._norms = [norm(checkpoint, f"{name}.input_layernorm", size, eps) for name in names]
        kinds = zip(names, shapes, spec.windows, map(shard.expert_shape, spec.experts), spec.delta_nets, strict=True)
        self._blocks = [
            Block(checkpoint, name, shape, size, window, experts, total, quantization, delta_net)
            for name, shape, window, experts, delta_net in kinds
        ]
        # What the residual stream is multiplied with behind layers (Gemma 4).
        scales = [checkpoint.take_optional(f"{name}.layer_scalar", (1,)) for name in names]
        self._scales = [None if scale is None else scale.item() for scale in scales]
        # Of each layer where what it sees is in the cache: among the keys and values of all that keep some, or their memories.
        keeps_rows = [not (shape.shares_rows or own) for shape, own in zip(shapes, spec.delta_nets, strict=True)]
        kept, remembered = (list(accumulate(own, initial=0)) for own in (keeps_rows, map(bool, spec.delta_nets)))
        self.places = [
            remembered[index] if delta_net else kept[source]
            for index, (source, delta_net) in enumerate(zip(spec.row_layers, spec.delta_nets, strict=True))
        ]
        self._layer_inputs, self._inputs = None, [None] * len(names)
        if own := spec.layer_inputs:
            self._layer_inputs = LayerInputs(checkpoint, spec, quantization)
            self._inputs = [LayerInput(checkpoint, name, spec.shape, own.size, quantization) for name in names]
        self.final_norm = norm(checkpoint, "model.norm", size, eps)
        is_tied = spec.tie_word_embeddings or "lm_head.weight" not in checkpoint
        if is_tied:
            embedding = shard.part_of(self.embedding, 0) if is_part else self.embedding
            self.lm_head = Linear(embedding, None, of_output_layer(quantization))
        else:
            self.lm_head = linear(checkpoint, "lm_head", vocab_size // shard.size, size, of_output_layer(quantization))
        self._num_memories = sum(map(bool, spec.delta_nets))
        self.rows = tuple(shape.row for shape, keeps in zip(shapes, keeps_rows, strict=True) if keeps)
        self._dtype, self._device = dtype, device
        self._rope = Rope(spec.rope, context_length, dtype, device)
        self._window_rope = Rope(spec.window_rope, context_length, dtype, device) if spec.window_rope else None
        self._embedding_scale = rounded_scale(spec.embedding_scale, dtype)
        self._stack = None
        if not is_part:  # or there would be something to sum within
            self._stack = layer_stack([block.parts for block in self._blocks], [*self._norms[1:], self.final_norm])

    def count_bits(self) -> Counter[int | None]:
        """How many products of its layers have weights of so many bits; None: of as many as the model's precision has."""
        parts = (*self._blocks, *filter(None, self._inputs))
        return Counter(product and product.num_bits for part in parts for product in part.products)

    def make_pool(self, num_slots: int, num_texts: int) -> KVPool:
        """A cache for its keys and values, and for what it remembers of so many texts."""
        pool = KVPool(self.rows, num_slots, self._dtype, self._device)
        if delta_net := self.spec.delta_net:
            pool.memories = Memories(self._num_memories, num_texts, delta_net, self._dtype, self._device)
        return pool

    @property
    def bytes_per_slot(self) -> int:
        """What each slot of such a cache takes."""
        return sum(row.num_numbers for row in self.rows) * self._dtype.itemsize

    @property
    def bytes_per_text(self) -> int:
        """What it remembers of a text takes beside that."""
        delta_net = self.spec.delta_net
        return Memories.bytes_per_text(self._num_memories, delta_net, self._dtype) if delta_net else 0

    def quantized(self) -> "Decoder":
        """The same with weights of eight bits in its layers."""
        other = copy.copy(self)
        other._blocks, other._stack = [block.quantized() for block in self._blocks], None
        return other

    def close(self) -> None:
        """Let go of what does not end by itself."""

    def forward(self, batch: Batch, pool: KVPool, backend: AttentionBackend, feature_layers: tuple[int, ...] = ()) -> TargetOutput:
        """One pass over the batch's T tokens, which also writes their cache rows."""
        return self._run(batch.tokens, batch.positions, CachedAttention(batch, pool, backend), feature_layers)

    def _layers(self, tokens: Tensor, positions: Tensor, attend: Attend, feature_layers: tuple[int, ...]) -> TargetOutput:
        x, context = self.embed(tokens), self.context(positions, attend)
        if self._stack and context.whole:
            _, hidden, features = self._stack(x, self._norms[0](x), context.whole, feature_layers)
            return TargetOutput(hidden, features if feature_layers else None)
        inputs = self._layer_inputs(tokens, x) if self._layer_inputs else None
        return self.go_through(x, context, feature_layers, inputs)

    def embed(self, tokens: Tensor) -> Tensor:
        """[T, H] what enters the first layer."""
        return embed(tokens, self.embedding, self._embedding_scale)

    def context(self, positions: Tensor, attend: Attend) -> PassContext:
        """What its layers share of a pass over such positions."""
        return pass_context(self._rope, positions, attend, self._window_rope)

    def go_through(
        self, x: Tensor, context: PassContext, feature_layers: tuple[int, ...] = (), inputs: Tensor | None = None
    ) -> TargetOutput:
        """All layers, one after the other, from what enters the first [T, H]; inputs: of `LayerInputs`, if there are any."""
        captured, delta = {}, None
        for index, (block, block_norm) in enumerate(zip(self._blocks, self._norms, strict=True)):
            x, normed = block_norm.after_adding(x, delta)
            captured[index] = x
            x, delta = block(x, normed, self.places[index], context)
            if inputs is not None and (own := self._inputs[index]):
                x = x + delta
                delta = own(x, inputs[:, index])
            if (scale := self._scales[index]) is not None:
                x, delta = (x + delta) * scale, None
        x, hidden = self.final_norm.after_adding(x, delta)
        captured |= {self.spec.num_layers: x, FINAL_NORM: hidden}
        features = torch.cat([captured[index] for index in feature_layers], dim=-1) if feature_layers else None
        return TargetOutput(hidden, features)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] final hidden states to [R, V] logits in the model's precision."""
        logits = self.lm_head(hidden)
        if cap := self.spec.logit_cap:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits


def load_decoder(
    model_dir: Path,
    spec: ModelSpec,
    *,
    context_length: int,
    dtype: torch.dtype,
    device: str,
    quantization: Quantization = "none",
    adapter_dir: Path | None = None,
    make: Callable[..., Decoder] = Decoder,
) -> Decoder:
    """Read a target from disk; quantization: as `Decoder` says. adapter_dir: of an adapter that is merged into it. make: what makes
    it of its tensors.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is incomplete, damaged, or not what its config.json says; or the adapter is,
            or it is of another model.
    """
    checkpoint = open_checkpoint(model_dir, spec.storage, dtype, device, "target", lambda name: own_name(name, spec))
    try:
        tensors = AdaptedCheckpoint(checkpoint, adapter_dir, lambda name: own_name(name, spec)) if adapter_dir else checkpoint
        tensors = RearrangedCheckpoint(tensors, spec)
        return make(tensors, spec, context_length=context_length, dtype=dtype, device=device, quantization=quantization)
    finally:
        checkpoint.finish()
