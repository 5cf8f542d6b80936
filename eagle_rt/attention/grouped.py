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

from eagle_rt.attention.filled import filled
from eagle_rt.attention.reference import attend
from eagle_rt.batch import NO_SLOTS, NOTHING_SEEN, Batch, HostMask, HostRows, MaskWords
from eagle_rt.cache.pool import KVPool

# Sequences go together if they have about as many queries and about as many rows as each other, since all are filled up to the
# most: up to FEW_ROWS or up to MANY_ROWS, beyond which copying the rows side by side takes longer than a call of its own for each
# sequence; and so many queries that a further call would take longer than the fillings, of which it is worth as many as CALL, in
# queries times rows. More than MANY_QUERIES go alone. All for two cores of a Xeon.
FEW_ROWS, MANY_ROWS = 256, 512
MANY_QUERIES, CALL = 32, 4000


@dataclass
class Group:
    """n sequences, filled up to Q queries and K rows each. Fillings are copies: of a sequence's last query, and of its last row.

    queries: [n * Q] rows of the pass, None where they are all rows in order; kept, outputs: which of those [n * Q] are no fillings,
    and their rows of the pass, None where all are. slots: [n * K], or None where the rows of a lone sequence lie side by side; then
    `views` holds the (keys, values) of every layer, [1, kv heads, K, numbers of a head] each.
    positions: of all queries of the pass. bias: [n, 1, Q, K], 0 where a query sees a row and -inf where it does not, or None where
    every query sees every row. biases: see `bias_of`.
    """

    shape: tuple[int, int, int]
    queries: Tensor | None
    kept: Tensor | None
    outputs: Tensor | None
    slots: Tensor | None
    views: tuple[tuple[Tensor, Tensor], ...] | None
    positions: Tensor
    bias: Tensor | None
    biases: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupedPlan:
    """buffer: flat, where the rows of a group are copied side by side, layer by layer."""

    pool: KVPool
    groups: tuple[Group, ...]
    buffer: Tensor


class GroupedAttention:
    """Sequences that are alike go through torch's attention in one call, their rows copied side by side first. Sequences with many
    queries or rows go alone, their rows read where they are if they lie side by side."""

    name = "torch"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory = torch.empty(0, dtype=dtype)
        # Compiled now rather than in the first pass.
        one = np.ones(1, dtype=np.int64)
        filled(one - 1, np.arange(2), one, one, NO_SLOTS, one, NOTHING_SEEN)

    def plan(self, batch: Batch, pool: KVPool) -> GroupedPlan:
        assert isinstance(batch.rows, HostRows)
        counts = [stop - start for start, stop in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
        known = known_on_host(batch)
        groups = tuple(self._group(batch, pool, members, known) for members in together(counts, batch.rows.kv_lens))
        return GroupedPlan(pool, groups, self._buffer(pool, max(0 if own.slots is None else len(own.slots) for own in groups)))

    def run(self, queries: Tensor, layer: int, plan: GroupedPlan, window: int | None, sinks: Tensor | None = None) -> Tensor:
        if len(plan.groups) == 1:  # which are in order
            return run_group(queries, layer, plan, plan.groups[0], window, sinks)
        output = queries.new_empty(*queries.shape[:2], plan.pool.rows[layer].output_dim)
        for group in plan.groups:
            assert group.outputs is not None
            output.index_copy_(0, group.outputs, run_group(queries, layer, plan, group, window, sinks))
        return output

    def _buffer(self, pool: KVPool, num_rows: int) -> Tensor:
        """The same memory for every pass: for some new megabytes a system may take longer than for copying into them."""
        size = num_rows * max(row.num_numbers for row in pool.storages)
        if len(self._memory) < size:
            with torch.inference_mode(False):  # to be written to outside of it too
                self._memory = torch.empty(size * 5 // 4, dtype=self._dtype, device=pool.device)
        return self._memory

    def _group(self, batch: Batch, pool: KVPool, members: list[int], known: tuple[NDArray, ...]) -> Group:
        """Tensors are not looked into."""
        assert isinstance(batch.rows, HostRows)
        own_queries, own_kept, own_outputs, own_slots, own_bias, sees_all = filled(np.array(members), *known)
        num_members, _, num_queries, num_rows = own_bias.shape
        device = pool.device
        queries = kept = outputs = None
        if num_members < batch.batch_size or len(own_kept) < len(own_queries):
            queries, kept, outputs = (on(device, own) for own in (own_queries, own_kept, own_outputs))
        slots = views = bias = None
        first = batch.rows.kv_slots[members[0]]
        if num_members == 1 and isinstance(first, range):
            views = pool.views(slice(first.start, first.stop))
        else:
            slots = on(device, own_slots)
        if not sees_all:
            bias = on(device, own_bias)
            bias = bias if bias.dtype == self._dtype else bias.to(self._dtype)
            if isinstance(batch.tree_mask, Tensor):
                bias = with_mask(bias, batch.tree_mask[members], [batch.rows.kv_lens[b] for b in members])
        return Group((num_members, num_queries, num_rows), queries, kept, outputs, slots, views, batch.positions, bias)


def on(device: torch.device, own: NDArray) -> Tensor:
    """Without a call where it is there already: each takes some microseconds right after a pass."""
    tensor = torch.from_numpy(own)
    return tensor if device.type == "cpu" else tensor.to(device)


def known_on_host(batch: Batch) -> tuple[NDArray, ...]:
    """What `filled` asks for. A mask that only the device knows is left out: none of its rows are seen."""
    rows, mask = batch.rows, batch.tree_mask
    assert isinstance(rows, HostRows)
    assert not isinstance(mask, MaskWords)
    seen, widths = NOTHING_SEEN, rows.kv_lens
    if isinstance(mask, HostMask):
        seen, widths = mask.visible, mask.widths
    elif mask is not None:
        seen, widths = np.zeros((len(batch.positions), mask.shape[2]), dtype=np.bool_), (mask.shape[2],) * len(mask)
    return np.array(batch.query_starts), np.array(rows.kv_lens), *rows.firsts_and_table(), np.array(widths), seen


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


def with_mask(bias: Tensor, mask: Tensor, lengths: list[int]) -> Tensor:
    """The bias [n, 1, Q, K] of what comes before the masked rows with a mask [n, Q, C] of the last ones."""
    firsts = np.array(lengths)[:, None, None, None] - mask.shape[2]
    columns = torch.from_numpy(firsts + np.arange(mask.shape[2])).to(bias.device).expand(-1, -1, mask.shape[1], -1)
    return bias.scatter(3, columns, torch.zeros_like(mask, dtype=bias.dtype).masked_fill_(~mask, -torch.inf)[:, None])


def run_group(queries: Tensor, layer: int, plan: GroupedPlan, group: Group, window: int | None, sinks: Tensor | None) -> Tensor:
    """[R, heads, numbers of a value] for the R queries of a group."""
    (num_members, num_queries, _), scale = group.shape, plan.pool.rows[layer].scale
    num_heads, head_dim = queries.shape[1:]
    own = queries if group.queries is None else queries.index_select(0, group.queries)
    own = own.view(num_members, num_queries, num_heads, head_dim)
    if group.views:
        keys, values = group.views[layer]
    else:
        assert group.slots is not None
        keys, values = plan.pool.read(layer, group.slots, num_members, plan.buffer)
    shared = num_heads // keys.shape[1]
    # Half-precision products of all queries that share their keys take less time than of one head after the other.
    if shared > 1 and num_queries <= MANY_QUERIES and (num_queries == 1 or queries.dtype != torch.float32):
        own = own.view(num_members, num_queries, -1, shared, head_dim).transpose(1, 2).flatten(2, 3)
        bias = bias_of(group, window, shared if num_queries > 1 else 1, queries.dtype)
        own_sinks = None if sinks is None else sinks.view(-1, 1, shared).expand(-1, num_queries, shared).flatten(1)
        attended = attend(own, keys, values, bias, own_sinks, scale)
        attended = attended.unflatten(2, (num_queries, shared)).transpose(1, 2).reshape(-1, num_heads, values.shape[3])
    else:
        own, bias = own.transpose(1, 2), bias_of(group, window, 1, queries.dtype)
        attended = attend(own, keys, values, bias, None if sinks is None else sinks[:, None], scale)
        attended = attended.transpose(1, 2).reshape(-1, num_heads, values.shape[3])
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
    positions = group.positions if group.queries is None else group.positions[group.queries]
    distances = positions.view(num_members, num_queries, 1) - torch.arange(num_rows, device=positions.device)
    bias = group.bias
    if bias is None:
        bias = torch.zeros(num_members, 1, num_queries, num_rows, dtype=dtype, device=positions.device)
    return bias.masked_fill((distances >= window)[:, None], -torch.inf)
