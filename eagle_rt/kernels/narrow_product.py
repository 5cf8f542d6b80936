"""Products with weights of few bits on a GPU."""

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.dispatch import triton_kernel
from eagle_rt.kernels.narrow import BITS, NarrowWeight
from eagle_rt.kernels.packed_linear import OpaqueProduct

# Of more rows products take longer than reading the weight does: then it is widened first, and cuBLAS multiplies. Not measured: by
# the operations of both.
MOST_ROWS = 256


class NarrowProduct(OpaqueProduct):
    """x W^T + b; dtype: of x."""

    def __init__(self, weight: NarrowWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_size, self.num_bits = weight.out_size, BITS[weight.kind]
        self._weight, self._bias, self._dtype = weight, bias, dtype

    def apply(self, x: Tensor) -> Tensor:
        kernel = triton_kernel("narrow_product", x) if len(x) <= MOST_ROWS else None
        return kernel(x, self._weight, self._bias) if kernel else functional.linear(x, self.unpacked(), self._bias)

    def unpacked(self) -> Tensor:
        kernel = triton_kernel("widen", self._weight.words)
        return kernel(self._weight, self._dtype) if kernel else self._weight.widened().to(self._dtype)
