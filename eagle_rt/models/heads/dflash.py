"""DFlash heads: a few layers that guess a whole block of tokens in one pass (Chen, Liang and Liu, "DFlash", 2026); and DSpark's, in
which the token before has a say (DeepSeek-AI, "DSpark", 2026)."""

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.attention.cached import Attend, CachedAttention
from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels.embed import embed
from eagle_rt.kernels.rms_norm import RMSNorm
from eagle_rt.kernels.rotary import rotate
from eagle_rt.kernels.whole_pass import ByWindow, StackedLayers, layer_stack
from eagle_rt.models.decoder import Decoder
from eagle_rt.models.heads.base import LayeredHead
from eagle_rt.models.heads.spec import HeadSpec
from eagle_rt.models.heads.vocabulary import read_lm_head, read_token_map
from eagle_rt.models.layers import Block, norm
from eagle_rt.models.linear import Linear, linear, merged_linear
from eagle_rt.models.pass_context import pass_context
from eagle_rt.models.weights import Checkpoint


class DFlashHead(LayeredHead):
    """g = norm(fc(features)); every layer has keys and values of each g, and of the rows of a block, which are the embeddings of
    its first token and of masks; these look at all of both, and what becomes of a mask tells the token in its place.

    DSpark adds to its logits w2(w1[token before]), of a low rank: guesses then depend on what was drafted above them. (Its
    estimates of what will be accepted are not used.)

    (DFlash, section 4.) Nothing else of a text goes through the layers: a row of it costs one product for the keys and values of
    all of them.
    """

    def __init__(self, checkpoint: Checkpoint, spec: HeadSpec, target: Decoder) -> None:
        shape, own = spec.shape, spec.block
        assert own
        size, eps, target_size = shape.hidden_size, shape.rms_norm_eps, target.spec.shape.hidden_size
        super().__init__(checkpoint, spec, target)
        self._own = own
        self._fuse = linear(checkpoint, "fc", size, len(spec.feature_layers) * target_size)
        self._hidden_norm, self._final_norm = (norm(checkpoint, name, size, eps) for name in ("hidden_norm", "norm"))
        names = [f"layers.{index}" for index in range(spec.num_layers)]
        self._norms = [norm(checkpoint, f"{name}.input_layernorm", size, eps) for name in names]
        self._blocks = [Block(checkpoint, name, shape, size, window) for name, window in zip(names, own.windows, strict=True)]
        parts = [f"{name}.self_attn.{part}_proj" for name in names for part in "kv"]
        self._keys_and_values = merged_linear(checkpoint, dict.fromkeys(parts, shape.num_kv_heads * shape.head_dim), size, "none")
        self._key_norm = None
        if f"{names[0]}.self_attn.k_norm.weight" in checkpoint:
            weights = [checkpoint.take(f"{name}.self_attn.k_norm.weight", (shape.head_dim,)) for name in names]
            self._key_norm = RMSNorm(torch.stack(weights)[:, None], eps)
        token_map = read_token_map(checkpoint, spec.draft_vocab_size, target.spec.vocab_size)
        self.token_map = token_map.to(target.embedding.device)
        self._lm_head = read_lm_head(checkpoint, spec, self._embedding, target)
        self._pairs: tuple[Tensor, Linear] | None = None
        if own.pair_rank:
            self._pairs = self._read_pairs(checkpoint, target.spec.vocab_size, own.pair_rank)
        self._stack: StackedLayers | None = None

    def _keep_outputs(self, kept: Tensor) -> None:
        super()._keep_outputs(kept)
        if self._pairs:
            self._pairs = self._pairs[0], self._pairs[1].rows(kept)

    def quantized(self) -> Self:
        other = super().quantized()
        other._keys_and_values = self._keys_and_values.quantized()
        if self._pairs:
            other._pairs = self._pairs[0], self._pairs[1].quantized()
        return other

    def join_layers(self) -> None:
        self._stack = layer_stack([block.parts for block in self._blocks], [*self._norms[1:], self._final_norm])

    def fuse(self, features: Tensor) -> Tensor:
        return self._hidden_norm(self._fuse(features))

    def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, pool: KVPool, backend: AttentionBackend) -> Tensor:
        """Keeps what blocks look at; comes back with `hidden`, as nothing is foreseen yet."""
        shape = self.spec.shape
        rows = self._keys_and_values(hidden).view(-1, self.spec.num_layers, 2, shape.num_kv_heads, shape.head_dim)
        keys = rows[:, :, 0]
        keys = rotate((self._key_norm(keys) if self._key_norm else keys).flatten(1, 2), *self._rope.cos_sin(batch.positions))
        rows[:, :, 0] = keys.view_as(rows[:, :, 0])
        pool.storage.index_copy_(1, batch.slots, rows.transpose(0, 1))
        return hidden

    def guess_block(self, tokens: Tensor, batch: Batch, pool: KVPool, backend: AttentionBackend) -> Tensor:
        def attention(is_causal: bool) -> CachedAttention:
            return CachedAttention(replace(batch, tree_mask=None) if is_causal else batch, pool, backend)

        own = self._own
        kinds = {own.causal_without if window is None else own.causal_within for window in own.windows}
        if len(kinds) == 1:
            return self._run(tokens, batch.positions, attention(*kinds))
        both = ByWindow(attention(own.causal_without), attention(own.causal_within))
        return self._run(tokens, batch.positions, lambda layer, *rows: both.of(own.windows[layer])(layer, *rows))

    def _layers(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x, context = embed(tokens, self._embedding, self._own.embedding_scale), pass_context(self._rope, positions, attend)
        if self._stack and context.whole:
            return self._stack(x, self._norms[0](x), context.whole)[1]
        delta = None
        for index, (block, block_norm) in enumerate(zip(self._blocks, self._norms, strict=True)):
            x, normed = block_norm.after_adding(x, delta)
            x, delta = block(x, normed, index, context)
        return self._final_norm.after_adding(x, delta)[1]

    def logits(self, states: Tensor) -> Tensor:
        logits, own = self._lm_head(states), self._own
        if own.logit_scale != 1.0:
            logits = logits * own.logit_scale
        return own.logit_cap * torch.tanh(logits / own.logit_cap) if own.logit_cap else logits

    def after(self, tokens: Tensor, logits: Tensor) -> Tensor:
        if not self._pairs:
            return logits
        embedding, output = self._pairs
        return logits + output(embed(tokens, embedding))

    def _read_pairs(self, checkpoint: Checkpoint, vocab_size: int, rank: int) -> tuple[Tensor, Linear]:
        """w1 [V, R], by target ids, and w2 [W, R], by draft ids."""
        for name in ("confidence_head.proj.weight", "confidence_head.proj.bias"):
            checkpoint.skip(name)
        w2 = linear(checkpoint, "markov_head.markov_w2", self.spec.draft_vocab_size, rank)
        return checkpoint.take("markov_head.markov_w1.weight", (vocab_size, rank)), w2
