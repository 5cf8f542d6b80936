"""Matrix products with the weights of a checkpoint."""

from collections.abc import Callable

import torch
from torch import Tensor

from eagle_rt.kernels import dispatch
from eagle_rt.kernels.gate import SWIGLU, Gate, gated
from eagle_rt.kernels.products import Quantization, product_with
from eagle_rt.kernels.skinny import most_skinny_rows
from eagle_rt.models.weights import Checkpoint


class Linear:
    """y = x W^T + b for x [R, in], given W [out, in].

    Where there are products with a weight that is laid out for them it is held only so; quantization: see `product_with`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, quantization: Quantization = "none") -> None:
        self.bias = bias
        self.product = product_with(weight, bias, quantization)
        self._transposed = None
        if not self.product:
            self._transposed = weight.t() if weight.is_cuda else weight.t().contiguous()
        self._most_skinny_rows = 0 if self.product or bias is not None else most_skinny_rows(weight)

    @property
    def weight(self) -> Tensor:
        """W [out, in]; a copy where only the one for products is held."""
        if self.product:
            return self.product.unpacked()
        assert self._transposed is not None
        return self._transposed.t()

    def rows(self, kept: Tensor) -> "Linear":
        """Only the outputs [R] that `kept` names."""
        return Linear(self.weight[kept], None if self.bias is None else self.bias[kept])

    def quantized(self) -> "Linear":
        """The same with a weight of eight bits, or fewer if it has."""
        return self if self.product and self.product.num_bits else Linear(self.weight, self.bias, "int8")

    def __call__(self, x: Tensor) -> Tensor:
        if self.product:
            return self.product(x)
        if kernel := self._skinny_kernel("skinny_product", x):
            return kernel(x, self.weight)
        assert self._transposed is not None
        return x @ self._transposed if self.bias is None else torch.addmm(self.bias, x, self._transposed)

    def gated(self, x: Tensor, gate: Gate = SWIGLU) -> Tensor:
        """[R, out / 2] of gates and ups, which are the halves of the outputs."""
        if gate == SWIGLU and (kernel := self._skinny_kernel("gated_product", x)):
            return kernel(x, self.weight)
        return gated(self(x), gate)

    def _skinny_kernel(self, name: str, x: Tensor) -> Callable[..., Tensor] | None:
        return dispatch.triton_kernel(name, x) if 0 < len(x) <= self._most_skinny_rows else None


def linear(checkpoint: Checkpoint, name: str, out_size: int, in_size: int, quantization: Quantization = "none") -> Linear:
    return merged_linear(checkpoint, {name: out_size}, in_size, quantization)


def merged_linear(checkpoint: Checkpoint, out_sizes: dict[str, int], in_size: int, quantization: Quantization) -> Linear:
    """Several projections of one input as a single product. Either all of them have a bias or none has; one of zeros only, as
    quantizers write them, is none.

    Each is copied to its place as it is read, so that no more than one of them is in memory twice.
    """
    biases = [checkpoint.take(f"{name}.bias", (size,)) for name, size in out_sizes.items() if f"{name}.bias" in checkpoint]
    bias = torch.cat(biases) if any(own.any() for own in biases) else None
    if len(out_sizes) == 1:
        (name, size), *_ = out_sizes.items()
        return Linear(checkpoint.take(f"{name}.weight", (size, in_size)), bias, quantization)
    merged, row = None, 0
    for name, size in out_sizes.items():
        weight = checkpoint.take(f"{name}.weight", (size, in_size))
        if merged is None:
            merged = weight.new_empty(sum(out_sizes.values()), in_size)
        merged[row : row + size] = weight
        row += size
    assert merged is not None
    return Linear(merged, bias, quantization)
