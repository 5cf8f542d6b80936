"""Matrix products with few rows on a CPU, where reading the weight is what costs."""

import itertools
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional

# Half-precision products are made for sixteen rows at a time. Two such tiles are slower than three while others use the memory,
# and hardly faster otherwise (two cores of a Xeon with AMX). Where there are many rows, more of them are made at a time.
ROW_TILE, LEAST_TILED, MANY_ROWS, MANY_ROWS_TILE = 16, 48, 512, 64


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has packed products for this weight here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


class PackedProduct:
    """x W^T + b with W [out, in] laid out once as oneDNN's kernels read it, by the operators that torch's own freezing uses.

    Up to about sixteen rows cost what one does, and every row comes out nearly as it would alone. In half precision more rows
    are filled up to whole tiles: oneDNN generates code for every number of rows that it meets, which takes longer than a small
    product does, keeps only so much of it, and its code for odd numbers is slower.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_size = len(weight)
        self._number = next(_numbers)
        _products[self._number] = self
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias, self._makes_tiles = bias, makes_tiles(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.eagle_rt.packed_linear(x, self._number, self.out_size)
        num_rows = len(x)
        num_more = tiled_rows(num_rows) - num_rows if self._makes_tiles else 0
        if num_more:
            x = functional.pad(x, (0, 0, 0, num_more))
        product = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product[:num_rows] if num_more else product

    def unpacked(self) -> Tensor:
        """W [out, in] again, copied."""
        return self._packed.to_dense()


def makes_tiles(weight: Tensor) -> bool:
    """Whether products with this weight are made with `tiled_rows`."""
    return weight.dtype != torch.float32 and can_pack(weight)


def tiled_rows(num_rows: int) -> int:
    """How many rows a half-precision product of so many is made with."""
    if num_rows <= ROW_TILE:
        return num_rows
    tile = ROW_TILE if num_rows <= MANY_ROWS else MANY_ROWS_TILE
    return max(LEAST_TILED, -(-num_rows // tile) * tile)


# A compiler cannot hold packed weights, only their numbers.
_numbers = itertools.count()
_products: WeakValueDictionary[int, PackedProduct] = WeakValueDictionary()


@torch.library.custom_op("eagle_rt::packed_linear", mutates_args=())
def packed_linear(x: Tensor, number: int, out_size: int) -> Tensor:
    return _products[number](x)


@packed_linear.register_fake
def _(x: Tensor, number: int, out_size: int) -> Tensor:
    return x.new_empty(x.shape[0], out_size)
