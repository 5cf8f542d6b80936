"""Attention on a CPU by our own kernel, row by row; by torch's for long prompts where products are not our own either.

The twin is `ReferenceAttention`, which leaves all to torch.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.attention.base import WholeLayers
from eagle_rt.attention.reference import SequencePlan, run_sequence, sequence_plan
from eagle_rt.batch import NOTHING_SEEN, Batch, HostMask, HostRows, MaskWords
from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.kernels.compiled import compiled
from eagle_rt.kernels.cpu.row_attention import row_attention, scale_of, sinks_for
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import LANES, LOG2_E
from eagle_rt.kernels.products import takes_own_kernel

# The integers that hold two neighbouring numbers of a row.
PAIRS = {torch.bfloat16: torch.int32, torch.float32: torch.int64}
# Where products are oneDNN's a sequence of more queries over more rows is multiplied as a matrix, by torch; but over latents, of
# which all heads read the same rows, torch is slower whatever their number.
MANY_QUERIES, MANY_ROWS = 64, 512
# Rows of a sequence that one thread takes through its cache.
TOGETHER = 8
Ints = NDArray[np.int64]
NO_WIDTHS = np.zeros(0, dtype=np.int64)


@dataclass
class RowPlan:
    """alone: the sequences that go through torch. positions: [R] of the other rows, which layers with a window look at.

    rows, bounds, prefixes, widths, seen, firsts, table: see `row_attention`.
    """

    pool: KVPool
    alone: list[SequencePlan]
    positions: Ints
    rows: Ints
    bounds: Ints
    prefixes: Ints
    widths: Ints
    seen: NDArray[np.bool_]
    firsts: Ints
    table: Ints
    lows: dict[int | None, Ints] = field(default_factory=dict)

    def lows_of(self, window: int | None) -> Ints:
        """[R] the first places that rows see. A drafted row's position is at most what its place in the cache says, so no drafted
        row falls out of the window here."""
        if window not in self.lows:
            self.lows[window] = np.zeros_like(self.rows) if window is None else np.maximum(self.positions - window + 1, 0)
        return self.lows[window]

    def seen_rows(self) -> tuple[NDArray, ...]:
        """What `row_attention` takes beside queries, cache, outputs, sinks and lows."""
        return self.rows, self.bounds, self.prefixes, self.widths, self.seen, self.firsts, self.table


class RowAttention(WholeLayers):
    """Every row by itself, as `row_attention` takes it, so that a row comes out the same however its text is read. Where products
    of many rows do not, sequences of many queries over many rows are torch's, one after the other."""

    name = "numba"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._takes_all = dtype, takes_own_kernel(torch.empty(0, dtype=dtype))
        # Compiled now rather than in the first pass.
        nothing = torch.zeros(1, dtype=torch.int64)
        batch = Batch(nothing, nothing, nothing, (0, 1), HostRows((1,), (range(1),)), None)
        pool = KVPool([RowShape(1, 2 * LANES)], 1, dtype, "cpu")
        self.run(torch.zeros(1, 1, 2 * LANES, dtype=dtype), 0, self.plan(batch, pool), None)

    def plan(self, batch: Batch, pool: KVPool) -> RowPlan:
        assert isinstance(batch.rows, HostRows)
        use_torch_threads()
        starts, lengths = np.array(batch.query_starts), np.array(batch.rows.kv_lens)
        leaves_some = not self._takes_all and all(row.value_dim is None for row in pool.storages)
        are_many = (starts[1:] - starts[:-1] > MANY_QUERIES) & (lengths > MANY_ROWS) & leaves_some
        alone = [sequence_plan(batch, int(b), self._dtype) for b in np.flatnonzero(are_many)]
        seen, widths = (NOTHING_SEEN, NO_WIDTHS) if batch.tree_mask is None else host_mask(batch.tree_mask)
        firsts, table = batch.rows.firsts_and_table()
        rows, bounds, prefixes, widths, firsts = decoded_rows(starts, lengths, widths, firsts, are_many)
        positions = batch.positions.numpy()
        own_positions = positions[rows] if alone else positions
        return RowPlan(pool, alone, own_positions, rows, bounds, prefixes, widths, seen, firsts, table)

    def whole_layers(self, plan: RowPlan) -> RowPlan | None:
        return None if plan.alone else plan

    def run(self, queries: Tensor, layer: int, plan: RowPlan, window: int | None, sinks: Tensor | None = None) -> Tensor:
        queries, row, pairs = queries.contiguous(), plan.pool.rows[layer], PAIRS[self._dtype]
        outputs = queries.new_empty(*queries.shape[:2], row.output_dim)
        own_queries, own_outputs, cache = (own.view(pairs).numpy() for own in (queries, outputs, plan.pool.layers[layer]))
        own_sinks = sinks_for(sinks, queries.shape[1])
        scale = np.float32(scale_of(row.head_dim) if row.scale is None else row.scale * LOG2_E)
        row_attention(own_queries, cache, own_outputs, own_sinks, scale, plan.lows_of(window), *plan.seen_rows())
        for own in plan.alone:
            outputs[own.rows] = run_sequence(queries[own.rows], plan.pool, layer, own, window, sinks)
        return outputs


@compiled
def decoded_rows(
    starts: Ints, lengths: Ints, widths: Ints, firsts: Ints, are_left_out: NDArray[np.bool_]
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """(rows [R], bounds, prefixes [R], widths [R], firsts [R]) of `row_attention`, but for sequences that are left out.

    starts [B + 1] and lengths, widths, firsts [B] are those of sequences; no widths mean that rows see all before them.
    """
    num_rows = starts[-1]
    rows, prefixes = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.int64)
    row_widths, row_firsts = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.int64)
    bounds, num_rows, num_bounds = np.empty(num_rows + 1, dtype=np.int64), 0, 0
    for b in range(len(lengths)):
        if are_left_out[b]:
            continue
        width = widths[b] if len(widths) else 0
        for row in range(starts[b], starts[b + 1]):
            if (row - starts[b]) % TOGETHER == 0:
                bounds[num_bounds] = num_rows
                num_bounds += 1
            rows[num_rows], row_widths[num_rows], row_firsts[num_rows] = row, width, firsts[b]
            prefixes[num_rows] = lengths[b] - (width if len(widths) else starts[b + 1] - row - 1)
            num_rows += 1
    bounds[num_bounds] = num_rows
    return rows[:num_rows], bounds[: num_bounds + 1], prefixes[:num_rows], row_widths[:num_rows], row_firsts[:num_rows]


def host_mask(mask: Tensor | MaskWords | HostMask) -> tuple[NDArray[np.bool_], Ints]:
    """What rows [T] see of C columns, and the widths [B] that are theirs."""
    assert not isinstance(mask, MaskWords)
    if isinstance(mask, HostMask):
        return np.ascontiguousarray(mask.visible), np.array(mask.widths)
    return np.ascontiguousarray(mask.flatten(0, 1).numpy()), np.full(len(mask), mask.shape[2])
