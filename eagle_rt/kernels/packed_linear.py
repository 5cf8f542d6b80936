"""Matrix products with few rows on a CPU, where reading the weight is what costs."""

import itertools
from weakref import WeakValueDictionary

import torch
from torch import Tensor


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has packed products for this weight here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


class PackedProduct:
    """x W^T + b with W [out, in] laid out once as oneDNN's kernels read it, by the operators that torch's own freezing uses.

    Up to about sixteen rows cost what one does, and every row comes out nearly as it would alone.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_size = len(weight)
        self._number = next(_numbers)
        _products[self._number] = self
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.eagle_rt.packed_linear(x, self._number, self.out_size)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    def unpacked(self) -> Tensor:
        """W [out, in] again, copied."""
        return self._packed.to_dense()


# A compiler cannot hold packed weights, only their numbers.
_numbers = itertools.count()
_products: WeakValueDictionary[int, PackedProduct] = WeakValueDictionary()


@torch.library.custom_op("eagle_rt::packed_linear", mutates_args=())
def packed_linear(x: Tensor, number: int, out_size: int) -> Tensor:
    return _products[number](x)


@packed_linear.register_fake
def _(x: Tensor, number: int, out_size: int) -> Tensor:
    return x.new_empty(x.shape[0], out_size)
