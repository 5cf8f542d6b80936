"""Products of heads, each with a weight of its own, on a CPU in one compiled function; needs numba. The twin is torch's `bmm`."""

import numpy as np
from numba import njit, prange

from eagle_rt.kernels.cpu.product import MOST_ROWS, columns_for, multiply_tile, turn_tile


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
