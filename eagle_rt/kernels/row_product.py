"""Products of rows on a CPU by our own kernel; needs numba."""

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.cpu.product import PANEL, product
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of, words_of
from eagle_rt.kernels.packed_linear import OpaqueProduct


class RowProduct(OpaqueProduct):
    """x W^T + b with W [out, in] laid out in panels, see `cpu.product`. A row comes out the same whatever else is in x.

    weight: [panels, in words, PANEL]; bias: [panels * PANEL] float32; what they hold beyond `out` and `in` is nothing.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_size, self.in_size = weight.shape
        self._num_more_inputs = self.in_size % 2 if weight.dtype == torch.bfloat16 else 0
        weight = functional.pad(weight, (0, self._num_more_inputs, 0, -self.out_size % PANEL))
        self._panels = weight.unflatten(0, (-1, PANEL)).unflatten(2, (-1, 4 // weight.itemsize)).transpose(1, 2).contiguous()
        self.weight = words_of(array_of(self._panels)).reshape(len(self._panels), -1, PANEL)
        if bias is None:
            bias = weight.new_zeros(self.out_size)
        self.bias = functional.pad(bias.float(), (0, -self.out_size % PANEL)).numpy()
        self.is_whole = self.out_size % PANEL == 0 and not self._num_more_inputs
        self.multiply(weight.new_zeros(1, self.in_size))  # compiled now rather than in the first pass

    def multiply(self, x: Tensor) -> Tensor:
        use_torch_threads()
        if self._num_more_inputs:
            x = functional.pad(x, (0, 1))
        outputs = x.new_empty(len(x), len(self.bias))
        product(words_of(array_of(x.contiguous())), self.weight, self.bias, array_of(outputs))
        return outputs[:, : self.out_size]

    def unpacked(self) -> Tensor:
        weight = self._panels.transpose(1, 2).flatten(2).flatten(0, 1)
        return weight[: self.out_size, : self.in_size].contiguous()
