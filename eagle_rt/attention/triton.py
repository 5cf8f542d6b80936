"""Attention by our own Triton kernel, for any GPU: all sequences of a pass in one launch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels.tree_attention import mask_words, tree_attention

# A split is worth its own programs from this many rows on.
MIN_ROWS_A_SPLIT = 256
MAX_SPLITS = 32


@dataclass(frozen=True)
class TritonPlan:
    """The arguments of `tree_attention` that do not depend on the layer."""

    storage: Tensor
    slots: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    prefixes: Tensor
    masks: Tensor
    positions: Tensor
    max_queries: int
    num_splits: int


class TritonAttention:
    def plan(self, batch: Batch, pool: KVPool) -> TritonPlan:
        device = batch.tokens.device
        query_counts = [stop - start for start, stop in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
        slots = torch.zeros(batch.batch_size, max(batch.kv_lens), dtype=torch.int32, device=device)
        for row, (length, own) in enumerate(zip(batch.kv_lens, batch.kv_slots, strict=True)):
            slots[row, :length] = torch.arange(own.start, own.stop, device=device) if isinstance(own, slice) else own
        if batch.tree_mask is None:
            # Causal: row i of Q sees the rows before it and itself.
            seen = [
                length - count + 1 + row for length, count in zip(batch.kv_lens, query_counts, strict=True) for row in range(count)
            ]
            masks = torch.zeros(len(seen), 0, dtype=torch.int64, device=device)
        else:
            num_columns = batch.tree_mask.shape[-1]
            seen = [length - num_columns for length, count in zip(batch.kv_lens, query_counts, strict=True) for _ in range(count)]
            masks = mask_words(batch.tree_mask).flatten(0, 1)
        return TritonPlan(
            storage=pool.storage,
            slots=slots,
            query_starts=torch.tensor(batch.query_starts, dtype=torch.int32, device=device),
            kv_lens=torch.tensor(batch.kv_lens, dtype=torch.int32, device=device),
            prefixes=torch.tensor(seen, dtype=torch.int32, device=device),
            masks=masks,
            positions=batch.positions,
            max_queries=max(query_counts),
            num_splits=num_splits(max(batch.kv_lens)),
        )

    def run(self, queries: Tensor, layer: int, plan: TritonPlan, window: int | None) -> Tensor:
        return tree_attention(
            queries,
            plan.storage[layer],
            plan.slots,
            plan.query_starts,
            plan.kv_lens,
            plan.prefixes,
            plan.masks,
            plan.positions,
            max_queries=plan.max_queries,
            num_splits=plan.num_splits,
            window=window,
        )


def num_splits(longest: int) -> int:
    """A power of two that leaves each split at least MIN_ROWS_A_SPLIT rows of the longest context."""
    splits = 1
    while splits < MAX_SPLITS and longest >= 2 * splits * MIN_ROWS_A_SPLIT:
        splits *= 2
    return splits
