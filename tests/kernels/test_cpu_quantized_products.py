"""Products with weights of eight and of four bits on a CPU, against the same weights in double precision."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels import four_bits
from eagle_rt.kernels.cpu import int4_product, int8_product
from eagle_rt.kernels.cpu.cut_rows import HAS_BYTE_DOT, MOST_STEPS, TOGETHER, cut_rows
from eagle_rt.kernels.cpu.product import PANEL
from eagle_rt.kernels.cpu.vectors import array_of
from eagle_rt.kernels.four_bits import E2M1, GROUP, WHOLE, FourBits, in_four_bits, stored_four_bits
from eagle_rt.kernels.panel_product import Int4Product, Int8Product, PanelProduct, quantized_product

DTYPES = [torch.float32, torch.bfloat16]
KINDS = ["int8", "int4"]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.01}
MOST_ROWS = max(int8_product.MOST_ROWS, int4_product.MOST_ROWS)
# More than the sums of halves have room for at a time.
LONG = 1100


def random_product(dtype: torch.dtype, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, out_size, in_size = sizes
    x, weight, bias = torch.randn(num_rows, in_size), torch.randn(out_size, in_size) / in_size**0.5, torch.randn(out_size)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def made(weight: Tensor, bias: Tensor, kind: str) -> PanelProduct:
    product = quantized_product(weight, bias, kind)
    assert isinstance(product, {"int8": Int8Product, "int4": Int4Product}[kind])
    return product


def rounding_of(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """[T, N] half a step of a number at most: of sixteen bits of a row, or eight of each group."""
    if kind == "int8":
        return x.double().abs().amax(1, keepdim=True) / float(MOST_STEPS) / 2 * weight.abs().sum(1)
    steps = in_groups(x).double().abs().amax(2) / float(int4_product.MOST_STEPS)
    return steps / 2 @ in_groups(weight).double().abs().sum(2).T


def in_groups(values: Tensor) -> Tensor:
    return functional.pad(values, (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(st.integers(1, 5 * MOST_ROWS), st.integers(1, 3 * PANEL), st.one_of(st.integers(1, 70), st.just(LONG))),
    scale=st.sampled_from([1e-20, 1.0, 1e10]),
)
def test_products_of_any_shape(kind: str, dtype: torch.dtype, sizes: tuple[int, int, int], scale: float) -> None:
    x, weight, bias = random_product(dtype, sizes)
    x, bias = x * scale, bias * scale
    own = made(weight, bias, kind)
    held = own.unpacked().double()
    expected = x.double() @ held.T + bias.double()
    # How far off rounding a row can be, and the result to the model's precision. The twin's weight is in that precision, and the
    # kernel's is a number of steps.
    allowed = rounding_of(x, held, kind) + TOLERANCES[dtype] * (expected.abs() + x.double().abs() @ held.abs().T)
    assert ((own(x).double() - expected).abs() <= allowed).all()
    assert own(x).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_eight_bits_hold(dtype: torch.dtype) -> None:
    _, weight, bias = random_product(dtype, (1, 2 * PANEL - 1, 300))
    size = weight.double().abs()
    error = (made(weight, bias, "int8").unpacked().double() - weight.double()).abs()
    assert (error <= size.amax(1, keepdim=True) / 127 * 0.51 + 2**-8 * size).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_comes_out_the_same_whatever_else_is_multiplied(dtype: torch.dtype, kind: str) -> None:
    x, weight, bias = random_product(dtype, (4 * MOST_ROWS + 5, 2 * PANEL, LONG))
    own = made(weight, bias, kind)
    alone = torch.cat([own(x[row : row + 1]) for row in range(len(x))])
    for num_rows in range(1, len(x) + 1):
        assert torch.equal(own(x[:num_rows]), alone[:num_rows])
        assert torch.equal(own(x[-num_rows:]), alone[-num_rows:])


@pytest.mark.parametrize("kind", KINDS)
def test_small_numbers_count_beside_large_ones(kind: str) -> None:
    """To eight bits they would all be nothing; those of a group of inputs count to the others."""
    x, weight, bias = random_product(torch.float32, (3, PANEL, 512))
    x[:, 0], weight[:, : 1 if kind == "int8" else GROUP] = 500.0, 0.0
    own = made(weight, bias, kind)
    torch.testing.assert_close(own(x), x @ own.unpacked().T + bias, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [LONG, 59 * LONG])
def test_the_largest_numbers_that_there_are(kind: str, size: int) -> None:
    """Where sums would leave their room."""
    x, weight, bias = torch.ones(2, size), torch.ones(PANEL, size), torch.zeros(PANEL)
    x[1], weight[1] = -1, -1
    own = made(weight, bias, kind)
    expected = x.double() @ own.unpacked().double().T
    torch.testing.assert_close(own(x).double(), expected, rtol=1e-4, atol=0)


def test_a_weight_of_too_many_inputs_is_not_rounded() -> None:
    assert quantized_product(torch.ones(PANEL, 60 * LONG), None, "int8") is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_nothing_and_of_no_numbers(dtype: torch.dtype, kind: str) -> None:
    x, weight, bias = random_product(dtype, (5, PANEL, 64))
    weight[3] = 0
    own = made(weight, bias, kind)
    expected = own(x)
    assert torch.equal(expected[:, 3], bias[3].expand(5))
    x[0], x[1, 3], x[3, 7] = 0, torch.nan, torch.inf
    found = own(x)
    assert torch.equal(found[0], bias)
    assert torch.equal(found[[2, 4]], expected[[2, 4]])
    assert found[[1, 3]].isnan().all()


@njit
def multiply_eight_bits(x, words, scales, weights, outputs):  # type: ignore[no-untyped-def]
    cut_rows(x, 0, len(x), words, scales)
    for panel in range(len(weights.words)):
        int8_product.multiply_cut(words, scales, 0, len(x), weights, panel, outputs)


@pytest.mark.parametrize("words_dtype", [np.uint32, np.int32])
def test_rows_as_bytes_and_as_halves(words_dtype: type[np.integer]) -> None:
    """By whichever instructions are faster here, or are there at all: both add the same products."""
    x, weight, bias = random_product(torch.float32, (5, 2 * PANEL, LONG))
    own, outputs = made(weight, bias, "int8"), torch.empty(5, 2 * PANEL)
    words, scales = np.empty(x.numel() * 2 // TOGETHER, dtype=words_dtype), np.empty(5, dtype=np.float32)
    multiply_eight_bits(array_of(x), words, scales, own.weights, array_of(outputs))
    assert torch.equal(outputs, own(x)) or (words_dtype is np.uint32) != HAS_BYTE_DOT
    torch.testing.assert_close(outputs, own(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("levels", [WHOLE, E2M1])
def test_bytes_added_to_words_and_to_halves(monkeypatch: pytest.MonkeyPatch, levels: tuple[int, ...]) -> None:
    """The sums are the same whole numbers, those of the largest too."""
    codes = torch.randint(0, 16, (2 * PANEL, 3, GROUP), dtype=torch.uint8)
    codes[0], nothings = levels.index(max(levels)), torch.zeros(2 * PANEL, 3, dtype=torch.uint8)
    own = Int4Product(
        FourBits(codes, torch.rand(2 * PANEL, 3).half(), nothings, levels, torch.rand(2 * PANEL)), 96, None, torch.float32
    )
    x, outputs = torch.randn(5, 96), torch.empty(5, 2 * PANEL)
    x[0] = 1
    expected = own(x)
    monkeypatch.setattr(int4_product, "ADDS_WORDS", not HAS_BYTE_DOT)
    njit(int4_product.int4_product.py_func)(array_of(x), own.weights, array_of(outputs))
    assert torch.equal(outputs, expected)
    torch.testing.assert_close(outputs[0], own.unpacked().sum(1), rtol=1e-5, atol=1e-4)


def on_levels(levels: tuple[int, ...], nothing: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(a weight whose groups of four times GROUP, or of one with E2M1, lie on levels, the same in this precision)."""
    out_size, group = 70, GROUP if levels == E2M1 else 4 * GROUP
    shape = out_size, 4 * GROUP // group
    sizes = torch.exp2(torch.randint(-12, -3, shape)) if levels == E2M1 else torch.rand(shape).half().float() / 50
    nothings = torch.randint(0, 17, shape) if nothing is None else torch.full(shape, nothing)
    numbers = torch.tensor(levels)[torch.randint(0, 16, (*shape, group))] - nothings[..., None]
    exact = (numbers * sizes[..., None]).flatten(1)
    return exact, exact.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("levels", "nothing"), [(WHOLE, 8), (WHOLE, None), (E2M1, 12)])
def test_a_weight_that_was_stored_in_four_bits_is_not_rounded_again(
    dtype: torch.dtype, levels: tuple[int, ...], nothing: int | None
) -> None:
    """But for the size of steps, which float16 holds, exactly where it is a power of two."""
    exact, weight = on_levels(levels, nothing, dtype)
    for found in (stored_four_bits(weight), in_four_bits(weight)):
        assert found
        assert found.levels == levels
        if levels == E2M1:
            assert torch.equal(found.widened(), exact)
        else:
            relative = 2**-11 + (2**-8 if dtype == torch.bfloat16 else 0)
            beside_the_largest = 2**-24 * exact.abs().amax(1, keepdim=True)
            assert ((found.widened() - exact).abs() <= relative * exact.abs() + beside_the_largest).all()
    product = Int4Product(found, weight.shape[1], None, dtype)
    assert torch.equal(product.unpacked(), found.widened().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [GROUP, 4 * GROUP])
@pytest.mark.parametrize(("levels", "nothing"), [(WHOLE, 8), (WHOLE, None), (E2M1, 12)])
def test_compiled_functions_find_the_levels_that_their_twins_find(
    levels: tuple[int, ...], nothing: int | None, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = torch.randn(5, 4 * GROUP), torch.zeros(2, 4 * GROUP), torch.randint(-1, 2, (3, 4 * GROUP))
    weights = [on_levels(levels, nothing, dtype)[1], *(own.to(dtype) for own in others)]
    weights[0][3, :group] = 0
    found = [stored_four_bits(weight, group) for weight in weights]
    monkeypatch.setattr(four_bits, "is_compiled", lambda weight: False)
    monkeypatch.setattr(four_bits, "AT_ONCE", 12 * GROUP)
    for weight, own in zip(weights, found, strict=True):
        expected = stored_four_bits(weight, group)
        assert (own is None) == (expected is None)
        if own and expected:
            assert own.levels == expected.levels
            assert torch.equal(own.codes, expected.codes)
            assert torch.equal(own.nothings, expected.nothings)
            torch.testing.assert_close(own.widened(), expected.widened(), rtol=2**-10, atol=0)
    assert found[0] is not None or (levels == E2M1 and group > GROUP)


def test_any_other_weight_was_not_stored_in_four_bits() -> None:
    exact, weight = on_levels(WHOLE, 8, torch.float32)
    assert stored_four_bits(torch.randn(5, 64)) is None
    weight[-1, 5] += 0.3 * weight[-1].abs().max() / 8
    assert stored_four_bits(weight) is None
    assert stored_four_bits(exact[:, torch.randperm(exact.shape[1])] + exact) is None


def test_four_bits_are_the_nearest() -> None:
    """Of sixteen steps between the least and the largest of a group."""
    weight = torch.randn(7, 3 * GROUP)
    held = in_four_bits(weight)
    assert isinstance(held, FourBits)
    span = weight.unflatten(1, (3, GROUP)).amax(2) - weight.unflatten(1, (3, GROUP)).amin(2)
    errors = (held.widened() - weight).unflatten(1, (3, GROUP)).abs()
    assert (errors <= span[..., None] / 15 * 1.01).all()  # at the ends a step may be cut off that is half rounded
    assert (errors.mean(2) < span / 15 * 0.4).all()
