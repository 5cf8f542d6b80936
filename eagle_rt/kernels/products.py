"""Which products serve on a CPU."""

import importlib.util
import platform

import torch
from torch import Tensor

from eagle_rt.kernels.packed_linear import NO_TILES, OpaqueProduct, PackedProduct, RowTiles, can_pack, packed_tiles
from eagle_rt.kernels.processor import has_amx, is_intel

# On Intel's processors float32 products of smaller weights are faster from the plain weight (two cores of a Xeon).
MIN_PACKED_FLOAT32_SIZE = 2**19


def takes_own_kernel(weight: Tensor) -> bool:
    """Whether our kernel multiplies with this weight here: faster than oneDNN for any number of rows in half precision without AMX,
    and than MKL in float32 where the processor is not Intel's (two cores of an EPYC). Elsewhere it has not been measured."""
    if weight.device.type != "cpu" or platform.machine() != "x86_64" or importlib.util.find_spec("numba") is None:
        return False
    if not torch.cpu._is_avx2_supported():
        return False
    return not has_amx() if weight.dtype == torch.bfloat16 else weight.dtype == torch.float32 and not is_intel()


def product_with(weight: Tensor, bias: Tensor | None) -> OpaqueProduct | None:
    """x W^T + b for W [out, in] from a weight laid out for it; None where torch's own is as fast."""
    if takes_own_kernel(weight):
        from eagle_rt.kernels.row_product import RowProduct  # not everywhere is numba installed

        return RowProduct(weight, bias)
    is_small = weight.dtype == torch.float32 and is_intel() and weight.numel() < MIN_PACKED_FLOAT32_SIZE
    return PackedProduct(weight, bias) if can_pack(weight) and not is_small else None


def tiles_of(weight: Tensor) -> RowTiles:
    """The tiles of rows with which products with this weight are made."""
    return packed_tiles(weight.dtype) if can_pack(weight) and not takes_own_kernel(weight) else NO_TILES
