from weakref import WeakValueDictionary

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels import dispatch, opaque, packed_linear
from eagle_rt.kernels.gate import GEGLU, Gate, gated
from eagle_rt.kernels.noise import gumbel_noise
from eagle_rt.kernels.packed_linear import AMX_TILES, NO_TILES, PREPARED_ROWS, SMALL_TILES, PackedProduct, can_pack
from eagle_rt.kernels.rms_norm import RMSNorm
from eagle_rt.kernels.rotary import rotate


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_rms_norm(scale: float) -> None:
    """The smaller the input, the more eps decides."""
    x, weight = torch.randn(5, 3, 48) * scale, torch.rand(48)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x), expected)
    half = RMSNorm(weight.bfloat16(), 1e-5)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.02, atol=1e-2)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_equal_plain_ones(num_rows: int, dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(40, 24).to(dtype), torch.randn(40).to(dtype), torch.randn(num_rows, 24).to(dtype)
    if not can_pack(weight):
        pytest.skip(f"oneDNN packs no {dtype} here")
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.03}
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(PackedProduct(weight, None)(x).double(), expected, **tolerance)
    torch.testing.assert_close(PackedProduct(weight, bias)(x).double(), expected + bias, **tolerance)
    assert torch.equal(PackedProduct(weight, bias).unpacked(), weight)


def test_rows_are_filled_up_to_whole_tiles() -> None:
    numbers = (1, 15, 16, 17, 24, 25, 40, 49, 512, 513)
    assert [NO_TILES.filled_up(number) for number in numbers] == list(numbers)
    assert [SMALL_TILES.filled_up(number) for number in numbers] == [1, 15, 16, 24, 24, 32, 40, 56, 512, 576]
    assert [AMX_TILES.filled_up(number) for number in numbers] == [1, 15, 16, 48, 48, 48, 48, 64, 512, 576]


def test_products_of_few_rows_are_prepared_once_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opaque, "_operations", WeakValueDictionary())
    products = [PackedProduct(torch.randn(out_size, 24), None) for out_size in (40, 40, 8)]
    made: list[tuple[int, int]] = []
    call = PackedProduct.__call__

    def counted(product: PackedProduct, x: Tensor) -> Tensor:
        made.append((product.out_size, len(x)))
        return call(product, x)

    monkeypatch.setattr(PackedProduct, "__call__", counted)
    packed_linear.prepare_products()
    numbers = {products[0].tiles.filled_up(number) for number in range(1, PREPARED_ROWS + 1)}
    assert sorted(made) == sorted((out_size, number) for out_size in (8, 40) for number in numbers)


def test_rotate_turns_complex_pairs() -> None:
    x, angles = torch.randn(6, 3, 8), torch.randn(6, 4)
    cos = angles.cos().repeat(1, 2)[:, None]
    sin = torch.cat((-angles.sin(), angles.sin()), dim=1)[:, None]
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(6, 1, 4), angles[:, None])
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat((turned.real, turned.imag), dim=-1))


@pytest.mark.parametrize("has_numba", [False, True])
def test_gated(monkeypatch: pytest.MonkeyPatch, has_numba: bool) -> None:
    monkeypatch.setattr(dispatch, "HAS_NUMBA", has_numba)
    x = 3 * torch.randn(3, 10)
    gates, ups = x.chunk(2, dim=1)
    torch.testing.assert_close(gated(x), gates * torch.sigmoid(gates) * ups)
    torch.testing.assert_close(gated(x, GEGLU), functional.gelu(gates, approximate="tanh") * ups, rtol=1e-4, atol=1e-5)
    low, clamped = gates.clamp(max=2), ups.clamp(-2, 2)
    torch.testing.assert_close(gated(x, Gate(1.7, 2.0, 1.0)), low * torch.sigmoid(1.7 * low) * (clamped + 1))


def test_noise_is_gumbel() -> None:
    seeds = torch.arange(40) * 7919
    noise = gumbel_noise(seeds, torch.full((40,), 3), torch.arange(5000))
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3
    assert torch.isfinite(noise).all()


def test_noise_depends_on_seed_position_and_token_only() -> None:
    seeds, positions = torch.tensor([1, 1, 2, 2**40 + 1]), torch.tensor([5, 6, 5, 5])
    noise = gumbel_noise(seeds, positions, torch.arange(100))
    assert torch.equal(noise[1:2], gumbel_noise(seeds[1:2], positions[1:2], torch.arange(100)))
    assert torch.equal(noise[:, :10], gumbel_noise(seeds, positions, torch.arange(10)))
    for a in range(4):
        for b in range(a):
            assert not torch.equal(noise[a], noise[b])


def test_noise_is_uncorrelated_across_seeds_positions_and_tokens() -> None:
    """Neighbouring keys are the ones that are used together."""
    base = gumbel_noise(torch.arange(200), torch.full((200,), 9), torch.arange(300))
    shifted = gumbel_noise(torch.arange(200), torch.full((200,), 10), torch.arange(300))
    pairs = [(base, shifted), (base[1:], base[:-1]), (base[:, 1:], base[:, :-1]), (base[1:], shifted[:-1])]
    for a, b in pairs:
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(correlation) < 5 / a.numel() ** 0.5


def test_noise_is_pinned() -> None:
    """Seeded replies must stay the same from version to version."""
    noise = gumbel_noise(torch.tensor([1234]), torch.tensor([56]), torch.arange(4))
    expected = torch.tensor(PINNED)
    torch.testing.assert_close(noise[0], expected, rtol=1e-5, atol=1e-6)


PINNED = [-1.1956871, -0.7144747, -0.3240577, -0.222379]
