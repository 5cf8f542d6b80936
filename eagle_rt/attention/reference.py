"""Attention in plain torch, one sequence at a time: the slow, obvious twin, and the one that serves on a CPU."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool


@dataclass(frozen=True)
class SequencePlan:
    """One sequence of the batch: its query rows, its cache rows, and what each query sees of them.

    visible: [Q, kv_len] bool, or None where every query sees every row; distances: [Q, kv_len] query position minus row, used
    by layers with a window.
    """

    rows: slice
    kv_slots: Tensor | slice
    visible: Tensor | None
    distances: Tensor


class ReferenceAttention:
    """Gathers a sequence's rows (a view, where they lie side by side) and calls torch's own attention on them."""

    def plan(self, batch: Batch) -> list[SequencePlan]:
        sequences = []
        for b in range(batch.batch_size):
            rows = slice(batch.query_starts[b], batch.query_starts[b + 1])
            visible = visible_rows(batch, b)
            columns = torch.arange(batch.kv_lens[b], device=batch.tokens.device)
            distances = batch.positions[rows, None] - columns
            sequences.append(SequencePlan(rows, batch.kv_slots[b], visible, distances))
        return sequences

    def run(self, queries: Tensor, pool: KVPool, layer: int, plan: list[SequencePlan], window: int | None) -> Tensor:
        outputs = [self._run_sequence(queries[sequence.rows], pool, layer, sequence, window) for sequence in plan]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _run_sequence(self, queries: Tensor, pool: KVPool, layer: int, sequence: SequencePlan, window: int | None) -> Tensor:
        num_queries, num_heads, head_dim = queries.shape
        keys, values = pool.read(layer, sequence.kv_slots)
        num_kv_heads = keys.shape[1]
        group = num_heads // num_kv_heads
        visible = sequence.visible
        if window is not None and keys.shape[0] > window:
            # Drafted rows are nearer than their column says, so a distance can only be too small: never past the window.
            in_window = sequence.distances < window
            visible = in_window if visible is None else visible & in_window

        # The query heads of a group become further rows of their key head: [1, kv heads, Q * group, head_dim].
        packed = queries.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim)
        mask = visible.repeat_interleave(group, dim=0) if visible is not None else None
        output = functional.scaled_dot_product_attention(
            packed, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=mask
        )
        return output.view(num_kv_heads, num_queries, group, head_dim).transpose(0, 1).reshape(queries.shape)


def visible_rows(batch: Batch, b: int) -> Tensor | None:
    """[Q, kv_len] bool for sequence b, or None where all is visible."""
    num_queries = batch.query_starts[b + 1] - batch.query_starts[b]
    kv_len = batch.kv_lens[b]
    device = batch.tokens.device
    if batch.tree_mask is None:
        if num_queries == 1:
            return None
        return torch.ones(num_queries, kv_len, dtype=torch.bool, device=device).tril(kv_len - num_queries)
    tree_mask = batch.tree_mask[b]
    if tree_mask.shape == (1, 1):
        return None
    prefix = torch.ones(num_queries, kv_len - tree_mask.shape[1], dtype=torch.bool, device=device)
    return torch.cat((prefix, tree_mask), dim=1)
