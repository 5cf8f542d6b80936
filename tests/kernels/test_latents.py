"""What attention over latents does beside attending, by compiled functions and in Triton, against torch."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.kernels import dispatch
from eagle_rt.kernels.cpu import latent_queries as compiled_queries
from eagle_rt.kernels.cpu import write_latents as compiled_writing
from eagle_rt.kernels.cpu.product import MOST_ROWS, PANEL
from eagle_rt.kernels.head_products import HeadProducts
from eagle_rt.kernels.latents import latent_queries, latent_rows, normed_queries
from eagle_rt.kernels.products import takes_own_kernel
from eagle_rt.kernels.rms_norm import RMSNorm
from eagle_rt.kernels.triton import latent_queries as triton_queries
from eagle_rt.kernels.triton import write_latents as triton_writing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
WRITERS = [triton_writing.write_latents, *([] if DEVICE == "cuda" else [compiled_writing.write_latents])]
TURNERS = [triton_queries.latent_queries, *([] if DEVICE == "cuda" else [compiled_queries.latent_queries])]
SIZES = {
    "num_rows": st.integers(1, 5),
    "rank": st.sampled_from([16, 48]),
    "rope_dim": st.sampled_from([8, 24]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "seed": st.integers(0, 99),
}


def maker(seed: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def angles(made: Callable[..., Tensor], num_rows: int, rope_dim: int) -> tuple[Tensor, Tensor]:
    half = made(num_rows, 1, rope_dim // 2)
    return half.cos().repeat(1, 1, 2), torch.cat((-half.sin(), half.sin()), dim=2)


@pytest.mark.parametrize("write", WRITERS)
@settings(max_examples=30, deadline=None)
@given(**SIZES, num_queries=st.sampled_from([20, 64]), norms_queries=st.booleans())
def test_what_is_written(
    write: Callable[..., Tensor],
    num_rows: int,
    rank: int,
    rope_dim: int,
    dtype: torch.dtype,
    seed: int,
    num_queries: int,
    norms_queries: bool,
) -> None:
    made = maker(seed, dtype)
    inputs, query_norm, norm = (
        made(num_rows, num_queries + rank + rope_dim),
        RMSNorm(made(num_queries), 1e-6),
        RMSNorm(made(rank), 1e-6),
    )
    cos, sin = angles(made, num_rows, rope_dim)
    pool, expected = (KVPool([RowShape(1, rank + rope_dim, rank)] * 2, 9, dtype, DEVICE) for _ in range(2))
    slots = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:num_rows].to(DEVICE)
    own_norm = query_norm if norms_queries else None
    queries = write(inputs, own_norm, norm, cos, sin, pool.storage[1], slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "HAS_NUMBA", False)
        expected.write(1, slots, latent_rows(inputs[:, num_queries:], norm, cos, sin))
        close(queries, normed_queries(inputs[:, :num_queries], own_norm), dtype)
    close(pool.storage, expected.storage, dtype)


@pytest.mark.parametrize("turn", TURNERS)
@settings(max_examples=30, deadline=None)
@given(**SIZES, num_heads=st.integers(1, 5))
def test_queries(
    turn: Callable[..., Tensor], num_rows: int, rank: int, rope_dim: int, dtype: torch.dtype, seed: int, num_heads: int
) -> None:
    """Of heads that lie within more numbers, as the inputs' do where queries are not made of a few."""
    made = maker(seed, dtype)
    led, queries = made(num_rows, num_heads, rank), made(num_rows, num_heads * 40 + 7)[:, : num_heads * 40].unflatten(1, (-1, 40))
    cos, sin = angles(made, num_rows, rope_dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "HAS_NUMBA", False)
        expected = latent_queries(led, queries, cos, sin)
    close(turn(led, queries, cos, sin), expected, dtype)


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 3 * MOST_ROWS),
    num_heads=st.integers(1, 5),
    out_size=st.sampled_from([PANEL, 3 * PANEL, 40]),
    in_size=st.sampled_from([24, 48, 7]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_products_of_heads(num_rows: int, num_heads: int, out_size: int, in_size: int, dtype: torch.dtype, seed: int) -> None:
    made = maker(seed, dtype)
    weight, x = made(num_heads, out_size, in_size), made(num_rows, num_heads + 1, in_size)[:, :num_heads]
    found, exact = HeadProducts(weight)(x), torch.einsum("thi,hoi->tho", x.double(), weight.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's products are torch's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_comes_out_the_same_whatever_is_beside_it(dtype: torch.dtype) -> None:
    made = maker(0, dtype)
    weight, x = made(3, PANEL, 48), made(2 * MOST_ROWS + 3, 3, 48)
    if not takes_own_kernel(weight):
        pytest.skip("other products serve on this processor")
    product = HeadProducts(weight)
    assert product._panels
    together = product(x)
    assert all(torch.equal(together[row : row + 1], product(x[row : row + 1])) for row in range(len(x)))


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
