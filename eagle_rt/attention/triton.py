"""Attention by our own Triton kernel, for any GPU: all sequences of a pass in one launch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle_rt.batch import Batch, DeviceRows, HostMask, HostRows, MaskWords
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels.triton.tree_attention import mask_words, tree_attention


@dataclass(frozen=True)
class TritonPlan:
    """The arguments of `tree_attention` that do not depend on the layer."""

    storage: Tensor
    rows: DeviceRows
    query_starts: Tensor
    prefixes: Tensor
    masks: Tensor
    positions: Tensor
    max_queries: int


class TritonAttention:
    """Lengths stay on the device. Where the host knows them too, it may also give sequences of unequal numbers of queries."""

    def plan(self, batch: Batch, pool: KVPool) -> TritonPlan:
        device = batch.tokens.device
        rows = device_rows(batch.rows, device) if isinstance(batch.rows, HostRows) else batch.rows
        counts = [stop - start for start, stop in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
        max_queries = max(counts)
        if min(counts) == max_queries:
            query_starts = torch.arange(0, len(batch.tokens) + 1, max_queries, dtype=torch.int32, device=device)
            kv_lens = rows.kv_lens.repeat_interleave(max_queries)
            later = torch.arange(max_queries - 1, -1, -1, dtype=torch.int32, device=device).repeat(batch.batch_size)
        else:
            query_starts = torch.tensor(batch.query_starts, dtype=torch.int32, device=device)
            kv_lens = rows.kv_lens.repeat_interleave(query_starts.diff(), output_size=len(batch.tokens))
            later = torch.tensor([last for count in counts for last in range(count - 1, -1, -1)], dtype=torch.int32, device=device)
        if batch.tree_mask is None:
            # Causal: a row sees all but the ones after it.
            prefixes, masks = kv_lens - later, torch.zeros(len(batch.tokens), 0, dtype=torch.int64, device=device)
        elif isinstance(batch.tree_mask, HostMask):
            widths = np.repeat(batch.tree_mask.widths, counts).astype(np.int32)
            prefixes = kv_lens - torch.from_numpy(widths).to(device)
            masks = mask_words(torch.from_numpy(batch.tree_mask.visible).to(device))
        else:
            mask = batch.tree_mask
            if isinstance(mask, Tensor):
                mask = MaskWords(mask_words(mask), mask.shape[-1])
            prefixes, masks = kv_lens - mask.num_columns, mask.words.flatten(0, 1)
        return TritonPlan(pool.storage, rows, query_starts, prefixes, masks, batch.positions, max_queries)

    def run(self, queries: Tensor, layer: int, plan: TritonPlan, window: int | None) -> Tensor:
        return tree_attention(
            queries,
            plan.storage[layer],
            plan.rows.pages,
            plan.query_starts,
            plan.rows.kv_lens,
            plan.prefixes,
            plan.masks,
            plan.positions,
            max_queries=plan.max_queries,
            page_size=plan.rows.page_size,
            window=window,
        )


def device_rows(rows: HostRows, device: torch.device) -> DeviceRows:
    """Slots as pages of one row."""
    slots = torch.zeros(len(rows.kv_lens), max(rows.kv_lens), dtype=torch.int32, device=device)
    for row, own in enumerate(rows.slot_tensors(device)):
        slots[row, : len(own)] = own
    return DeviceRows(torch.tensor(rows.kv_lens, dtype=torch.int32, device=device), slots, page_size=1)
