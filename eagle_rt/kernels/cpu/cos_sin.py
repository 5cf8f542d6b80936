"""The angles of rotary embeddings on a CPU in one compiled function; needs numba. The twin is `models.rope.Rope.cos_sin`."""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from eagle_rt.kernels.cpu.vectors import array_of, stored_as


def cos_sin(positions: Tensor, frequencies: Tensor, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, head_dim] of positions [T] times frequencies [head_dim], of which the first half are those of the second,
    negated, times scales [head_dim], of which both halves are the same, in this precision."""
    cos, sin = (torch.empty(len(positions), 1, len(frequencies), dtype=dtype) for _ in range(2))
    fill(positions.contiguous().numpy(), frequencies.numpy(), scales.numpy(), array_of(cos[:, 0]), array_of(sin[:, 0]))
    return cos, sin


@njit(cache=True)
def fill(positions: np.ndarray, frequencies: np.ndarray, scales: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    half = len(frequencies) // 2
    for t in range(len(positions)):
        position = np.float32(positions[t])
        for i in range(half, len(frequencies)):
            angle = position * frequencies[i]
            own_cos, own_sin = np.cos(angle) * scales[i], np.sin(angle) * scales[i]
            cos[t, i], sin[t, i] = stored_as(own_cos, cos), stored_as(own_sin, sin)
            cos[t, i - half], sin[t, i - half] = cos[t, i], stored_as(-own_sin, sin)
