"""Whole texts through a target in one pass: for training heads, and for finding out whether one fits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.batch import Batch, HostRows
from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.models.decoder import Decoder, TargetOutput


def text_batch(texts: list[list[int]], device: torch.device) -> Batch:
    """Texts side by side, text after text, cached from slot 0 on."""
    starts = [0]
    for text in texts:
        starts.append(starts[-1] + len(text))
    return Batch(
        tokens=torch.tensor([token for text in texts for token in text], device=device),
        positions=torch.cat([torch.arange(len(text), device=device) for text in texts]),
        slots=torch.arange(starts[-1], device=device),
        query_starts=tuple(starts),
        rows=HostRows(
            tuple(len(text) for text in texts),
            tuple(range(start, start + len(text)) for start, text in zip(starts, texts, strict=False)),
        ),
        tree_mask=None,
        state_rows=torch.arange(len(texts), device=device),
    )


def text_pool(batch: Batch, rows: Sequence[RowShape], like: Tensor) -> KVPool:
    """A cache that holds just these texts, in the precision and on the device of `like`."""
    return KVPool(rows, len(batch.tokens), like.dtype, str(like.device))


def read_texts(target: Decoder, texts: list[list[int]], feature_layers: tuple[int, ...]) -> TargetOutput:
    """Hidden states and features of all tokens [T], text after text."""
    batch = text_batch(texts, target.embedding.device)
    pool = target.make_pool(len(batch.tokens), len(texts))
    return target.forward(batch, pool, ReferenceAttention(target.embedding.dtype), feature_layers)
