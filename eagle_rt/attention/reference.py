"""Attention in plain torch, one sequence at a time: the slow, obvious twin."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.batch import Batch, HostMask, HostRows, MaskWords
from eagle_rt.cache.pool import KVPool


@dataclass(frozen=True)
class SequencePlan:
    """One sequence of the batch: its query rows, its cache rows, and what each query sees of them.

    bias: [Q, kv_len], 0 where a query sees a row and -inf where it does not, or None where every query sees every row;
    positions: [Q], which layers with a window look at.
    """

    rows: slice
    kv_slots: Tensor | slice
    bias: Tensor | None
    positions: Tensor


@dataclass(frozen=True)
class ReferencePlan:
    pool: KVPool
    sequences: tuple[SequencePlan, ...]


class ReferenceAttention:
    """Reads a sequence's rows and calls torch's own attention on them."""

    name = "reference"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def plan(self, batch: Batch, pool: KVPool) -> ReferencePlan:
        return ReferencePlan(pool, tuple(sequence_plan(batch, b, self._dtype) for b in range(batch.batch_size)))

    def run(self, queries: Tensor, layer: int, plan: ReferencePlan, window: int | None, sinks: Tensor | None = None) -> Tensor:
        return torch.cat([run_sequence(queries[own.rows], plan.pool, layer, own, window, sinks) for own in plan.sequences])


def sequence_plan(batch: Batch, b: int, dtype: torch.dtype) -> SequencePlan:
    assert isinstance(batch.rows, HostRows)
    rows, slots = slice(batch.query_starts[b], batch.query_starts[b + 1]), batch.rows.kv_slots[b]
    kv_slots = slice(slots.start, slots.stop) if isinstance(slots, range) else torch.from_numpy(slots).to(batch.tokens.device)
    visible, bias = visible_rows(batch, b, batch.rows.kv_lens[b]), None
    if visible is not None:
        bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    return SequencePlan(rows, kv_slots, bias, batch.positions[rows])


def run_sequence(
    queries: Tensor, pool: KVPool, layer: int, sequence: SequencePlan, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    keys, values = pool.read(layer, sequence.kv_slots)
    bias, kv_len = sequence.bias, keys.shape[2]
    if window is not None and kv_len > window:
        # A drafted row's position is at most what its place in the cache says, so no drafted row falls out of the window here.
        distances = sequence.positions[:, None] - torch.arange(kv_len, device=keys.device)
        if bias is None:
            bias = torch.zeros(distances.shape, dtype=queries.dtype, device=keys.device)
        bias = bias.masked_fill(distances >= window, -torch.inf)
    own_sinks = None if sinks is None else sinks[:, None]
    attended = attend(queries.transpose(0, 1)[None], keys, values, bias, own_sinks, pool.rows[layer].scale)
    return attended[0].transpose(0, 1)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, sinks: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """torch's attention of queries [n, heads, Q, head_dim], which share keys [n, kv heads, K, head_dim] and values in groups; bias:
    [n, 1, Q, K] or less. sinks: [heads, Q], or one for all queries of a head; a key of no direction scores what the bias says, and
    there its value is nothing. scale: see `RowShape`."""
    if sinks is not None:
        shape = (*queries.shape[:3], keys.shape[2])
        seen = queries.new_zeros(1, 1, 1, 1) if bias is None else bias
        bias = torch.cat((seen.expand(shape), sinks.to(queries.dtype)[..., None].expand(*shape[:3], 1)), dim=3)
        keys, values = (functional.pad(own, (0, 0, 0, 1)) for own in (keys, values))
    shares = queries.shape[1] != keys.shape[1]
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, enable_gqa=shares, scale=scale)


def visible_rows(batch: Batch, b: int, kv_len: int) -> Tensor | None:
    """[Q, kv_len] bool for sequence b, or None where all is visible."""
    num_queries = batch.query_starts[b + 1] - batch.query_starts[b]
    device = batch.tokens.device
    if batch.tree_mask is None:
        if num_queries == 1:
            return None
        return torch.ones(num_queries, kv_len, dtype=torch.bool, device=device).tril(kv_len - num_queries)
    assert not isinstance(batch.tree_mask, MaskWords)
    if isinstance(batch.tree_mask, HostMask):
        own = slice(batch.query_starts[b], batch.query_starts[b + 1])
        visible = torch.from_numpy(batch.tree_mask.visible[own, : batch.tree_mask.widths[b]]).to(device)
    else:
        visible = batch.tree_mask[b]
    # A lone row of a chain sees all that came before it. To look into a mask on a GPU would mean to wait for it.
    if num_queries == 1 and not visible.is_cuda and bool(visible.all()):
        return None
    prefix = torch.ones(num_queries, kv_len - visible.shape[1], dtype=torch.bool, device=device)
    return torch.cat((prefix, visible), dim=1)
