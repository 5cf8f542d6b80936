"""Attention by FlashInfer's fa2 prefill kernel, which takes tree masks (Ye et al., 2025); planned on the host for every pass."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_rt.attention.reference import visible_rows
from eagle_rt.batch import Batch, HostRows, to_device
from eagle_rt.cache.pool import KVPool

WORKSPACE_BYTES = 512 * 2**20
HEAD_DIMS = (64, 128, 256)


class FlashInferPlan:
    """One wrapper for each kind of layer in the pass: they differ in query heads and in window."""

    def __init__(self, make_wrapper: Callable[[], Any], batch: Batch, pool: KVPool) -> None:
        assert isinstance(batch.rows, HostRows)
        self.pool = pool
        self._make_wrapper, self._batch, self._rows = make_wrapper, batch, batch.rows
        self._wrappers: dict[tuple[int, int | None], Any] = {}

    def wrapper(self, queries: Tensor, window: int | None) -> Any:
        """Planned when a layer first asks for it; the later ones only run it."""
        key = (queries.shape[1], window)
        if key not in self._wrappers:
            self._wrappers[key] = self._planned(queries, window)
        return self._wrappers[key]

    def _planned(self, queries: Tensor, window: int | None) -> Any:
        batch, rows, storage = self._batch, self._rows, self.pool.storage
        device = storage.device
        # A page of the kernel is one row, so that any rows in any order can be named.
        slots = np.concatenate(rows.slot_arrays())
        kv_starts = np.cumsum([0, *rows.kv_lens])
        mask = None if batch.tree_mask is None else flat_mask(batch, rows, window)
        wrapper = self._make_wrapper()
        wrapper.plan(
            to_device(batch.query_starts, device, torch.int32),
            to_device(kv_starts, device, torch.int32),
            to_device(slots, device, torch.int32),
            torch.ones(batch.batch_size, dtype=torch.int32, device=device),
            queries.shape[1],
            storage.shape[3],
            storage.shape[4],
            1,
            custom_mask=mask,
            causal=mask is None,
            window_left=-1 if window is None or mask is not None else window - 1,
            q_data_type=queries.dtype,
            kv_data_type=storage.dtype,
        )
        return wrapper


class FlashInferAttention:
    """make_wrapper: gives a new `BatchPrefillWithPagedKVCacheWrapper`."""

    name = "flashinfer"

    def __init__(self, make_wrapper: Callable[[], Any]) -> None:
        self._make_wrapper = make_wrapper

    def plan(self, batch: Batch, pool: KVPool) -> FlashInferPlan:
        return FlashInferPlan(self._make_wrapper, batch, pool)

    def run(self, queries: Tensor, layer: int, plan: FlashInferPlan, window: int | None, sinks: Tensor | None = None) -> Tensor:
        queries = queries.contiguous()
        # [slots, 2, rows of a page, heads, head_dim]
        cache = plan.pool.layers[layer].unsqueeze(2)
        wrapper, out = plan.wrapper(queries, window), torch.empty_like(queries)
        if sinks is None:
            return wrapper.run(queries, cache, out=out)
        # Of the softmax's denominator, which is told as its logarithm to the base 2, the sink has a part.
        attended, log2_total = wrapper.run(queries, cache, out=out, return_lse=True)
        share = torch.sigmoid(log2_total * math.log(2) - sinks)
        return (attended * share[..., None]).to(queries.dtype)


def flat_mask(batch: Batch, rows: HostRows, window: int | None) -> Tensor:
    """[sum of Q * kv_len] bool: what each query sees, sequence by sequence and row by row."""
    parts = []
    for b, kv_len in enumerate(rows.kv_lens):
        own = slice(batch.query_starts[b], batch.query_starts[b + 1])
        visible = visible_rows(batch, b, kv_len)
        if visible is None:
            visible = torch.ones(own.stop - own.start, kv_len, dtype=torch.bool, device=batch.tokens.device)
        if window is not None:
            distances = batch.positions[own, None] - torch.arange(kv_len, device=batch.positions.device)
            visible = visible & (distances < window)
        parts.append(visible.flatten())
    return torch.cat(parts)


def wrappers_on(device: str) -> Callable[[], Any]:
    """FlashInfer's wrappers over one workspace: of two passes on one stream only one runs at a time. Needs flashinfer."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # pyright: ignore[reportAttributeAccessIssue]

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    # Only fa2 honours masks, and which backend `auto` takes depends on the plans before.
    return lambda: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
