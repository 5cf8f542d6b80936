"""Products of a few rows on a GPU: which are made by our kernels, and how those cut them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """A program makes `outs` outputs of up to most_rows rows, from `ins` inputs at a time; more rows are cuBLAS's."""

    outs: int
    ins: int
    most_rows: int
    num_warps: int
    num_stages: int = 4

    @property
    def shared_bytes(self) -> int:
        """What a program's parts of the weight and of rows take at most, in numbers of 16 bits."""
        return 2 * (self.outs + self.most_rows) * self.ins * self.num_stages


# Where and with how many rows they are faster than cuBLAS (one H100, weights of 4096, 6144, 28,672 and 128,256 outputs). With fewer
# outputs there are not enough tiles for a GPU of 132 processors.
MANY_OUTPUTS, FEW_OUTPUTS = 16384, 4096
LARGE_TILE, SMALL_TILE = Tile(128, 128, 64, num_warps=8), Tile(32, 256, 16, num_warps=4)
# Of queries, keys and values that are turned and cached by the kernel which makes them: another one would take longer than some
# more rows do.
TURNED_TILE = Tile(32, 128, 32, num_warps=4)


def tile_for(out_size: int) -> Tile:
    """For weights of so many outputs."""
    return LARGE_TILE if out_size >= MANY_OUTPUTS else SMALL_TILE


def most_skinny_rows(weight: Tensor) -> int:
    """Products of up to so many rows with this weight are `triton.skinny_product`'s."""
    tile = tile_for(len(weight))
    return tile.most_rows if _has_tiles(weight, tile) else 0


def most_turned_rows(weight: Tensor, head_dim: int) -> int:
    """Queries, keys and values of up to so many rows are `triton.turned_product`'s, for heads without norms of their own."""
    tile = TURNED_TILE
    return tile.most_rows if _has_tiles(weight, tile) and head_dim % tile.outs == 0 else 0


def _has_tiles(weight: Tensor, tile: Tile) -> bool:
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and len(weight) >= FEW_OUTPUTS
        and weight.shape[1] % tile.ins == 0
        and torch.cuda.get_device_capability(weight.device) >= (9, 0)
        and torch.cuda.get_device_properties(weight.device).shared_memory_per_multiprocessor > tile.shared_bytes
    )
