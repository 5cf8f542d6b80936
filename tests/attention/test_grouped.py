"""Sequences that go through attention together against the same ones one by one."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from eagle_rt.attention import grouped, rows
from eagle_rt.attention.grouped import GroupedAttention
from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.attention.rows import RowAttention
from eagle_rt.batch import Batch, HostMask, HostRows
from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.kernels.cpu.row_attention import row_attention

NUM_SLOTS, HEAD_DIM = 512, 16
ROW = RowShape(2, HEAD_DIM)
# Of 48 numbers 32 are values; more heads share them than one thread takes.
LATENT = RowShape(1, 48, 32, scale=0.2)


@pytest.fixture(autouse=True, scope="module")
def small_limits() -> Iterator[None]:
    """So that every kind of group is met."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "CALL", 25)
        patch.setattr(grouped, "MANY_QUERIES", 6)
        patch.setattr(rows, "MANY_QUERIES", 6)
        patch.setattr(rows, "MANY_ROWS", 20)
        patch.setattr(rows, "takes_own_kernel", lambda weight: False)  # or all rows would be ours
        patch.setattr(grouped, "FEW_ROWS", 12)
        patch.setattr(grouped, "MANY_ROWS", 24)
        yield


def random_batch(sizes: list[tuple[int, int, int, bool]], kind: str, seed: int) -> Batch:
    """sizes: for each sequence its cached rows, its queries, rows fed before those, and whether its rows lie side by side.
    kind: of the mask, which is that of a tree for each sequence by itself, for all alike, or causal."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(NUM_SLOTS, generator=generator)
    starts, lengths, slots, masks, positions, first_free = [0], [], [], [], [], 0
    for num_cached, num_queries, num_fed, is_run in sizes:
        num_columns = num_fed + num_queries
        length = num_cached + num_columns
        first = int(torch.randint(NUM_SLOTS - length, (1,), generator=generator))
        slots.append(range(first, first + length) if is_run else order[first_free : first_free + length].numpy())
        first_free += length
        mask = torch.rand(num_queries, num_columns, generator=generator) < 0.5
        mask[torch.arange(num_queries), num_fed + torch.arange(num_queries)] = True
        masks.append(mask)
        depths = torch.randint(num_queries, (num_queries,), generator=generator)
        positions.append(torch.arange(length - num_queries, length) if kind == "causal" else num_cached + depths)
        starts.append(starts[-1] + num_queries)
        lengths.append(length)
    tree_mask = None
    if kind == "each":
        widths = tuple(mask.shape[1] for mask in masks)
        visible = torch.cat([functional.pad(mask, (0, max(widths) - mask.shape[1])) for mask in masks])
        tree_mask = HostMask(visible.numpy(), widths)
    elif kind == "alike":
        tree_mask = torch.stack(masks)
    nothing = torch.zeros(starts[-1], dtype=torch.int64)
    rows = HostRows(tuple(lengths), tuple(slots))
    return Batch(nothing, torch.cat(positions), nothing, tuple(starts), rows, tree_mask)


def both(
    kind: type[GroupedAttention | RowAttention],
    batch: Batch,
    dtype: torch.dtype,
    shared: int,
    window: int | None,
    *,
    has_sinks: bool = False,
    row: RowShape = ROW,
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pool = KVPool([row] * 2, NUM_SLOTS, dtype, "cpu")
    pool.storage.copy_(torch.randn(pool.storage.shape, generator=generator))
    seen = torch.zeros(NUM_SLOTS, dtype=torch.bool)
    for own in batch.rows.kv_slots:
        seen[list(own)] = True
    pool.storage[:, ~seen] = torch.nan  # what another request's broken head may have left there
    num_heads = row.num_heads * shared
    queries = torch.randn(len(batch.positions), num_heads + 4, row.head_dim, generator=generator).to(dtype)[:, :num_heads]
    reference, ours = ReferenceAttention(dtype), kind(dtype)
    plan = ours.plan(batch, pool)
    sinks = 3 * torch.randn(2, num_heads, generator=generator) if has_sinks else (None, None)
    expected = torch.stack([reference.run(queries, layer, reference.plan(batch, pool), window, sinks[layer]) for layer in (0, 1)])
    # A layer that looks back only so far, between two that see everything.
    ours.run(queries, 0, plan, None if window else 5)
    return torch.stack([ours.run(queries, layer, plan, window, sinks[layer]) for layer in (0, 1)]), expected


SIZES = st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(0, 3), st.booleans())


@pytest.mark.parametrize("backend", [GroupedAttention, RowAttention])
@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=7),
    kind=st.sampled_from(["causal", "each", "alike"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shared=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 6]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
@example(
    sizes=[(5, 1, 0, True), (9, 1, 0, False)], kind="causal", dtype=torch.float32, shared=1, window=None, has_sinks=False, seed=0
)
def test_all_at_once_equals_one_by_one(
    backend: type[GroupedAttention | RowAttention],
    sizes: list[tuple[int, int, int, bool]],
    kind: str,
    dtype: torch.dtype,
    shared: int,
    window: int | None,
    has_sinks: bool,
    seed: int,
) -> None:
    if kind == "alike":
        sizes = [(num_cached, sizes[0][1], sizes[0][2], is_run) for num_cached, _, _, is_run in sizes]
    found, expected = both(backend, random_batch(sizes, kind, seed), dtype, shared, window, has_sinks=has_sinks)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", [GroupedAttention, RowAttention])
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=5),
    kind=st.sampled_from(["causal", "each"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_heads=st.sampled_from([1, 4, 13]),
    seed=st.integers(0, 99),
)
def test_latents_at_once_equal_one_by_one(
    backend: type[GroupedAttention | RowAttention],
    sizes: list[tuple[int, int, int, bool]],
    kind: str,
    dtype: torch.dtype,
    num_heads: int,
    seed: int,
) -> None:
    found, expected = both(backend, random_batch(sizes, kind, seed), dtype, num_heads, None, row=LATENT)
    assert found.shape[3] == LATENT.value_dim
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    prefix=st.integers(40, 140),
    seen=st.lists(st.booleans(), min_size=0, max_size=24),
    row=st.sampled_from([RowShape(2, 48), RowShape(1, 96, 80)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([None, 50, 90]),
    seed=st.integers(0, 99),
)
@example(prefix=62, seen=[True, False, False, True, False], row=ROW, dtype=torch.float32, window=None, seed=0)
@example(prefix=140, seen=[True] * 10, row=ROW, dtype=torch.float32, window=90, seed=0)
def test_a_node_comes_out_as_if_its_path_were_text(
    prefix: int, seen: list[bool], row: RowShape, dtype: torch.dtype, window: int | None, seed: int
) -> None:
    """Bit by bit, beside others of its tree, which lie between those of its path."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(prefix + len(seen) + 1, *row.sizes, generator=generator).to(dtype)
    queries = torch.randn(2, 6 * row.num_heads, row.head_dim, generator=generator).to(dtype)
    visible = np.array([[True, *(False for _ in seen)], [*seen, True]])
    path = [*range(prefix), *(prefix + np.flatnonzero(visible[1]))]

    def attended(own: Tensor, mask: HostMask | None, own_queries: Tensor, positions: list[int]) -> Tensor:
        pool, count = KVPool([row], len(own), dtype, "cpu"), len(own_queries)
        pool.storage[0] = own
        nothing = torch.zeros(count, dtype=torch.int64)
        batch = Batch(nothing, torch.tensor(positions), nothing, (0, count), HostRows((len(own),), (range(len(own)),)), mask)
        backend = RowAttention(dtype)
        return backend.run(own_queries, 0, backend.plan(batch, pool), window)

    in_tree = attended(rows, HostMask(visible, (len(seen) + 1,)), queries, [prefix, len(path) - 1])
    assert torch.equal(in_tree[1:], attended(rows[path], None, queries[1:], [len(path) - 1]))


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.integers(1, 8), min_size=1, max_size=8), num_rows=st.integers(1, 30))
def test_calls_and_fillings_take_the_least_time(counts: list[int], num_rows: int) -> None:
    """Of all ways to share the sizes among calls."""
    *smaller, most = sorted(set(counts))

    def cost(steps: Sequence[int]) -> int:
        filled = [min(step for step in steps if count <= step) for count in counts]
        return grouped.CALL * len(steps) + num_rows * sum(filled)

    ways = [(*chosen, most) for size in range(len(smaller) + 1) for chosen in combinations(smaller, size)]
    assert cost(grouped.most_queries(counts, num_rows)) == min(map(cost, ways))


def test_what_goes_together() -> None:
    """Few queries; many; too many; few of many rows; of too many."""
    sizes = [
        (5, 1, 0, True),
        (5, 2, 0, True),
        (5, 5, 0, True),
        (5, 7, 0, True),
        (15, 1, 0, True),
        (30, 1, 0, True),
        (4, 1, 0, False),
    ]
    batch = random_batch(sizes, "each", 0)
    plan = GroupedAttention(torch.float32).plan(batch, KVPool([RowShape(1, HEAD_DIM)], NUM_SLOTS, torch.float32, "cpu"))
    assert [group.shape for group in plan.groups] == [(1, 7, 12), (1, 1, 31), (3, 2, 7), (1, 5, 10), (1, 1, 16)]
    assert [group.views is not None for group in plan.groups] == [True, True, False, True, True]


def test_a_kernel_is_compiled_once_for_each_precision() -> None:
    """Another memory layout of an argument is another kernel: it would be compiled in the middle of serving."""
    for dtype in (torch.float32, torch.bfloat16):
        RowAttention(dtype)
    for kind in ("causal", "each", "alike"):
        for is_run in (True, False):
            both(RowAttention, random_batch([(5, 2, 1, is_run), (9, 2, 1, is_run)], kind, 0), torch.float32, 3, None)
    wide = np.ones((2, 9), dtype=np.bool_)
    batch = random_batch([(5, 2, 0, True)], "each", 0)
    both(RowAttention, replace(batch, tree_mask=HostMask(wide[:, :2], (2,))), torch.bfloat16, 1, None)
    assert len(row_attention.signatures) == 2


@pytest.mark.parametrize(
    "first_use",
    [
        "from eagle_rt.attention.rows import RowAttention; RowAttention(torch.float32)",
        "from eagle_rt.kernels.cpu.add_rms_norm import add_rms_norm; add_rms_norm(torch.ones(2, 8), None, torch.ones(8), 0.0)",
        "from eagle_rt.kernels.cpu.gated import gated; gated(torch.ones(2, 8))",
    ],
    ids=["attention", "norm", "gate"],
)
def test_threads_of_torch_stay_as_they_are(first_use: str) -> None:
    """Numba, as it starts, gives all of them to everyone: so in a process of its own."""
    script = f"import torch; torch.set_num_threads(1)\n{first_use}; assert torch.get_num_threads() == 1"
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "NUMBA_NUM_THREADS": "2"})


def test_what_is_kept_in_inference_mode_serves_outside_of_it() -> None:
    batch = random_batch([(5, 2, 0, False), (7, 2, 0, False)], "causal", 0)
    pool = KVPool([RowShape(2, HEAD_DIM)], NUM_SLOTS, torch.float32, "cpu")
    pool.storage.normal_()
    backend, queries = GroupedAttention(torch.float32), torch.randn(4, 4, HEAD_DIM)
    with torch.inference_mode():
        inside = backend.run(queries, 0, backend.plan(batch, pool), None)
    assert torch.equal(backend.run(queries, 0, backend.plan(batch, pool), None), inside)
