"""The Triton kernel against the torch reference: in Triton's interpreter on a CPU, natively on a GPU."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.attention.triton import TritonAttention
from eagle_rt.batch import Batch, DeviceRows, HostMask, HostRows, MaskWords
from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.kernels.triton.tree_attention import Tiling, Uniform, mask_words, splits_for, tree_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_case(
    generator: torch.Generator, prefix_lens: list[int], num_queries: int, num_columns: int | None, *, scattered: bool
) -> Batch:
    """Sequences with `num_queries` rows each: a tree over the last `num_columns` rows, or causal. A lone row is a chain's."""
    count = num_columns if num_columns is not None else num_queries
    lengths = tuple(prefix + count for prefix in prefix_lens)
    order = torch.randperm(sum(lengths), generator=generator) if scattered else torch.arange(sum(lengths))
    own = list(order.split(list(lengths)))
    tree_mask = None
    positions = torch.cat([torch.arange(length - num_queries, length) for length in lengths])
    if num_columns is not None:
        tree_mask = torch.rand(len(lengths), num_queries, num_columns, generator=generator) < (0.4 if num_queries > 1 else 1.0)
        diagonal = torch.arange(num_queries)
        tree_mask[:, diagonal, num_columns - num_queries + diagonal] = True
        positions = torch.cat([prefix + torch.randint(0, 3, (num_queries,), generator=generator) for prefix in prefix_lens])
    return Batch(
        tokens=torch.zeros(len(lengths) * num_queries, dtype=torch.int64, device=DEVICE),
        positions=positions.to(DEVICE),
        slots=torch.zeros(0),
        query_starts=tuple(range(0, len(lengths) * num_queries + 1, num_queries)),
        rows=HostRows(lengths, tuple(s.numpy() if scattered else range(int(s[0]), int(s[-1]) + 1) for s in own)),
        tree_mask=None if tree_mask is None else tree_mask.to(DEVICE),
    )


def check(
    batch: Batch,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None = None,
    has_sinks: bool = False,
    value_dim: int | None = None,
) -> None:
    generator = torch.Generator().manual_seed(1)
    row = RowShape(kv_heads, head_dim, value_dim, scale=0.1 if value_dim else None)
    pool = KVPool([row] * 2, sum(batch.rows.kv_lens), dtype, DEVICE)
    pool.storage.copy_(torch.randn(pool.storage.shape, generator=generator))
    queries = torch.randn(len(batch.tokens), heads, head_dim, generator=generator).to(DEVICE, dtype)
    reference, ours = ReferenceAttention(dtype), TritonAttention()
    sinks = 3 * torch.randn(heads, generator=generator).to(DEVICE) if has_sinks else None
    expected = reference.run(queries, 1, reference.plan(batch, pool), window, sinks)
    found = ours.run(queries, 1, ours.plan(batch, pool), window, sinks)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=40, deadline=None)
@given(
    prefix_lens=st.lists(st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 130, 530, 1100]), min_size=1, max_size=3),
    num_queries=st.integers(1, 9),
    extra_columns=st.sampled_from([None, 0, 3, 70]),
    group=st.sampled_from([1, 2, 3, 8]),
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([16, 80, 96]),
    window=st.sampled_from([None, 5, 40]),
    has_sinks=st.booleans(),
    scattered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    prefix_lens: list[int],
    num_queries: int,
    extra_columns: int | None,
    group: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    has_sinks: bool,
    scattered: bool,
    seed: int,
) -> None:
    num_columns = None if extra_columns is None else num_queries + extra_columns
    batch = random_case(torch.Generator().manual_seed(seed), prefix_lens, num_queries, num_columns, scattered=scattered)
    check(
        batch,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.float32,
        window=window,
        has_sinks=has_sinks,
    )


@settings(max_examples=20, deadline=None)
@given(
    prefix_lens=st.lists(st.sampled_from([0, 1, 15, 17, 64, 130, 530]), min_size=1, max_size=3),
    num_queries=st.integers(1, 9),
    extra_columns=st.sampled_from([None, 0, 70]),
    group=st.sampled_from([1, 5, 20]),
    kv_heads=st.integers(1, 2),
    dims=st.sampled_from([(48, 32), (96, 80), (40, 32)]),
    scattered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_latents_of_any_shape(
    prefix_lens: list[int],
    num_queries: int,
    extra_columns: int | None,
    group: int,
    kv_heads: int,
    dims: tuple[int, int],
    scattered: bool,
    seed: int,
) -> None:
    num_columns = None if extra_columns is None else num_queries + extra_columns
    batch = random_case(torch.Generator().manual_seed(seed), prefix_lens, num_queries, num_columns, scattered=scattered)
    check(batch, heads=group * kv_heads, kv_heads=kv_heads, head_dim=dims[0], value_dim=dims[1], dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [16, 20])
def test_latents_as_they_are_served(dtype: torch.dtype, heads: int) -> None:
    batch = random_case(torch.Generator().manual_seed(0), [70, 3], 8, 65, scattered=True)
    check(batch, heads=heads, kv_heads=1, head_dim=576, value_dim=512, dtype=dtype)


@pytest.mark.parametrize("window", [None, 5])
def test_sequences_of_unequal_trees(window: int | None) -> None:
    """As the host packs them: some queries follow rows that were fed before them."""
    rng = np.random.default_rng(0)
    prefixes, counts, widths = np.array([20, 0, 65]), np.array([1, 4, 2]), (3, 4, 70)
    lengths = tuple((prefixes + widths).tolist())
    visible = np.zeros((counts.sum(), max(widths)), dtype=np.bool_)
    owners = np.repeat(np.arange(3), counts)
    for row, owner in enumerate(owners):
        visible[row, : widths[owner]] = rng.random(widths[owner]) < 0.4
        visible[row, widths[owner] - 1] = True
    positions = torch.from_numpy(prefixes[owners] + rng.integers(0, 3, len(owners))).to(DEVICE)
    slots = rng.permutation(sum(lengths))
    batch = Batch(
        tokens=positions,
        positions=positions,
        slots=positions,
        query_starts=(0, 1, 5, 7),
        rows=HostRows(lengths, (slots[: lengths[0]], slots[lengths[0] : lengths[0] + lengths[1]], slots[-lengths[2] :])),
        tree_mask=HostMask(visible, widths),
    )
    check(batch, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, window=window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_the_precisions_and_sizes_that_are_served(dtype: torch.dtype, head_dim: int, group: int) -> None:
    batch = random_case(torch.Generator().manual_seed(0), [70, 3], 8, 65, scattered=True)
    check(batch, heads=2 * group, kv_heads=2, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("capacity", [4, 2048])
def test_a_query_that_sees_nothing_gets_zeros(capacity: int) -> None:
    """A padded row of a captured batch: a sequence of length 0."""
    pool = KVPool([RowShape(1, 16)], 8, torch.float32, DEVICE)
    pool.storage.normal_()
    whole = {"dtype": torch.int32, "device": DEVICE}
    output = tree_attention(
        torch.randn(2, 2, 16, device=DEVICE),
        pool.storage[0],
        torch.zeros(2, capacity, **whole),
        torch.tensor([3, 0], **whole),
        Uniform(1, None),
        torch.zeros(2, 1, dtype=torch.int64, device=DEVICE),
        torch.zeros(2, dtype=torch.int64, device=DEVICE),
        page_size=1,
    )
    torch.testing.assert_close(output[0, 0], pool.storage[0, 0, 1, 0])
    assert not output[1].any()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_and_lengths_on_the_device(page_size: int) -> None:
    """What a captured step passes: pages in any order, room for far more, and nothing that the host knows."""
    generator = torch.Generator().manual_seed(page_size)
    lengths, num_pages = [3, page_size + 2, 2 * page_size + 1, 400], -(-512 // page_size)
    pages = torch.randperm(4 * num_pages, generator=generator).view(4, num_pages)
    pool = KVPool([RowShape(2, 16)] * 2, 4 * num_pages * page_size, torch.float32, DEVICE)
    pool.storage.copy_(torch.randn(pool.storage.shape, generator=generator))
    slots = (pages[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    positions = torch.zeros(12, dtype=torch.int64, device=DEVICE)
    mask = torch.rand(4, 3, 3, generator=generator) < 0.6
    mask[:, [0, 1, 2], [0, 1, 2]] = True
    host = HostRows(tuple(lengths), tuple(slots[b, :length].numpy() for b, length in enumerate(lengths)))
    device = DeviceRows(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), pages.to(DEVICE, torch.int32), page_size)
    words = MaskWords(mask_words(mask.to(DEVICE)), 3)
    queries = torch.randn(12, 4, 16, generator=generator).to(DEVICE)
    outputs = []
    for backend, rows, tree_mask in (
        (ReferenceAttention(torch.float32), host, mask.to(DEVICE)),
        (TritonAttention(), device, words),
    ):
        batch = Batch(positions, positions, positions, (0, 3, 6, 9, 12), rows, tree_mask)
        outputs.append(backend.run(queries, 1, backend.plan(batch, pool), None))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_columns", [1, 63, 64, 65, 128, 130])
def test_mask_words_hold_every_column(num_columns: int) -> None:
    mask = torch.rand(3, num_columns, generator=torch.Generator().manual_seed(2)) < 0.5
    words = mask_words(mask)
    assert words.shape == (3, -(-num_columns // 64))
    for row in range(3):
        for column in range(num_columns):
            assert (int(words[row, column // 64]) >> (column % 64)) & 1 == int(mask[row, column])


@pytest.mark.parametrize("tiling", [Tiling(16, 16, rows_a_split=16), Tiling(32, 128, rows_a_split=100, num_warps=8)], ids=str)
def test_however_the_work_is_cut(tiling: Tiling) -> None:
    generator = torch.Generator().manual_seed(2)
    batch = random_case(generator, [300, 17], 5, 9, scattered=False)
    pool = KVPool([RowShape(2, 16)], sum(batch.rows.kv_lens), torch.float32, DEVICE)
    pool.storage.normal_()
    queries = torch.randn(len(batch.tokens), 4, 16, device=DEVICE)
    reference, plan = ReferenceAttention(torch.float32), TritonAttention().plan(batch, pool)
    arguments = (plan.rows.pages, plan.rows.kv_lens, plan.queries_of, plan.masks, plan.positions)
    found = tree_attention(queries, pool.storage[0], *arguments, page_size=plan.rows.page_size, tiling=tiling)
    torch.testing.assert_close(found, reference.run(queries, 0, reference.plan(batch, pool), None), rtol=1e-5, atol=1e-5)


def test_a_busy_launch_is_cut_less() -> None:
    assert splits_for(num_programs=8, longest=255, rows_a_split=64) == 1
    assert splits_for(num_programs=8, longest=256, rows_a_split=64) == 4
    assert splits_for(num_programs=8, longest=10**6, rows_a_split=64) == 32
    assert splits_for(num_programs=128, longest=10**6, rows_a_split=64) == 4
    assert splits_for(num_programs=1024, longest=10**6, rows_a_split=64) == 1
