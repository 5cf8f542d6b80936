"""Experts of a feed-forward part on a CPU by our own kernels; needs numba."""

from collections.abc import Iterable
from itertools import takewhile
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.cpu.experts import expert_weights, mix_rows
from eagle_rt.kernels.cpu.product import PANEL
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of
from eagle_rt.kernels.experts import ExpertTensors, Mixing
from eagle_rt.kernels.panel_product import PanelProduct, ProductStack, RowProduct, quantized_product


def fill_panels(weights: ExpertTensors) -> bool:
    """Whether these experts leave nothing of a panel empty, which `PanelExperts` takes for granted."""
    return all(size % PANEL == 0 for size in weights.down.shape[1:])


def product_stack(weights: Tensor, biases: Tensor | None, quantization: str) -> ProductStack:
    """Of each [out, in] of weights [E, out, in]: quantized, if all of them are."""
    pairs = list(zip(weights, [None] * len(weights) if biases is None else biases, strict=True))
    if quantization != "none":
        quantized = takewhile(bool, (quantized_product(weight, bias, quantization) for weight, bias in pairs))
        stack = ProductStack(cast(Iterable[PanelProduct], quantized), len(pairs))
        if stack.is_full:
            return stack
    return ProductStack((RowProduct(weight, bias) for weight, bias in pairs), len(pairs))


class PanelExperts:
    """`kernels.experts` in one function, from weights laid out for it. A row comes out the same whatever else is in x.

    quantization: of the weights of the experts, see `products.product_with`. Their sizes must be such that they `fill_panels`.
    """

    def __init__(self, weights: ExpertTensors, mixing: Mixing, quantization: str = "none") -> None:
        router, more = weights.router.to(weights.down.dtype), -len(weights.router) % PANEL
        bias = None if weights.router_bias is None else functional.pad(weights.router_bias, (0, more))
        self.router = RowProduct(functional.pad(router, (0, 0, 0, more)), bias)
        stacks = (weights.gate_and_up, weights.gate_and_up_bias), (weights.down, weights.down_bias)
        self.gate_and_up, self.down = (product_stack(own, biases, quantization) for own, biases in stacks)
        self.choice_bias, self._share_scales = map(numbers_of, (weights.choice_bias, weights.share_scales))
        self.mixing = mixing
        self(torch.zeros(1, router.shape[1], dtype=router.dtype))  # compiled now rather than in the first pass

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Gates and ups, and downs, copied."""
        return self.gate_and_up.unpacked(), self.down.unpacked()

    def __call__(self, x: Tensor, router_x: Tensor | None = None) -> Tensor:
        use_torch_threads()
        outputs = torch.empty_like(x, memory_format=torch.contiguous_format)
        products = (self.router.weights, self.gate_and_up.weights, self.down.weights)
        weights = expert_weights(*products, self.choice_bias, self._share_scales, self.mixing)
        inputs, router_inputs = (array_of(own.contiguous()) for own in (x, x if router_x is None else router_x))
        mix_rows(inputs, router_inputs, weights, array_of(outputs))
        return outputs


def numbers_of(own: Tensor | None) -> NDArray[np.float32]:
    """None of them where there are none."""
    return (torch.empty(0) if own is None else own).numpy()
