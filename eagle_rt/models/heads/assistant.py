"""Gemma 4's own drafters: a few layers that look at what the target keeps of a text, and keep nothing (Google, Multi-token
prediction drafters of Gemma 4, 2026; transformers' `gemma4_assistant`)."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.attention.cached import Attend, CachedAttention
from eagle_rt.batch import Batch, HostMask, HostRows, MaskWords, to_device
from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.models.decoder import FINAL_NORM, Decoder
from eagle_rt.models.families import GEMMA4S
from eagle_rt.models.heads.base import Head
from eagle_rt.models.heads.spec import HeadSpec
from eagle_rt.models.layer_shape import LayerShape
from eagle_rt.models.linear import linear
from eagle_rt.models.rearranged import RearrangedCheckpoint, own_name
from eagle_rt.models.spec import ModelSpec, model_spec
from eagle_rt.models.weights import Checkpoint

# Which targets theirs are read as.
ASSISTANTS = {
    "Gemma4AssistantForCausalLM": "Gemma4ForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM": "Gemma4UnifiedForCausalLM",
}


class AssistantHead(Head):
    """x = pre([embedding; hidden]); o = layers(x); the output layer reads o, and the next pass takes post(o) as the hidden state.

    Its layers attend to the keys and values of the target's last layers of their kind, from the position of the token after the
    last that is kept: all nodes of a tree see the same text, and each other only by their hidden states. A state is post(o) and,
    behind it, o. (The sparse output layer of the small ones, `use_ordered_embeddings`, is not used: all tokens are scored.)
    """

    def __init__(self, checkpoint: Checkpoint, spec: HeadSpec, own: ModelSpec, target: Decoder, dtype: torch.dtype) -> None:
        size, own_size = target.spec.shape.hidden_size, own.shape.hidden_size
        self._target, self._size = target, size
        self._layered = Decoder(
            RearrangedCheckpoint(checkpoint, own), own, context_length=spec.context_length, dtype=dtype, device=checkpoint.device
        )
        self._layered.places = [target.places[seen_layer(target.spec, window)] for window in own.windows]
        self._pre = linear(checkpoint, "pre_projection", own_size, 2 * size)
        self._post = linear(checkpoint, "post_projection", size, own_size)
        super().__init__(spec, target, self._layered.lm_head)

    @property
    def shape(self) -> LayerShape:
        """Of states."""
        return replace(self.spec.shape, hidden_size=self._size + self.spec.shape.hidden_size)

    @property
    def rows(self) -> tuple[RowShape, ...]:
        return ()

    def quantized(self) -> Self:
        other = super().quantized()
        other._layered = self._layered.quantized()
        return other

    def forward(self, tokens: Tensor, hidden: Tensor, batch: Batch, pool: KVPool, backend: AttentionBackend) -> Tensor:
        """pool: the target's."""
        batch = as_seen(batch)
        return self._run(tokens, batch.positions, CachedAttention(batch, pool, backend), hidden)

    def _layers(self, tokens: Tensor, positions: Tensor, attend: Attend, hidden: Tensor) -> Tensor:
        x = self._pre(torch.cat((self._target.embed(tokens), hidden[:, : self._size]), dim=1))
        output = self._layered.go_through(x, self._layered.context(positions, attend)).hidden
        return torch.cat((self._post(output), output), dim=1)

    def logits(self, states: Tensor) -> Tensor:
        return self._lm_head(states[:, self._size :])


def as_seen(batch: Batch) -> Batch:
    """The same of rows that see a text only, of which they see as many rows as their position says: a drafted node none of those
    that drafting would have filled."""
    mask, rows = batch.tree_mask, batch.rows
    if mask is None:
        return replace(batch, positions=batch.positions + 1)
    device, counts = batch.positions.device, [stop - start for start, stop in pairwise(batch.query_starts)]
    if isinstance(rows, HostRows):
        widths = mask.widths if isinstance(mask, HostMask) else (num_columns(mask),) * batch.batch_size
        kv_lens = tuple(kv_len - width for kv_len, width in zip(rows.kv_lens, widths, strict=True))
        rows = HostRows(kv_lens, tuple(own[:kv_len] for own, kv_len in zip(rows.kv_slots, kv_lens, strict=True)))
        positions = to_device(np.repeat(kv_lens, counts), device)
    else:
        assert not isinstance(mask, HostMask)
        rows = replace(rows, kv_lens=rows.kv_lens - num_columns(mask))
        positions = rows.kv_lens.long()[:, None].expand(-1, counts[0]).flatten()
    return replace(batch, positions=positions, rows=rows, tree_mask=all_see_the_last(mask, batch.batch_size))


def num_columns(mask: Tensor | MaskWords) -> int:
    return mask.num_columns if isinstance(mask, MaskWords) else mask.shape[2]


def all_see_the_last(mask: Tensor | MaskWords | HostMask, batch_size: int) -> Tensor | MaskWords | HostMask:
    """Of one column, which stands for the last row of a text: what comes before it is seen anyway."""
    if isinstance(mask, HostMask):
        return HostMask(np.ones((len(mask.visible), 1), dtype=np.bool_), (1,) * batch_size)
    if isinstance(mask, MaskWords):
        return MaskWords(torch.ones_like(mask.words[:, :, :1]), 1)
    return torch.ones_like(mask[:, :, :1])


def seen_layer(target: ModelSpec, window: int | None) -> int:
    """The last of the target's layers with a window, or without one, that keeps something.

    Raises:
        ValueError: there is none, so that no drafter of Gemma 4's can have been made for it.
    """
    alike = [layer for layer in target.row_layers if (target.windows[layer] is None) == (window is None)]
    if not alike:
        raise ValueError(f"the head looks at layers {'without a' if window is None else 'with a'} window, and the target has none")
    return max(alike)


def load_assistant(
    head_dir: Path, config: dict[str, Any], name: str, target: Decoder, dtype: torch.dtype, device: str
) -> tuple[Head, list[str]]:
    """As `load_head`, of a folder with such a drafter; name: its architecture."""
    own = assistant_spec(config, name)
    check_fit(own, config, target.spec)
    spec = HeadSpec(
        kind="ASSISTANT",
        shape=own.shape,
        num_layers=own.num_layers,
        rope=own.rope,
        context_length=target.spec.max_position_embeddings,
        draft_vocab_size=own.vocab_size,
        feature_layers=(FINAL_NORM,),
    )
    checkpoint = Checkpoint(head_dir, dtype, device, "head", lambda stored: own_name(stored, own))
    try:
        head = AssistantHead(checkpoint, spec, own, target, dtype)
        for ordered in ("masked_embedding.centroids.weight", "masked_embedding.token_ordering"):
            checkpoint.skip(ordered)
    finally:
        unused = checkpoint.finish()
    return head, unused


def assistant_spec(config: dict[str, Any], name: str) -> ModelSpec:
    """Of its layers, which keep nothing.

    Raises:
        ValueError: the config says nothing of them; or as `model_spec`.
    """
    if "text_config" not in config:
        raise ValueError(f"the head's config.json has no text_config, which {name} needs: download it again")
    keeping = {"architectures": [ASSISTANTS[name]], "num_kv_shared_layers": 0, "tie_word_embeddings": True}
    own = model_spec(config["text_config"] | keeping)
    return replace(own, layer_shapes=tuple(replace(shape, shares_rows=True) for shape in own.layer_shapes))


def check_fit(own: ModelSpec, config: dict[str, Any], target: ModelSpec) -> None:
    """Raises ValueError if it was made for another target."""
    if target.architecture not in GEMMA4S:
        raise ValueError(f"the head is a drafter of Gemma 4's, and the target is a {target.architecture}")
    size, wanted = target.shape.hidden_size, config.get("backbone_hidden_size")
    sizes, seen = (
        sorted({(shape.num_kv_heads, shape.head_dim) for shape in shapes})
        for shapes in (own.layer_shapes, [target.layer_shapes[seen_layer(target, window)] for window in own.windows])
    )
    if (wanted, own.vocab_size, sizes) != (size, target.vocab_size, seen):
        raise ValueError(
            f"the head was made for a target of hidden_size {wanted}, with {own.vocab_size} tokens and heads of keys {sizes}, and "
            f"the target's are {size}, {target.vocab_size} and {seen}: this head was made for another target"
        )
