"""Layers whose products of few rows are a GPU's kernels, here interpreted, against those that are torch's."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_rt.kernels import dispatch
from eagle_rt.kernels.products import WIDE_ROWS
from eagle_rt.models import layers
from eagle_rt.models.layers import Linear


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Weights are held as on a GPU; the names of the kernels that were asked for."""
    names: list[str] = []

    def kernel(name: str, x: Tensor) -> Callable[..., Any]:
        names.append(name)
        own = getattr(importlib.import_module(f"eagle_rt.kernels.triton.{name}"), name)
        # A CPU holds weights the other way round.
        return lambda *tensors: own(*(tensor.contiguous() for tensor in tensors))

    monkeypatch.setattr(layers, "is_wide", lambda weight: True)
    monkeypatch.setattr(layers, "product_with", lambda weight, bias, quantization: None)
    monkeypatch.setattr(dispatch, "triton_kernel", kernel)
    return names


@pytest.mark.parametrize("num_rows", [3, WIDE_ROWS, WIDE_ROWS + 1])
def test_few_rows_take_the_kernels(num_rows: int, called: list[str]) -> None:
    x, weight = torch.randn(num_rows, 128).bfloat16(), torch.randn(2 * 70, 128).bfloat16() / 4
    linear = Linear(weight)
    product = (x.float() @ weight.float().T).bfloat16()
    gate, up = product.float().chunk(2, dim=1)
    torch.testing.assert_close(linear(x), product, atol=0.05, rtol=0.02)
    torch.testing.assert_close(linear.gated(x), (gate * torch.sigmoid(gate) * up).bfloat16(), atol=0.1, rtol=0.04)
    assert called == (["wide_product", "gated_product"] if num_rows <= WIDE_ROWS else ["silu_and_mul"])


def test_none_has_a_bias(called: list[str]) -> None:
    linear = Linear(torch.ones(4, 128).bfloat16(), torch.ones(4).bfloat16())
    assert linear(torch.zeros(1, 128).bfloat16()).tolist() == [[1.0] * 4]
    assert not called
