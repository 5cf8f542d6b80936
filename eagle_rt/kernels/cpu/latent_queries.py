"""Queries over latents on a CPU in one compiled function; needs numba. The twin is `kernels.latents.latent_queries`."""

import numpy as np
from numba import njit
from torch import Tensor

from eagle_rt.kernels.cpu.rotate_and_write import turn
from eagle_rt.kernels.cpu.vectors import array_of


def latent_queries(led: Tensor, queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See the twin."""
    num_rows, num_heads, rank = led.shape
    outputs = queries.new_empty(num_rows, num_heads, rank + cos.shape[-1])
    arrays = (led.contiguous(), queries.contiguous(), cos.flatten(1), sin.flatten(1), outputs)
    fill_queries(*map(array_of, arrays))
    return outputs


@njit(cache=True)
def fill_queries(led: np.ndarray, queries: np.ndarray, cos: np.ndarray, sin: np.ndarray, outputs: np.ndarray) -> None:
    (num_rows, num_heads, rank), rope_dim = led.shape, cos.shape[1]
    first_turned = queries.shape[2] - rope_dim
    for t in range(num_rows):
        for head in range(num_heads):
            outputs[t, head, :rank] = led[t, head]
            turn(queries[t, head, first_turned:], cos[t], sin[t], rope_dim // 2, outputs[t, head, rank:])
