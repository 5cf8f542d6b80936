"""Attention by torch's own kernel, for many sequences in one call: for one of few rows a call takes longer than its work.

The twin is `ReferenceAttention`, which takes one sequence after the other.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from eagle_rt.batch import Batch, HostRows, MaskWords
from eagle_rt.cache.pool import KVPool

Ints = NDArray[np.int64]
# Sequences go together if they have about as many queries and about as many rows as each other, since all are filled up to the
# most: up to FEW_ROWS or up to MANY_ROWS, beyond which copying the rows side by side takes longer than a call of its own for each
# sequence; and so many queries that a further call would take longer than the fillings, of which it is worth as many as CALL, in
# queries times rows. More than MANY_QUERIES go alone. All for two cores of a Xeon.
FEW_ROWS, MANY_ROWS = 256, 512
MANY_QUERIES, CALL = 32, 2000


@dataclass
class Group:
    """n sequences, filled up to Q queries and K rows each. Fillings are copies: of a sequence's last query, and of its last row.

    queries: [n * Q] rows of the pass, None where they are all rows in order; kept, outputs: which of those [n * Q] are no fillings,
    and their rows of the pass, None where all are. slots: [n * K], or None where the rows of a lone sequence lie side by side; then
    `views` holds the (keys, values) of every layer, [1, kv heads, K, head_dim] each.
    positions: [n, Q] of the queries. bias: [n, 1, Q, K], 0 where a query sees a row and -inf where it does not, or None where every
    query sees every row. biases: see `bias_of`.
    """

    shape: tuple[int, int, int]
    queries: Tensor | None
    kept: Tensor | None
    outputs: Tensor | None
    slots: Tensor | None
    views: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None
    positions: Tensor
    bias: Tensor | None
    biases: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupedPlan:
    pool: KVPool
    groups: tuple[Group, ...]


class GroupedAttention:
    """Sequences that are alike go through torch's attention in one call, their rows copied side by side first. Sequences with many
    queries or rows go alone, their rows read where they are if they lie side by side."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def plan(self, batch: Batch, pool: KVPool) -> GroupedPlan:
        assert isinstance(batch.rows, HostRows)
        counts = [stop - start for start, stop in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
        groups = together(counts, batch.rows.kv_lens)
        return GroupedPlan(pool, tuple(self._group(batch, pool, members) for members in groups))

    def run(self, queries: Tensor, layer: int, plan: GroupedPlan, window: int | None) -> Tensor:
        if len(plan.groups) == 1:  # which are in order
            return run_group(queries, layer, plan.pool, plan.groups[0], window)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in plan.groups:
            assert group.outputs is not None
            output.index_copy_(0, group.outputs, run_group(queries, layer, plan.pool, group, window))
        return output

    def _group(self, batch: Batch, pool: KVPool, members: list[int]) -> Group:
        """What the host knows is worked out there: a plan is many small calls, which take long beside a pass of few rows. Tensors
        are not looked into."""
        assert isinstance(batch.rows, HostRows)
        device = batch.tokens.device
        starts = np.array([batch.query_starts[b] for b in members])
        counts = np.array([batch.query_starts[b + 1] for b in members]) - starts
        lengths = np.array([batch.rows.kv_lens[b] for b in members])
        num_members, num_queries, num_rows = len(members), int(counts.max()), int(lengths.max())
        queries = kept = outputs = None
        positions = batch.positions
        if num_members < batch.batch_size or counts.min() < num_queries:
            places = np.arange(num_queries)
            rows = (starts[:, None] + np.minimum(places, counts[:, None] - 1)).ravel()
            real = (places < counts[:, None]).ravel().nonzero()[0]
            queries, kept, outputs = (torch.from_numpy(own).to(device) for own in (rows, real, rows[real]))
            positions = positions[queries]
        slots = views = None
        own_slots = [batch.rows.kv_slots[b] for b in members]
        if num_members == 1 and isinstance(own_slots[0], slice):
            views = pool.views(own_slots[0])
        else:
            slots = side_by_side(own_slots, lengths, device)
        visible = visible_rows(batch, members, counts, lengths)
        bias = None
        if visible is not None:
            bias = torch.zeros(visible.shape, dtype=self._dtype, device=device).masked_fill_(~visible, -torch.inf)[:, None]
        shape = (num_members, num_queries, num_rows)
        return Group(shape, queries, kept, outputs, slots, views, positions.view(num_members, num_queries), bias)


def together(counts: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Which of B sequences with so many queries and rows go through one call."""
    groups = []
    alike: defaultdict[bool, list[int]] = defaultdict(list)
    for b, (count, num_rows) in enumerate(zip(counts, lengths, strict=True)):
        if count > MANY_QUERIES or num_rows > MANY_ROWS:
            groups.append([b])
        else:
            alike[num_rows > FEW_ROWS].append(b)
    for members in alike.values():
        steps = most_queries([counts[b] for b in members], max(lengths[b] for b in members))
        parts: defaultdict[int, list[int]] = defaultdict(list)
        for b in members:
            parts[bisect_left(steps, counts[b])].append(b)
        groups += parts.values()
    return groups


def most_queries(counts: list[int], num_rows: int) -> list[int]:
    """The most queries of each call, ascending, such that all calls and fillings together take the least time."""
    sizes = sorted(Counter(counts).items())
    # For the smallest 0, 1, ... sizes: the least cost, and the steps that it takes.
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for stop, (most, _) in enumerate(sizes):
        num_members, ways = 0, []
        for start in range(stop, -1, -1):
            num_members += sizes[start][1]
            cost, steps = best[start]
            ways.append((cost + CALL + num_members * most * num_rows, steps))
        cost, steps = min(ways)
        best.append((cost, [*steps, most]))
    return best[-1][1]


def side_by_side(slots: list[Tensor | slice], lengths: Ints, device: torch.device) -> Tensor:
    """[n * K] the slots of n sequences, the last ones repeated."""
    places = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
    firsts = [own.start for own in slots if isinstance(own, slice)]
    if len(firsts) == len(slots):
        return torch.from_numpy((np.array(firsts)[:, None] + places).ravel()).to(device)
    rows = torch.from_numpy(places).to(device)
    return torch.cat([own.start + row if isinstance(own, slice) else own[row] for own, row in zip(slots, rows, strict=True)])


def visible_rows(batch: Batch, members: list[int], counts: Ints, lengths: Ints) -> Tensor | None:
    """[n, Q, K] bool for these sequences, or None where all is visible; what it says of fillings means nothing."""
    tree_mask, device = batch.tree_mask, batch.tokens.device
    assert not isinstance(tree_mask, MaskWords)
    num_queries, num_rows = counts.max(), lengths.max()
    are_alike = num_queries == 1 and lengths.min() == num_rows
    # To look into a mask on a GPU would mean to wait for it.
    if are_alike and (tree_mask is None or (device.type == "cpu" and all(bool(tree_mask[b].all()) for b in members))):
        return None
    lengths, rows = lengths[:, None, None], np.arange(num_rows)
    if tree_mask is None:
        num_seen = lengths - counts[:, None, None] + np.arange(1, num_queries + 1)[:, None]
        return torch.from_numpy(rows < np.minimum(num_seen, lengths)).to(device)
    prefixes = lengths - np.array([tree_mask[b].shape[1] for b in members])[:, None, None]
    visible = torch.from_numpy((rows < prefixes).repeat(num_queries, axis=1)).to(device)
    for own, b, start in zip(visible, members, prefixes[:, 0, 0].tolist(), strict=True):
        num_own, width = tree_mask[b].shape
        own[:num_own, start : start + width] = tree_mask[b]
    return visible


def run_group(queries: Tensor, layer: int, pool: KVPool, group: Group, window: int | None) -> Tensor:
    """[R, heads, head_dim] for the R queries of a group."""
    num_members, num_queries, _ = group.shape
    num_heads, head_dim = queries.shape[1:]
    own = queries if group.queries is None else queries.index_select(0, group.queries)
    own = own.view(num_members, num_queries, num_heads, head_dim)
    if group.views:
        keys, values = group.views[0][layer], group.views[1][layer]
    else:
        assert group.slots is not None
        keys, values = pool.read(layer, group.slots, num_members)
    shared = num_heads // keys.shape[1]
    # Half-precision products of all queries that share their keys take less time than of one head after the other.
    if shared > 1 and num_queries <= MANY_QUERIES and (num_queries == 1 or queries.dtype != torch.float32):
        own = own.view(num_members, num_queries, -1, shared, head_dim).transpose(1, 2).flatten(2, 3)
        bias = bias_of(group, window, shared if num_queries > 1 else 1, queries.dtype)
        attended = functional.scaled_dot_product_attention(own, keys, values, attn_mask=bias)
        attended = attended.unflatten(2, (num_queries, shared)).transpose(1, 2).reshape(-1, num_heads, head_dim)
    else:
        own, bias = own.transpose(1, 2), bias_of(group, window, 1, queries.dtype)
        attended = functional.scaled_dot_product_attention(own, keys, values, attn_mask=bias, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(-1, num_heads, head_dim)
    return attended if group.kept is None else attended.index_select(0, group.kept)


def bias_of(group: Group, window: int | None, times: int, dtype: torch.dtype) -> Tensor | None:
    """[n, 1, Q * times, K] of layers that look back so far, every query so many times over; made once for all layers alike."""
    if window is not None and group.shape[2] <= window:
        window = None
    if (window, times) not in group.biases:
        bias = group.bias if window is None else windowed(group, window, dtype)
        group.biases[window, times] = bias if bias is None or times == 1 else bias.repeat_interleave(times, dim=2)
    return group.biases[window, times]


def windowed(group: Group, window: int, dtype: torch.dtype) -> Tensor:
    """The bias of a layer that looks back only so far. A drafted row's position is at most what its place in the cache says, so no
    drafted row falls out of the window here."""
    num_members, num_queries, num_rows = group.shape
    distances = group.positions[:, :, None] - torch.arange(num_rows, device=group.positions.device)
    bias = group.bias
    if bias is None:
        bias = torch.zeros(num_members, 1, num_queries, num_rows, dtype=dtype, device=group.positions.device)
    return bias.masked_fill((distances >= window)[:, None], -torch.inf)
