"""What all draft heads share: small models that extrapolate the target's hidden states."""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.attention.cached import Attend, CachedAttention
from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.kernels.embed import embed
from eagle_rt.kernels.rms_norm import RMSNorm
from eagle_rt.kernels.whole_pass import StackedLayers, layer_stack
from eagle_rt.models.compiled import CompilableLayers
from eagle_rt.models.decoder import Decoder
from eagle_rt.models.heads.block_spec import BlockSpec
from eagle_rt.models.heads.spec import HeadSpec
from eagle_rt.models.layer_shape import LayerShape
from eagle_rt.models.layers import Block, norm, optional_norm
from eagle_rt.models.linear import Linear
from eagle_rt.models.pass_context import pass_context
from eagle_rt.models.rope import Rope
from eagle_rt.models.weights import Checkpoint
from eagle_rt.token_map.token_map import TokenMap, identity_map


@dataclass(frozen=True)
class MaskRow:
    """What a head is fed in place of tokens and states that nobody knows yet, so that it guesses many levels in one pass: a target
    id and a hidden state [H] (P-EAGLE; Hui et al., 2026)."""

    token: int
    hidden: Tensor


class DraftHead(Protocol):
    """What drafting needs of a head.

    A head's row t is made from the token at t + 1 and the hidden state at t, has position t, and predicts the token at t + 2. A
    head with a `block` makes its rows of hidden states alone, predicts nothing by them, and guesses by `guess_block`.
    """

    mask_row: MaskRow | None

    @property
    def block(self) -> BlockSpec | None: ...
    @property
    def feature_layers(self) -> tuple[int, ...]: ...
    @property
    def token_map(self) -> TokenMap: ...
    @property
    def shape(self) -> LayerShape: ...
    @property
    def rows(self) -> tuple[RowShape, ...]:
        """What each of its layers keeps of a token; none if it looks at what the target keeps, whose pool it is then given."""
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [T, F] to the head's hidden states [T, H]."""
        ...

    def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, pool: KVPool, backend: AttentionBackend) -> Tensor:
        """One pass over T rows, target ids [T] and hidden states [T, H]: the states [T, H] that stand in for the hidden
        states one token later."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """States [R, H] to [R, W] over the draft vocabulary."""
        ...

    def guess_block(self, tokens: Tensor, batch: Batch, pool: KVPool, backend: AttentionBackend) -> Tensor:
        """One pass over blocks of the last certain token of a text and masks in place of those that follow, target ids [T]: states
        [T, H] of what stands in each of these places. batch: its tree mask lets the rows of a block see all of it."""
        ...

    def after(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """[R, W] of what a block tells of places, where these target ids [R] stand before them."""
        ...


class Head(CompilableLayers, ABC):
    """What a head goes by stands in `spec`; weights are fixed at construction. Kinds differ in `_layers`, a pass over tokens [T],
    positions [T] and hidden states [T, H], and in what `logits` makes of its states."""

    def __init__(self, spec: HeadSpec, target: Decoder, lm_head: Linear) -> None:
        self.spec = spec
        self.mask_row: MaskRow | None = None
        self.token_map = identity_map(target.spec.vocab_size)
        self._lm_head = lm_head

    @property
    def block(self) -> BlockSpec | None:
        return self.spec.block

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.spec.feature_layers

    @property
    def shape(self) -> LayerShape:
        return self.spec.shape

    @property
    def rows(self) -> tuple[RowShape, ...]:
        return (self.shape.row,) * self.spec.num_layers

    def with_spec(self, **changes: Any) -> Self:
        """The same weights, read another way."""
        other = copy.copy(self)
        other.spec = replace(self.spec, **changes)
        other._compiled = None
        return other

    def narrowed(self, target_ids: Tensor) -> Self:
        """The same head with a draft vocabulary of only those of its target ids that are in `target_ids`, in that order.

        FR-Spec (Zhao et al., 2025): fewer rows of the output layer to read, and the softmax is over those alone.

        Raises:
            ValueError: none of them is.
        """
        ours = self.token_map.target_ids
        draft_id_of = torch.full((int(max(ours.max(), target_ids.max())) + 1,), -1, device=ours.device)
        draft_id_of[ours] = torch.arange(len(ours), device=ours.device)
        kept = draft_id_of[target_ids.to(ours.device)]
        kept = kept[kept >= 0]
        if len(kept) == 0:
            raise ValueError(f"none of the {len(target_ids)} tokens of the token map is in the head's draft vocabulary")
        other = copy.copy(self)
        other.token_map = TokenMap(ours[kept])
        other._keep_outputs(kept)
        return other

    def _keep_outputs(self, kept: Tensor) -> None:
        """Only those of these draft ids."""
        self._lm_head = self._lm_head.rows(kept)

    def quantized(self) -> Self:
        """The same head with weights of eight bits, but for embeddings, norms and what reads hidden states: half as much is read
        for every level that is drafted. What is drafted changes hardly, and what is accepted of it is up to the target as ever.

        No norm has made hidden states alike: beside a few thousands, sixteen bits hold nothing of small numbers.
        """
        other = copy.copy(self)
        other._lm_head = self._lm_head.quantized()
        other._compiled = None
        return other

    def join_layers(self) -> None:
        """Make compiled functions of layers, where that can be, once all weights are read."""

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, pool: KVPool, backend: AttentionBackend) -> Tensor:
        return self._run(tokens, batch.positions, CachedAttention(batch, pool, backend), hidden)

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor: ...

    def guess_block(self, tokens: Tensor, batch: Batch, pool: KVPool, backend: AttentionBackend) -> Tensor:
        raise NotImplementedError(f"a head of kind {self.spec.kind} guesses no blocks")

    def after(self, tokens: Tensor, logits: Tensor) -> Tensor:
        return logits


class LayeredHead(Head):
    """A head of decoder layers of its own, whose embeddings may be the target's."""

    _blocks: list[Block]

    def __init__(self, checkpoint: Checkpoint, spec: HeadSpec, target: Decoder) -> None:
        super().__init__(spec, target, target.lm_head)
        self._embedding = self._own_embedding(checkpoint, target)
        self._rope = self._make_rope()

    def with_spec(self, **changes: Any) -> Self:
        other = super().with_spec(**changes)
        other._rope = other._make_rope()
        return other

    def quantized(self) -> Self:
        other = super().quantized()
        other._blocks = [block.quantized() for block in self._blocks]
        other.join_layers()
        return other

    def _make_rope(self) -> Rope:
        return Rope(self.spec.rope, self.spec.context_length, self._embedding.dtype, str(self._embedding.device))

    def _own_embedding(self, checkpoint: Checkpoint, target: Decoder) -> Tensor:
        """[V, H] its own, or the target's where it has none.

        Raises:
            ValueError: it has none, and the target's are of another size.
        """
        size, target_size = self.spec.shape.hidden_size, target.spec.shape.hidden_size
        own = checkpoint.take_optional("embed_tokens.weight", (target.spec.vocab_size, size))
        if own is None and size != target_size:
            raise ValueError(
                f"the head's hidden_size is {size} and the target's {target_size}, so the head cannot use the target's embeddings, "
                f"and {checkpoint.model_dir} holds none: this head was made for another target"
            )
        return target.embedding if own is None else own


class EagleLayers(LayeredHead):
    """A head of one or a few decoder layers. Kinds differ in how token and hidden state enter the first of them; `_fuse` is what
    projects to its input, if anything does."""

    def __init__(self, checkpoint: Checkpoint, spec: HeadSpec, target: Decoder, first_input_size: int) -> None:
        super().__init__(checkpoint, spec, target)
        shape = spec.shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self._blocks = [
            Block(checkpoint, f"layers.{index}", shape, size if index else first_input_size, experts=spec.experts)
            for index in range(spec.num_layers)
        ]
        self._later_norms = [
            norm(checkpoint, later_norm_name(checkpoint, index, spec.later_norm), size, eps) for index in range(1, spec.num_layers)
        ]
        self._fuse: Linear | None = None
        self._final_norm: RMSNorm | None = optional_norm(checkpoint, "norm", size, eps)
        self._stacks: list[StackedLayers] | None = None

    def join_layers(self) -> None:
        """One function of the first layer, and one of those after it."""
        parts, norms = [block.parts for block in self._blocks], [*self._later_norms, self._final_norm]
        runs = [(0, 1), (1, len(parts))] if len(parts) > 1 else [(0, 1)]
        stacks = [layer_stack(parts[first:last], norms[first:last], first) for first, last in runs]
        self._stacks = [stack for stack in stacks if stack]
        if len(self._stacks) < len(runs):
            self._stacks = None

    def _layers(self, tokens: Tensor, positions: Tensor, attend: Attend, hidden: Tensor) -> Tensor:
        context = pass_context(self._rope, positions, attend)
        x, attention_input = self._enter(embed(tokens, self._embedding), hidden, positions)
        if self._stacks and context.whole:
            normed = attention_input
            for stack in self._stacks:
                x, normed, _ = stack(x, normed, context.whole)
            return normed if self._final_norm and self.spec.norm_output else x
        x, delta = self._blocks[0](x, attention_input, 0, context)
        for index, (block, block_norm) in enumerate(zip(self._blocks[1:], self._later_norms, strict=True), start=1):
            x, normed = block_norm.after_adding(x, delta)
            x, delta = block(x, normed, index, context)
        x = x + delta
        return self._final_norm(x) if self._final_norm and self.spec.norm_output else x

    def logits(self, states: Tensor) -> Tensor:
        return self._lm_head(states if self.spec.norm_output or not self._final_norm else self._final_norm(states))

    @abstractmethod
    def _enter(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(what the first layer adds to [T, H], what its attention reads [T, first_input_size])."""


def later_norm_name(checkpoint: Checkpoint, index: int, preferred: str) -> str:
    """Which norm stands before the attention of layer `index` > 0: engines differ, and some files hold both."""
    names = [f"layers.{index}.{name}" for name in (preferred, "input_layernorm", "hidden_norm")]
    return next((name for name in names if f"{name}.weight" in checkpoint), names[0])
