"""Products of heads, each with a weight of its own, on a CPU in one compiled function; needs numba. The twin is torch's `bmm`."""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from eagle_rt.kernels.cpu.product import MOST_ROWS, PANEL, columns_for, multiply_tile, turn_tile
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of, words_of
from eagle_rt.kernels.panel_product import in_panels, words_in


def fill_panels(weight: Tensor) -> bool:
    """Whether heads of W [heads, out, in] leave nothing of a panel or of a word empty."""
    return weight.shape[1] % PANEL == 0 and weight.shape[2] * weight.itemsize % 4 == 0


class PanelHeads:
    """See `HeadProducts`, with W laid out in panels, see `cpu.product`. A row comes out the same whatever else is in x."""

    def __init__(self, weight: Tensor) -> None:
        self._words = words_in(in_panels(weight.flatten(0, 1)))
        self._out_size = weight.shape[1]
        self(weight.new_zeros(1, weight.shape[0], weight.shape[2]))  # compiled now rather than in the first pass

    def __call__(self, x: Tensor) -> Tensor:
        use_torch_threads()
        outputs = torch.empty(*x.shape[:2], self._out_size, dtype=x.dtype)
        head_product(words_of(array_of(x.contiguous())), self._words, array_of(outputs.flatten(1)))
        return outputs


@njit(cache=True, parallel=True)
def head_product(x: np.ndarray, weight: np.ndarray, outputs: np.ndarray) -> None:
    """Fills outputs [T, heads * N] with each head's x [T, heads, K] times its weight, of those [heads * N / PANEL, K, PANEL].

    x, weight: float32, or int32 of two bfloat16; outputs: float32, or uint16 that are bfloat16.
    """
    num_rows, num_heads = x.shape[:2]
    num_tiles, panels_a_head = (num_rows + MOST_ROWS - 1) // MOST_ROWS, len(weight) // num_heads
    nothing = np.zeros(outputs.shape[1], dtype=np.float32)
    for head in prange(num_heads):
        own = np.ascontiguousarray(x[:, head])
        columns = columns_for(own)
        for tile in range(num_tiles):
            first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            if num_rows > 1 or columns.itemsize > own.itemsize:
                turn_tile(own, first, last, columns)
            for panel in range(head * panels_a_head, (head + 1) * panels_a_head):
                multiply_tile(columns, first, last - first, weight, panel, nothing, outputs)
