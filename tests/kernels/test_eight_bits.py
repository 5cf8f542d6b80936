"""Weights of eight bits: how those that were stored so are found."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_rt.kernels import eight_bits
from eagle_rt.kernels.eight_bits import LEAST_INPUTS, rounded_to_eight_bits, stored_eight_bits
from eagle_rt.kernels.four_bits import HAS_NUMBA

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TWINS = [
    pytest.param(False, id="torch"),
    pytest.param(True, id="compiled", marks=pytest.mark.skipif(not HAS_NUMBA, reason="numba")),
]


@pytest.fixture(params=TWINS)
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    own = eight_bits.is_compiled
    monkeypatch.setattr(eight_bits, "is_compiled", lambda weight: request.param and own(weight))
    return request.param


def random_stored(seed: int, in_size: int, size: float) -> tuple[Tensor, Tensor]:
    """(whole numbers [40, in], the steps of each output), of which the largest is so many; one output is nothing."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, in_size, generator=generator)
    steps = weight.abs().amax(1, keepdim=True) / size
    numbers = (weight / steps).round().clamp(-128, 127)
    numbers[7] = 0
    return numbers, steps * (0.02 + torch.rand(40, 1, generator=generator) / 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_size", [LEAST_INPUTS, 256, 3000])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([127, 127.5, 120, 100, 71]))
def test_what_was_stored_is_found(in_size: int, dtype: torch.dtype, seed: int, size: float) -> None:
    """Number by number. bfloat16 leaves more than one size of steps: no number is further off than its own rounding was."""
    for compiled in (False, HAS_NUMBA):
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr(eight_bits, "is_compiled", lambda weight: False)
            numbers, steps = random_stored(seed, in_size, size)
            weight = (numbers * steps).to(dtype)
            found = stored_eight_bits(weight)
            assert found
            # Half a step is what bfloat16 may have taken from the largest.
            assert torch.equal(found.numbers[numbers.abs() < 125], numbers[numbers.abs() < 125].to(torch.int8))
            assert (found.numbers - numbers).abs().max() <= (1 if dtype == torch.bfloat16 else 0)
            off = (found.numbers * found.scales[:, None] - weight.float()).abs()
            assert (off <= (1 + 2**-6) * (2**-8 if dtype == torch.bfloat16 else 2**-10) * weight.float().abs() + 1e-6).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), in_size=st.sampled_from([64, 300]), dtype=st.sampled_from(DTYPES))
def test_both_find_the_same_steps(seed: int, in_size: int, dtype: torch.dtype) -> None:
    numbers, steps = random_stored(seed, in_size, 127)
    weight = (numbers * steps).to(dtype)
    own = eight_bits.find_steps(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eight_bits, "is_compiled", lambda weight: False)
        patch.setattr(eight_bits, "rows_at_once", lambda weight: 3)
        expected = eight_bits.find_steps(weight)
    assert own is not None
    assert expected is not None
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_others_were_not_stored_so(is_compiled: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    numbers, steps = random_stored(0, 256, 127)
    weight = (numbers * steps).to(dtype)
    assert stored_eight_bits(weight)
    others = {
        "any": torch.randn(40, 256),
        "few inputs": weight[:, : LEAST_INPUTS - 1],
        "one number off": weight.clone(),
        "one that is nearly nothing": weight.clone(),
        "no number": weight.clone(),
        "infinity": weight.clone(),
        "nine bits": torch.randint(-255, 256, (40, 256)) * steps,
        "128 above nothing": torch.where(numbers == numbers.amax(1, keepdim=True), 128, numbers) * steps,
    }
    of_30_steps = int((numbers[-1] - 30).abs().argmin())
    others["one number off"][-1, of_30_steps] += 0.4 * steps[-1, 0].to(dtype)
    others["one that is nearly nothing"][3, 5] = 0.2 * steps[3, 0]
    others["no number"][2, 3], others["infinity"][2, 3] = torch.nan, torch.inf
    found = [name for name, other in others.items() if stored_eight_bits(other.to(dtype))]
    assert not found


def test_small_numbers_may_be_missing(is_compiled: bool) -> None:
    """If none was rounded, so that the largest tells how large steps are."""
    _, steps = random_stored(0, 256, 127)
    numbers = torch.randint(60, 101, (40, 256)) * torch.where(torch.rand(40, 256) < 0.5, -1, 1)
    found = stored_eight_bits(numbers * steps)
    assert found
    assert torch.equal(found.numbers, numbers.to(torch.int8))


def test_rounding_is_to_the_nearest() -> None:
    weight = torch.randn(5, 70)
    rounded = rounded_to_eight_bits(weight)
    assert rounded.numbers.abs().amax(1).tolist() == [127] * 5
    assert ((rounded.numbers * rounded.scales[:, None] - weight).abs() <= 0.5001 * rounded.scales[:, None]).all()
