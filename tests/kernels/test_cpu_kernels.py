"""Compiled functions for CPUs against their twins in torch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch.nn import functional

from eagle_rt.kernels.cpu import drop_stale_code
from eagle_rt.kernels.cpu.add_rms_norm import add_rms_norm
from eagle_rt.kernels.cpu.best_token import best_token
from eagle_rt.kernels.cpu.cos_sin import cos_sin
from eagle_rt.kernels.cpu.gated import gated
from eagle_rt.kernels.cpu.instructions import has_instructions
from eagle_rt.kernels.cpu.order import BLOCK
from eagle_rt.kernels.cpu.product import HAS_FAST_PAIRS, MOST_ROWS, PANEL, RowWeights, multiply_tile, turn_tile
from eagle_rt.kernels.cpu.rotate_and_write import rotate_and_write
from eagle_rt.kernels.cpu.top_children import top_children
from eagle_rt.kernels.cpu.turned_keys import BLOCK as KEYS_OF_BLOCK
from eagle_rt.kernels.cpu.turned_keys import score_keys, turn_keys
from eagle_rt.kernels.cpu.vectors import array_of, pairs_of, words_of
from eagle_rt.kernels.cpu.wide_vectors import softmax, sum_of_powers
from eagle_rt.kernels.gate import GEGLU, SWIGLU, Gate
from eagle_rt.kernels.panel_product import RowProduct
from eagle_rt.kernels.rms_norm import HeadNorms, RMSNorm, norms_side_by_side
from eagle_rt.kernels.rotary import rotate
from eagle_rt.speculate.sampler import best_token as best_token_of
from eagle_rt.tree.expand import top_children as top_children_in_torch

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 0.01, "atol": 0.03}}


def random_product(dtype: torch.dtype, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, out_size, in_size = sizes
    x, weight, bias = torch.randn(num_rows, in_size), torch.randn(out_size, in_size) / in_size**0.5, torch.randn(out_size)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(st.integers(1, 5 * MOST_ROWS), st.integers(1, 3 * PANEL), st.integers(1, 70)),
    has_bias=st.booleans(),
)
def test_products_of_any_shape(dtype: torch.dtype, sizes: tuple[int, int, int], has_bias: bool) -> None:
    x, weight, bias = random_product(dtype, sizes)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    own = RowProduct(weight, bias if has_bias else None)
    torch.testing.assert_close(own(x).double(), expected, **TOLERANCES[dtype])
    assert own(x).dtype == dtype
    assert torch.equal(own.unpacked(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_comes_out_the_same_whatever_else_is_multiplied(dtype: torch.dtype) -> None:
    x, weight, bias = random_product(dtype, (4 * MOST_ROWS + 5, 2 * PANEL, 300))
    own = RowProduct(weight, bias)
    alone = torch.cat([own(x[row : row + 1]) for row in range(len(x))])
    for num_rows in range(1, len(x) + 1):
        assert torch.equal(own(x[:num_rows]), alone[:num_rows])
        assert torch.equal(own(x[-num_rows:]), alone[-num_rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_hold_no_numbers_spoil_no_other(dtype: torch.dtype) -> None:
    x, weight, _ = random_product(dtype, (5, PANEL, 64))
    own = RowProduct(weight, None)
    expected = own(x)
    x[1, 3], x[3, 7] = torch.nan, torch.inf
    found = own(x)
    assert torch.equal(found[::2], expected[::2])
    assert found[1].isnan().all()
    assert not found[3].isfinite().any()


@njit
def multiply_as(x: np.ndarray, columns: np.ndarray, weights: RowWeights, outputs: np.ndarray) -> None:
    turn_tile(x, 0, len(x), columns)
    for panel in range(len(weights.words)):
        multiply_tile(columns, 0, len(x), weights.words, panel, weights.bias, outputs)


@pytest.mark.parametrize("columns_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_rows", [1, MOST_ROWS - 1])
def test_pairs_of_bfloat16_at_once_and_one_by_one(num_rows: int, columns_dtype: type[np.integer]) -> None:
    """By whichever instructions are faster here, or are there at all: both add the same products."""
    if columns_dtype is np.int32 and not has_instructions("avx512bf16"):
        pytest.skip("no instructions for pairs of bfloat16")
    x, weight, bias = random_product(torch.bfloat16, (num_rows, 2 * PANEL, 66))
    own, outputs = RowProduct(weight, bias), torch.empty(num_rows, 2 * PANEL, dtype=torch.bfloat16)
    words = words_of(array_of(x))
    multiply_as(words, np.empty(words.size, dtype=columns_dtype), own.weights, array_of(outputs))
    is_own = columns_dtype is (np.int32 if HAS_FAST_PAIRS else np.int64)
    assert torch.equal(outputs, own(x)) or not is_own
    torch.testing.assert_close(outputs.double(), x.double() @ weight.double().T + bias, **TOLERANCES[torch.bfloat16])


def norm_in_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By the twin, which takes no kernel for more than two dimensions."""
    return RMSNorm(weight, 1e-5)(x[:, None])[:, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 8), (3, 33), (9, 256)])
def test_adding_and_norm(dtype: torch.dtype, num_rows: int, size: int) -> None:
    x, delta, weight = torch.randn(num_rows, size).to(dtype), torch.randn(num_rows, size).to(dtype), torch.rand(size).to(dtype)
    for own_delta in (None, delta):
        total = x if own_delta is None else x + own_delta
        for found, expected in zip(add_rms_norm(x, own_delta, weight, 1e-5), (total, norm_in_torch(total, weight)), strict=True):
            torch.testing.assert_close(found, expected, rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_side_by_side(dtype: torch.dtype) -> None:
    x, y, weights = torch.randn(5, 33).to(dtype), torch.randn(5, 64).to(dtype), (torch.rand(33).to(dtype), torch.rand(64).to(dtype))
    expected = torch.cat((norm_in_torch(x, weights[0]), norm_in_torch(y, weights[1])), dim=1)
    found = norms_side_by_side(x, RMSNorm(weights[0], 1e-5), y, RMSNorm(weights[1], 1e-5))
    torch.testing.assert_close(found, expected, rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def gate_in_torch(gate_and_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    gates, ups = gate_and_up.chunk(2, dim=-1)
    return (functional.gelu(gates, approximate="tanh") if gate == GEGLU else functional.silu(gates)) * ups


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [SWIGLU, GEGLU])
def test_gate(gate: Gate, dtype: torch.dtype) -> None:
    x = torch.cat((torch.randn(4, 62) * 5, torch.tensor([[0.0, -200.0]] * 4), torch.randn(4, 64)), dim=1).to(dtype)
    torch.testing.assert_close(gated(x, gate), gate_in_torch(x, gate), **TOLERANCES[dtype])
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    found, expected = gated(x, gate), gate_in_torch(x, gate)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_kv_heads", "follows", "norms_values"),
    [(2, None, False), (2, False, False), (2, True, False), (2, False, True), (0, False, True)],
)
def test_rotation_and_writing(dtype: torch.dtype, num_kv_heads: int, follows: bool | None, norms_values: bool) -> None:
    """num_kv_heads: none where another layer keeps them; follows: whether norms follow turning; None for no norms."""
    num_heads, head_dim, slots = 4, 16, torch.tensor([7, 2, 9])
    qkv = torch.randn(3, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = torch.randn(3, 1, head_dim // 2)
    cos = torch.cat((angles.cos(), angles.cos()), dim=2).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=2).to(dtype)
    of_queries, of_keys, of_values = (RMSNorm(torch.rand(head_dim).to(dtype), 1e-5) for _ in range(3))
    norms = None if follows is None else HeadNorms(of_queries, of_keys, follows, of_values if norms_values else None)
    turned, values = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    values = norms.values(values) if norms and norms.values else values
    turned = norms(turned, num_heads) if norms and not follows else turned
    turned = rotate(turned, cos, sin)
    turned = norms(turned, num_heads) if norms and follows else turned
    storage = torch.zeros(12, 2, num_kv_heads, head_dim, dtype=dtype)
    queries = rotate_and_write(qkv.clone(), num_heads, cos, sin, norms, storage, slots)
    torch.testing.assert_close(queries, turned[:, :num_heads], **TOLERANCES[dtype])
    torch.testing.assert_close(storage[slots, 0], turned[:, num_heads:], **TOLERANCES[dtype])
    torch.testing.assert_close(storage[slots, 1], values, **(TOLERANCES[dtype] if norms_values else {"rtol": 0, "atol": 0}))
    others = np.setdiff1d(np.arange(12), slots.numpy())
    assert not storage[others].any()


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(st.integers(1, 5), st.one_of(st.integers(1, 60), st.integers(BLOCK - 2, 3 * BLOCK))),
    top_k=st.integers(1, 12),
    sharpness=st.sampled_from([1.0, 1.5]),
    seed=st.integers(0, 1000),
)
def test_best_draft_tokens(dtype: torch.dtype, sizes: tuple[int, int], top_k: int, sharpness: float, seed: int) -> None:
    """With many ties, and rows that hold what is no number or is ruled out."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-6, 7, sizes, generator=generator).to(dtype)
    odd = torch.randint(12, sizes, generator=generator)
    logits[(odd == 0) & (torch.arange(sizes[0]) % 2 == 1)[:, None]] = -torch.inf
    if seed % 3 == 0:
        logits[0, seed % sizes[1]] = torch.nan
    top_k = min(top_k, sizes[1])
    scores, tokens = top_children(logits, top_k, sharpness)
    expected, _ = top_children_in_torch(logits, top_k, sharpness)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    own = torch.log_softmax(logits.float() * sharpness, dim=-1).gather(1, tokens).nan_to_num(nan=-torch.inf)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == top_k for row in tokens.tolist())
    # Of equal ones the first come first.
    has_numbers = ~logits.isnan().any(dim=1)
    in_order = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(tokens[has_numbers], in_order[has_numbers])


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 3 * BLOCK)),
    odd=st.sampled_from([0.0, -0.0, 7.0, torch.inf, -torch.inf, torch.nan, -torch.nan]),
    seed=st.integers(0, 1000),
)
def test_best_tokens(dtype: torch.dtype, sizes: tuple[int, int], odd: float, seed: int) -> None:
    """With many ties, and rows of which many or all numbers are odd ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-6, 7 if seed % 2 else 1, sizes, generator=generator).to(dtype)
    is_odd = torch.rand(sizes, generator=generator) < torch.tensor([1.0, 0.5, 2 / sizes[1]])[seed % 3]
    logits[is_odd & (torch.rand(sizes[0], 1, generator=generator) < 0.7)] = odd
    assert torch.equal(best_token(logits), logits.max(dim=-1).indices)
    assert torch.equal(best_token_of(logits[None]), logits.max(dim=-1).indices[None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles(dtype: torch.dtype) -> None:
    positions, frequencies = torch.tensor([0, 1, 77, 100_000]), torch.cat((-torch.logspace(0, -4, 8), torch.logspace(0, -4, 8)))
    angles, scales = positions[:, None, None] * frequencies, torch.linspace(0.7, 1.3, 8).repeat(2)
    found = cos_sin(positions, frequencies, scales, dtype)
    for own, expected in zip(found, (angles.cos() * scales, angles.sin() * scales), strict=True):
        torch.testing.assert_close(own, expected.to(dtype), rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_sums_are_rounded_to_the_nearest_and_of_two_to_the_even_one() -> None:
    steps = torch.arange(8)
    x, weight = torch.stack((torch.ones(8), steps), dim=1).bfloat16(), torch.tensor([[1, 2**-8]]).bfloat16()
    assert torch.equal(RowProduct(weight, None)(x)[:, 0], (1 + steps * 2**-8).bfloat16())


def test_compiled_code_goes_when_any_source_changes(tmp_path: Path) -> None:
    """numba would keep a caller's code that holds the code of a function in another file as it was."""
    source, kept = tmp_path / "inner.py", tmp_path / "__pycache__" / "outer.call-1.py311.nbi"
    source.write_text("one")
    drop_stale_code(tmp_path)
    kept.write_text("compiled")
    drop_stale_code(tmp_path)
    assert kept.exists()
    source.write_text("two")
    drop_stale_code(tmp_path)
    assert not kept.exists()


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "mkdir", refuse)
    drop_stale_code(tmp_path)
    assert not (tmp_path / "__pycache__").exists()


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_keys=st.integers(1, KEYS_OF_BLOCK),
    head_dim=st.sampled_from([16, 48, 64, 576]),
    seed=st.integers(0, 99),
)
def test_scores_of_turned_keys(dtype: torch.dtype, num_keys: int, head_dim: int, seed: int) -> None:
    """Wherever the keys of a block lie; each number of a key is one row, the even one of a pair before the odd one."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(200, head_dim, generator=generator).to(dtype)
    places = torch.randperm(200, generator=generator)[:num_keys]
    turned = np.full((head_dim, KEYS_OF_BLOCK), np.nan, dtype=np.float32)
    turn_keys(pairs_of(array_of(cache)), places.numpy() * (head_dim // 2), turned)
    assert np.array_equal(turned[:, :num_keys], cache[places].float().T.numpy())
    queries, scores = torch.randn(2, head_dim, generator=generator), np.empty((2, KEYS_OF_BLOCK), dtype=np.float32)
    halves = [np.ascontiguousarray(queries[:, half::2].numpy()) for half in (0, 1)]
    score_keys(*halves, turned, num_keys, scores)
    expected = queries.double() @ cache[places].double().T
    np.testing.assert_allclose(scores[:, :num_keys], expected.numpy(), atol=1e-4, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=KEYS_OF_BLOCK),
    most=st.floats(-300, 300, width=32),
    place=st.integers(0, 70),
)
def test_weights_of_scores(scores: list[float], most: float, place: int) -> None:
    """And what is no number stays so, and makes no other number of those beside it."""
    own = np.array(scores, dtype=np.float32)
    highest, factor, total = softmax(own, np.float32(most))
    assert highest == max(*scores, most)
    expected = np.exp2(np.maximum(np.array(scores) - highest, -126.0))
    np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose([factor, total], [np.exp2(max(most - highest, -126.0)), expected.sum()], rtol=1e-5, atol=1e-37)
    broken = np.array(scores, dtype=np.float32)
    broken[place % len(broken)] = np.nan
    _, _, total = softmax(broken, np.float32(most))
    assert np.isnan(total)
    assert np.isnan(broken).sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 33, 1024, 1057, 2500])
def test_sums_of_powers(dtype: torch.dtype, size: int) -> None:
    logits = 4 * torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    highest, sharpness = np.float32(logits.max().item()), np.float32(0.7)
    expected = torch.exp2((logits.double() - float(highest)) * float(sharpness)).sum()
    np.testing.assert_allclose(sum_of_powers(array_of(logits), highest, sharpness), expected, rtol=3e-6)
    for place in {0, size // 2, size - 1}:
        broken = logits.clone()
        broken[place] = torch.nan
        assert np.isnan(sum_of_powers(array_of(broken), highest, sharpness))
