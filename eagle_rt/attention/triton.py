"""Attention by our own Triton kernel, for any GPU: all sequences of a pass in one launch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle_rt.batch import Batch, DeviceRows, HostMask, HostRows, MaskWords, to_device
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels.triton.tree_attention import Ragged, Uniform, mask_words, tree_attention


@dataclass(frozen=True)
class TritonPlan:
    """The arguments of `tree_attention` that do not depend on the layer."""

    pool: KVPool
    rows: DeviceRows
    queries_of: Uniform | Ragged
    masks: Tensor
    positions: Tensor


class TritonAttention:
    """Lengths stay on the device. Where the host knows them too, it may also give sequences of unequal numbers of queries."""

    name = "triton"

    def plan(self, batch: Batch, pool: KVPool) -> TritonPlan:
        device, mask = batch.tokens.device, batch.tree_mask
        rows = device_rows(batch.rows, device) if isinstance(batch.rows, HostRows) else batch.rows
        counts = [stop - start for start, stop in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
        if isinstance(mask, Tensor):
            mask = MaskWords(mask_words(mask), mask.shape[-1])
        if isinstance(mask, MaskWords):
            masks, queries_of = mask.words.flatten(0, 1), Uniform(counts[0], mask.num_columns)
        elif mask is None:
            masks = torch.zeros(len(batch.tokens), 0, dtype=torch.int64, device=device)
            queries_of = Uniform(counts[0], None) if min(counts) == max(counts) else ragged(batch, counts, None)
        else:
            masks, queries_of = mask_words(to_device(mask.visible, device)), ragged(batch, counts, mask)
        return TritonPlan(pool, rows, queries_of, masks, batch.positions)

    def run(self, queries: Tensor, layer: int, plan: TritonPlan, window: int | None, sinks: Tensor | None = None) -> Tensor:
        row = plan.pool.rows[layer]
        return tree_attention(
            queries,
            plan.pool.layers[layer],
            plan.rows.pages,
            plan.rows.kv_lens,
            plan.queries_of,
            plan.masks,
            plan.positions,
            page_size=plan.rows.page_size,
            window=window,
            sinks=sinks,
            value_dim=row.value_dim,
            scale=row.scale,
        )


def ragged(batch: Batch, counts: list[int], mask: HostMask | None) -> Ragged:
    """Queries of which sequences have `counts`, and lengths that the host knows."""
    assert isinstance(batch.rows, HostRows)
    # What lies past the rows that all see: a tree, or, where nothing but the order says what is seen, the rows after one's own.
    causal = np.repeat(batch.query_starts[1:], counts) - 1 - np.arange(len(batch.tokens))
    unseen = np.repeat(mask.widths, counts) if mask else causal
    device, prefixes = batch.tokens.device, np.repeat(batch.rows.kv_lens, counts) - unseen
    return Ragged(max(counts), to_device(batch.query_starts, device, torch.int32), to_device(prefixes, device, torch.int32))


def device_rows(rows: HostRows, device: torch.device) -> DeviceRows:
    """Slots as pages of one row."""
    slots = np.zeros((len(rows.kv_lens), max(rows.kv_lens)), dtype=np.int32)
    for row, own in zip(slots, rows.slot_arrays(), strict=True):
        row[: len(own)] = own
    return DeviceRows(to_device(rows.kv_lens, device, torch.int32), to_device(slots, device), page_size=1)
