"""Weights of few bits as a GPU's kernels read them: how a weight becomes one, and products with it, in the interpreter on a CPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_rt.kernels import four_bits, narrow_product
from eagle_rt.kernels.four_bits import E2M1, GROUP
from eagle_rt.kernels.narrow import TILE, NarrowWeight, block_inputs, narrowed
from eagle_rt.kernels.narrow_product import NarrowProduct
from eagle_rt.kernels.triton import narrow_product as kernels
from eagle_rt.kernels.triton.widen import widen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16]
# By how much sums in half precision may be off, of the largest.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
BLOCK = block_inputs("int4")
# How weights are stored: the numbers that there are, how many inputs share a scale (0: all), the kind that is made of it and into
# how many parts its blocks are cut.
STORED = {
    "gptq": (torch.arange(-8, 8), BLOCK, "int4", 1),
    "awq": (torch.arange(16), BLOCK, "offset4", 1),
    "groups of 32": (torch.arange(-8, 8), GROUP, "int4", 4),
    "mxfp4": (torch.tensor(E2M1) - E2M1[0], GROUP, "e2m1", 4),
    "fp8": (torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float(), 0, "e4m3", 0),
    "fp8 in blocks": (torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float(), BLOCK, "e4m3", 1),
}
ROUNDED = {"int8": ("int8", 0), "int4": ("offset4", 4)}


def stored(how: str, out_size: int, in_size: int) -> Tensor:
    """A random weight [out, in] that was stored so; scales of mxfp4 are powers of two."""
    numbers, group, _, _ = STORED[how]
    numbers = numbers[numbers == numbers].float()
    group = group or in_size
    shape = out_size, in_size // group
    sizes = torch.exp2(torch.randint(-9, -3, shape).float()) if how == "mxfp4" else 0.5 + torch.rand(shape).half().float()
    chosen = numbers[torch.randint(0, len(numbers), (*shape, group))]
    if how == "awq":
        chosen = chosen - torch.randint(0, 16, shape)[..., None]
    return (chosen * sizes[..., None] / 8).flatten(1)


def random_narrow(how: str, out_size: int, in_size: int, dtype: torch.dtype) -> NarrowWeight:
    if how in ROUNDED:
        narrow = narrowed(torch.randn(out_size, in_size, device=DEVICE).to(dtype), how)
    else:
        whole = -(-in_size // BLOCK) * BLOCK
        narrow = narrowed(stored(how, out_size, whole)[:, :in_size].to(DEVICE, dtype), "stored")
    assert narrow
    return narrow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", STORED)
def test_a_weight_that_was_stored_in_few_bits_is_held_in_them(
    how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are the same but for the size of steps, which float16 holds, of weights that may have been rounded before."""
    monkeypatch.setattr(four_bits, "AT_ONCE", 9 * BLOCK)
    exact = stored(how, TILE + 5, 3 * BLOCK)
    narrow = narrowed(exact.to(dtype), "stored")
    assert narrow
    assert (narrow.kind, narrow.parts) == STORED[how][2:]
    relative = 2**-11 + (2**-8 if dtype == torch.bfloat16 else 0)
    beside_the_largest = 2**-24 * exact.abs().amax(1, keepdim=True)
    assert ((narrow.widened() - exact).abs() <= relative * exact.abs() + beside_the_largest).all()


@pytest.mark.parametrize(("least", "most", "kind"), [(-8, 7, "int4"), (-9, 6, "offset4"), (-7, 8, "offset4")])
def test_what_is_nothing_is_left_out_where_it_is_always_the_same(least: int, most: int, kind: str) -> None:
    weight = torch.randint(least, most + 1, (TILE, BLOCK)).float()
    weight[0, :2] = torch.tensor([least, most])
    narrow = narrowed(weight, "stored")
    assert narrow
    assert (narrow.kind, len(narrow.words)) == (kind, 1)
    torch.testing.assert_close(narrow.widened(), weight, rtol=2**-11, atol=0)


@pytest.mark.parametrize("how", ROUNDED)
def test_a_weight_is_rounded_by_half_a_step_at_most(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(four_bits, "AT_ONCE", 9 * BLOCK)
    weight = torch.randn(TILE + 5, 3 * BLOCK + GROUP)
    narrow = narrowed(weight, how)
    assert narrow
    assert (narrow.kind, narrow.parts) == ROUNDED[how]
    if how == "int8":
        steps = weight.abs().amax(1, keepdim=True) / 127
    else:
        groups = weight.unflatten(1, (-1, GROUP))
        steps = ((groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)) / 15).repeat_interleave(GROUP, 1)
    off = (narrow.widened() - weight).abs() / steps
    assert off.max() <= (0.51 if how == "int8" else 1.01)  # at the ends of sixteen steps one may be cut off that is half rounded
    assert off.mean() < 0.26


def test_other_weights_were_not_stored_in_few_bits() -> None:
    assert narrowed(torch.randn(5, 2 * BLOCK), "stored") is None
    for how in STORED:
        weight = stored(how, 5, 2 * BLOCK)
        weight[-1, 6] = weight[-1, :GROUP].abs().max()
        weight[-1, 7] = weight[-1, 6] * (15 / 15.5)
        assert narrowed(weight, "stored") is None
    assert narrowed(stored("fp8 in blocks", 5, 2 * BLOCK)[:, :-3], "stored") is None


def test_rows_of_nothing_are_nothing() -> None:
    for how in (*STORED, *ROUNDED):
        weight = stored(how, 5, 2 * BLOCK) if how in STORED else torch.randn(5, 2 * BLOCK)
        weight[2] = 0
        narrow = narrowed(weight, how if how in ROUNDED else "stored")
        assert narrow
        assert not narrow.widened()[2].any()


@settings(max_examples=40, deadline=None)
@given(
    how=st.sampled_from([*STORED, *ROUNDED]),
    sizes=st.tuples(st.sampled_from([0, 1, 5, 17, 40, 64, 70]), st.integers(1, 2 * TILE), st.integers(1, 20)),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
def test_products_of_any_shape(how: str, sizes: tuple[int, int, int], dtype: torch.dtype, has_bias: bool) -> None:
    """With few tiles and many inputs sums are split."""
    num_rows, out_size, num_groups = sizes
    in_size = num_groups * (2 * GROUP if how == "fp8" else BLOCK if STORED.get(how, (0, 0))[1] == BLOCK else GROUP)
    narrow = random_narrow(how, out_size, in_size, dtype)
    x = torch.randn(num_rows, in_size).to(DEVICE, dtype)
    bias = torch.randn(out_size).to(DEVICE, dtype) if has_bias else None
    expected = torch.nn.functional.linear(x.float(), narrow.widened(), None if bias is None else bias.float())
    found = kernels.narrow_product(x, narrow, bias)
    assert found.dtype == dtype
    off = (found.float() - expected).abs().max() / expected.abs().max() if num_rows else 0
    assert off < TOLERANCE[dtype]
    assert torch.equal(widen(narrow, dtype), narrow.widened().to(dtype))


def test_sums_are_split_alike_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row comes out the same in any tree."""
    narrow = random_narrow("gptq", 7, 25 * BLOCK, torch.bfloat16)
    # What lies behind a weight belongs to others.
    behind = torch.full_like(narrow.ratios, torch.nan)
    narrow = replace(narrow, ratios=torch.cat((narrow.ratios, behind))[:1])
    x = torch.randint(-2, 3, (70, 25 * BLOCK), device=DEVICE).bfloat16()
    for count in (1, 2, 100):
        monkeypatch.setattr(kernels, "num_processors", lambda device, count=count: count)
        together = kernels.narrow_product(x, narrow, None)
        assert torch.equal(kernels.narrow_product(x[:3], narrow, None), together[:3])
        torch.testing.assert_close(together.float(), x.float() @ narrow.widened().T, rtol=2**-8, atol=1e-2)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_no_number_spoils_another_row() -> None:
    narrow = random_narrow("mxfp4", 9, BLOCK, torch.bfloat16)
    x = torch.randn(5, BLOCK, device=DEVICE).bfloat16()
    expected = kernels.narrow_product(x, narrow, None)
    x[2, 4], x[3, 5] = torch.nan, torch.inf
    found = kernels.narrow_product(x, narrow, None)
    assert torch.equal(found[[0, 1, 4]], expected[[0, 1, 4]])
    assert found[2].isnan().all()
    assert not found[3].isfinite().any()


@pytest.mark.parametrize("num_rows", [3, narrow_product.MOST_ROWS, narrow_product.MOST_ROWS + 1])
def test_a_product_takes_the_kernels(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are any, and else their twins; many rows take a widened weight."""
    weight, bias = random_narrow("awq", 20, 2 * BLOCK, torch.bfloat16), torch.randn(20, device=DEVICE).bfloat16()
    x = torch.randn(num_rows, 2 * BLOCK, device=DEVICE).bfloat16()
    product = NarrowProduct(weight, bias, torch.bfloat16)
    asked: list[str] = []

    def triton_kernel(name: str, x: Tensor) -> Callable[..., Tensor]:
        asked.append(name)
        return {"narrow_product": kernels.narrow_product, "widen": widen}[name]

    monkeypatch.setattr(narrow_product, "triton_kernel", lambda name, x: None)
    expected = product(x)
    monkeypatch.setattr(narrow_product, "triton_kernel", triton_kernel)
    torch.testing.assert_close(product(x), expected, atol=float(expected.abs().max()) * 6e-3, rtol=0.01)
    assert asked == (["narrow_product"] if num_rows <= narrow_product.MOST_ROWS else ["widen"])
    assert (product.num_bits, product.out_size) == (4, 20)
    assert torch.equal(product.unpacked(), weight.widened().bfloat16())
