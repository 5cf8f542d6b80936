"""Products of rows on a CPU by our own kernel; needs numba."""

from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.cpu.product import PANEL, product
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of, words_of
from eagle_rt.kernels.packed_linear import OpaqueProduct


class RowProduct(OpaqueProduct):
    """x W^T + b with W [out, in] laid out in panels, see `cpu.product`. A row comes out the same whatever else is in x.

    weight: [panels, in words, PANEL]; bias: [panels * PANEL] float32; what they hold beyond `out` and `in` is nothing, and where
    there is none of that they are whole.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_size, self.in_size = weight.shape
        together = 4 // weight.itemsize
        self._num_more_inputs, num_more_outputs = -self.in_size % together, -self.out_size % PANEL
        self.is_whole = not (self._num_more_inputs or num_more_outputs)
        if not self.is_whole:
            weight = functional.pad(weight, (0, self._num_more_inputs, 0, num_more_outputs))
        self._panels = weight.new_empty(len(weight) // PANEL, weight.shape[1] // together, PANEL, together)
        self._panels.transpose(1, 2).copy_(weight.view(-1, PANEL, weight.shape[1] // together, together))
        self.weight = words_of(array_of(self._panels)).reshape(self._panels.shape[:3])
        if bias is None:
            bias = weight.new_zeros(self.out_size)
        self.bias = functional.pad(bias.float(), (0, num_more_outputs)).numpy()
        self.multiply(weight.new_zeros(1, self.in_size))  # compiled now rather than in the first pass

    def multiply(self, x: Tensor) -> Tensor:
        use_torch_threads()
        if self._num_more_inputs:
            x = functional.pad(x, (0, self._num_more_inputs))
        outputs = x.new_empty(len(x), len(self.bias))
        product(words_of(array_of(x.contiguous())), self.weight, self.bias, array_of(outputs))
        return outputs[:, : self.out_size]

    def unpacked(self) -> Tensor:
        weight = self._panels.transpose(1, 2).flatten(2).flatten(0, 1)
        return weight[: self.out_size, : self.in_size].contiguous()
