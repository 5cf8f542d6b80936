"""Products of a few rows and what their kernels go on to do: interpreted on a CPU, natively on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.kernels.skinny import LARGE_TILE, SMALL_TILE, TURNED_TILE, Tile, most_skinny_rows, most_turned_rows
from eagle_rt.kernels.triton.gated import gated
from eagle_rt.kernels.triton.gated_product import gated_product
from eagle_rt.kernels.triton.rotate_and_write import rotate_and_write
from eagle_rt.kernels.triton.skinny_product import skinny_product
from eagle_rt.kernels.triton.turned_product import turned_product

# (Compute capability, KiB of shared memory that a processor has.)
GPUS = {"RTX 4090": ((8, 9), 100), "H100": ((9, 0), 228), "B200": ((10, 0), 228), "RTX 5090": ((12, 0), 100)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = st.sampled_from(list(TOLERANCE))
TILES = st.sampled_from([LARGE_TILE, SMALL_TILE, TURNED_TILE])
ROWS = st.sampled_from([1, 2, 16, 17, 64])
SEEDS = st.integers(0, 2**31)


def exact(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sums of products are exact in any order: tiles of another size may be summed in another."""
    return (torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) / 16).to(dtype)


@settings(max_examples=15, deadline=None)
@given(rows=ROWS, out_size=st.sampled_from([1, 128, 300]), num_blocks=st.integers(1, 3), tile=TILES, dtype=DTYPES, seed=SEEDS)
def test_products(rows: int, out_size: int, num_blocks: int, tile: Tile, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    in_size, rows = num_blocks * tile.ins, min(rows, tile.most_rows)
    x, weight = (torch.randn(n, in_size, generator=generator).to(DEVICE, dtype) for n in (rows, out_size))
    expected = x.float() @ weight.float().T
    scale = float(expected.abs().max())
    torch.testing.assert_close(skinny_product(x, weight, tile).float(), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


@settings(max_examples=10, deadline=None)
@given(rows=ROWS, size=st.sampled_from([1, 64, 150]), tile=TILES, dtype=DTYPES, seed=SEEDS)
def test_gates(rows: int, size: int, tile: Tile, dtype: torch.dtype, seed: int) -> None:
    """Bit for bit what the gate makes of the product: more rows than fit take that way."""
    rows = min(rows, tile.most_rows)
    x, weight = (exact(seed + index, n, 2 * tile.ins, dtype=dtype) for index, n in enumerate((rows, 2 * size)))
    assert torch.equal(gated_product(x, weight, tile), gated(skinny_product(x, weight, tile)))


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, TURNED_TILE.most_rows),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    has_bias=st.booleans(),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_turned_products(
    rows: int, kv_heads: int, group: int, head_dim: int, has_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    """Bit for bit what turning makes of the product: more rows than fit take that way."""
    heads, in_size, num_slots = kv_heads * group, 2 * TURNED_TILE.ins, rows + 3
    x, weight = (exact(seed + index, n, in_size, dtype=dtype) for index, n in enumerate((rows, (heads + 2 * kv_heads) * head_dim)))
    bias = exact(seed + 2, len(weight), dtype=dtype) if has_bias else None
    generator = torch.Generator().manual_seed(seed)
    angles = torch.randn(rows, head_dim // 2, generator=generator).repeat(1, 2)[:, None].to(DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    sin[..., : head_dim // 2] *= -1
    slots = torch.randperm(num_slots, generator=generator)[:rows].to(DEVICE)
    pool, expected_pool = (KVPool([RowShape(kv_heads, head_dim)] * 2, num_slots, dtype, DEVICE) for _ in range(2))

    queries = turned_product(x, weight, bias, heads, cos, sin, pool.storage[1], slots)

    sums = x.float() @ weight.float().T
    product = (sums if bias is None else sums + bias.float()).to(dtype).view(rows, heads + 2 * kv_heads, head_dim)
    expected = rotate_and_write(
        product.view(rows, heads + 2 * kv_heads, head_dim), heads, cos, sin, None, expected_pool.storage[1], slots
    )
    assert torch.equal(queries, expected)
    assert torch.equal(pool.storage, expected_pool.storage)


@pytest.mark.parametrize(
    ("shape", "head_dim", "gpu", "expected"),
    [
        ((128256, 4096), 128, "H100", (64, 32)),
        ((16384, 4096), 128, "H100", (64, 32)),
        ((6144, 4096), 128, "H100", (16, 32)),
        ((4096, 4096), 80, "B200", (16, 0)),
        ((4096, 896), 64, "H100", (0, 32)),
        ((151936, 896), 64, "H100", (64, 32)),
        ((3072, 1024), 64, "H100", (0, 0)),
        ((6144, 4096), 128, "RTX 4090", (0, 0)),
        ((128256, 4096), 128, "RTX 5090", (0, 32)),
        ((6144, 4096), 128, "RTX 5090", (16, 32)),
    ],
)
def test_who_takes_them(
    shape: tuple[int, int], head_dim: int, gpu: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as weights are large enough, tiles divide them, and a GPU has memory for the tiles."""
    capability, shared_memory = GPUS[gpu]
    properties = SimpleNamespace(shared_memory_per_multiprocessor=shared_memory * 2**10)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with FakeTensorMode():
        weight = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    assert (most_skinny_rows(weight), most_turned_rows(weight, head_dim)) == expected
    assert most_skinny_rows(torch.empty(shape, dtype=torch.bfloat16, device="meta")) == 0
