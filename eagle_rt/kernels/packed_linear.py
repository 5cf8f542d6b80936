"""Matrix products with few rows on a CPU, where reading the weight is what costs."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.opaque import Opaque, living
from eagle_rt.kernels.processor import has_amx

# Up to so many rows of a half-precision product are made as they are. Where there are many, so many are made at a time.
UNTILED_ROWS, MANY_ROWS, MANY_ROWS_TILE = 16, 512, 64
# Code for up to so many rows is generated at start.
PREPARED_ROWS = 64


@dataclass(frozen=True)
class RowTiles:
    """How many rows a product is made with: whole tiles of `size`, and `least` rows at least."""

    size: int
    least: int = 0

    def filled_up(self, num_rows: int) -> int:
        if num_rows <= UNTILED_ROWS or self.size == 1:
            return num_rows
        size = self.size if num_rows <= MANY_ROWS else MANY_ROWS_TILE
        return max(self.least, -(-num_rows // size) * size)


# AMX multiplies sixteen rows at a time; two such tiles are slower than three while others use the memory, and hardly faster
# otherwise (two cores of a Xeon). Without it every row costs (two cores of an EPYC).
NO_TILES, AMX_TILES, SMALL_TILES = RowTiles(1), RowTiles(16, least=48), RowTiles(8)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has packed products for this weight here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


class OpaqueProduct(Opaque):
    """x W^T + b for x [R, in], of a weight that a compiler cannot hold.

    tiles: with which rows are multiplied. rows_at_once: so many are kept in registers, so that one more costs as much as several;
    None where that is not known. num_bits: of a number of the weight, where these are fewer than the model's precision has.
    """

    num_bits: int | None = None
    tiles: RowTiles = NO_TILES
    rows_at_once: int | None = None

    @abstractmethod
    def unpacked(self) -> Tensor:
        """W [out, in] again, copied."""


class PackedProduct(OpaqueProduct):
    """x W^T + b with W [out, in] laid out once as oneDNN's kernels read it, by the operators that torch's own freezing uses.

    Up to about sixteen rows cost little more than one does, and every row comes out nearly as it would alone. In half precision
    more rows are filled up to whole tiles: oneDNN generates code for every number of rows that it meets, which takes longer than a
    small product does, and keeps only so much of it; and with AMX its code for odd numbers is slower.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_size, self.in_size = weight.shape
        self.dtype, self.tiles = weight.dtype, packed_tiles(weight.dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def apply(self, x: Tensor) -> Tensor:
        num_rows = len(x)
        num_more = self.tiles.filled_up(num_rows) - num_rows
        if num_more:
            x = functional.pad(x, (0, 0, 0, num_more))
        product = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product[:num_rows] if num_more else product

    def unpacked(self) -> Tensor:
        return self._packed.to_dense()


def packed_tiles(dtype: torch.dtype) -> RowTiles:
    """With which packed products of this precision are made."""
    if dtype == torch.float32:
        return NO_TILES
    return AMX_TILES if has_amx() else SMALL_TILES


def prepare_products() -> None:
    """Make products of few rows once, with all that are packed: what oneDNN generates for a number of rows then takes 0.5 to 5 ms a
    shape at start, rather than in the first steps with as many, which would look dear."""
    shapes = {(product.in_size, product.out_size, product.dtype): product for product in living(PackedProduct)}
    for product in shapes.values():
        for num_rows in sorted({product.tiles.filled_up(number) for number in range(1, PREPARED_ROWS + 1)}):
            product(torch.zeros(num_rows, product.in_size, dtype=product.dtype))
