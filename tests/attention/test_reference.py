"""Attention on paged rows against the formula, spelled out per query and head."""

import math

import pytest
import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.attention.grouped import GroupedAttention
from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.attention.rows import RowAttention
from eagle_rt.batch import Batch, HostRows
from eagle_rt.cache.pool import KVPool, RowShape

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
BACKENDS = pytest.mark.parametrize(
    "backend",
    [ReferenceAttention(torch.float32), GroupedAttention(torch.float32), RowAttention(torch.float32)],
    ids=["one by one", "grouped", "rows"],
)


SINKS = pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0, 3.0, 40.0, -90.0, 0.0])], ids=["", "sinks"])


def spelled_out(query: Tensor, keys: Tensor, values: Tensor, seen: list[int], sinks: Tensor | None) -> Tensor:
    """[HEADS, HEAD_DIM] for one query that sees some rows of its sequence."""
    outputs = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = torch.stack([query[head] @ keys[row, kv_head] / math.sqrt(HEAD_DIM) for row in seen])
        shares = scores.softmax(0) if sinks is None else torch.cat((scores, sinks[head : head + 1])).softmax(0)[:-1]
        outputs.append(sum(weight * values[row, kv_head] for weight, row in zip(shares, seen, strict=True)))
    return torch.stack(outputs)


def random_pool(num_slots: int) -> KVPool:
    pool = KVPool([RowShape(KV_HEADS, HEAD_DIM)], num_slots, torch.float32, "cpu")
    pool.storage.normal_()
    return pool


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scattered", [False, True])
@SINKS
@BACKENDS
def test_causal_chunks_of_several_sequences(
    backend: AttentionBackend, sinks: Tensor | None, scattered: bool, window: int | None
) -> None:
    pool = random_pool(40)
    lengths, chunk_sizes = (9, 5, 7), (4, 1, 7)
    order = torch.randperm(40) if scattered else torch.arange(40)
    slots = [order[start : start + length] for start, length in zip((0, 12, 20), lengths, strict=True)]
    starts = [0]
    for size in chunk_sizes:
        starts.append(starts[-1] + size)
    positions = torch.cat([torch.arange(length - size, length) for length, size in zip(lengths, chunk_sizes, strict=True)])
    batch = Batch(
        tokens=torch.zeros(starts[-1], dtype=torch.int64),
        positions=positions,
        slots=torch.zeros(0),
        query_starts=tuple(starts),
        rows=HostRows(lengths, tuple(own.numpy() if scattered else range(int(own[0]), int(own[-1]) + 1) for own in slots)),
        tree_mask=None,
    )
    queries = torch.randn(starts[-1], HEADS, HEAD_DIM)
    output = backend.run(queries, 0, backend.plan(batch, pool), window, sinks)
    for b, own in enumerate(slots):
        keys, values = pool.storage[0, own].unbind(1)
        for row in range(starts[b], starts[b + 1]):
            position = int(positions[row])
            first = 0 if window is None else max(0, position - window + 1)
            expected = spelled_out(queries[row], keys, values, list(range(first, position + 1)), sinks)
            torch.testing.assert_close(output[row], expected)


@pytest.mark.parametrize("num_columns", [3, 5], ids=["the queries' own rows", "and rows fed before them"])
@SINKS
@BACKENDS
def test_tree_rows_see_the_text_and_what_the_mask_says(backend: AttentionBackend, sinks: Tensor | None, num_columns: int) -> None:
    pool = random_pool(30)
    mask = torch.rand(2, 3, num_columns) < 0.5
    for query in range(3):
        mask[:, query, num_columns - 3 + query] = True
    lengths = (7 + num_columns, 2 + num_columns)
    batch = Batch(
        tokens=torch.zeros(6, dtype=torch.int64),
        positions=torch.zeros(6, dtype=torch.int64),
        slots=torch.zeros(0),
        query_starts=(0, 3, 6),
        rows=HostRows(lengths, (range(lengths[0]), range(15, 15 + lengths[1]))),
        tree_mask=mask,
    )
    queries = torch.randn(6, HEADS, HEAD_DIM)
    output = backend.run(queries, 0, backend.plan(batch, pool), None, sinks)
    for b, first_slot in enumerate((0, 15)):
        keys, values = pool.storage[0, first_slot : first_slot + lengths[b]].unbind(1)
        prefix = lengths[b] - num_columns
        for query in range(3):
            seen = list(range(prefix)) + [prefix + column for column in range(num_columns) if mask[b, query, column]]
            torch.testing.assert_close(output[3 * b + query], spelled_out(queries[3 * b + query], keys, values, seen, sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_is_its_own_rows_alone(dtype: torch.dtype) -> None:
    """A query that has none, and a key that only some rows see."""
    pool, positions = KVPool([RowShape(2, 32)], 90, dtype, "cpu"), torch.arange(90)
    pool.storage.normal_()
    batch = Batch(positions, positions, positions, (0, 90), HostRows((90,), (range(90),)), None)
    queries, backend = torch.randn(90, 6, 32).to(dtype), RowAttention(dtype)
    whole = backend.run(queries, 0, backend.plan(batch, pool), None)
    assert not whole.isnan().any()
    queries[3], pool.storage[0, 70, 0] = torch.nan, torch.nan
    found = backend.run(queries, 0, backend.plan(batch, pool), None)
    assert found[3].isnan().all()
    assert found[70:].isnan().all()
    others = [row for row in range(70) if row != 3]
    assert torch.equal(found[others], whole[others])
