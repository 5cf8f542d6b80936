"""Norms and rotation of what latents are made of, and their writing, on a CPU in one compiled function; needs numba.

The twins are `normed_queries` and `latent_rows` of `kernels.latents`, and `KVPool.write`.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from eagle_rt.kernels.cpu.add_rms_norm import norm_row
from eagle_rt.kernels.cpu.rotate_and_write import turn
from eagle_rt.kernels.cpu.vectors import array_of
from eagle_rt.kernels.rms_norm import RMSNorm


def write_latents(
    inputs: Tensor, query_norm: RMSNorm | None, norm: RMSNorm, cos: Tensor, sin: Tensor, storage: Tensor, slots: Tensor
) -> Tensor:
    """The first numbers [T, Q] of inputs [T, Q + rank + rope_dim], normed where they have a norm; the others go to slots [T] of
    storage [S, 1, 1, rank + rope_dim]. cos, sin: [T, 1, rope_dim], see `rotate`."""
    num_queries = inputs.shape[1] - storage.shape[3]
    queries = inputs.new_empty(len(inputs), num_queries if query_norm else 0)
    write_rows(
        array_of(inputs),
        array_of(query_norm.weight if query_norm else torch.empty(0)),
        array_of(norm.weight),
        np.float32(norm.eps),
        array_of(cos.flatten(1)),
        array_of(sin.flatten(1)),
        array_of(storage),
        slots.contiguous().numpy(),
        array_of(queries),
    )
    return queries if query_norm else inputs[:, :num_queries]


@njit(cache=True)
def write_rows(
    inputs: np.ndarray,
    query_weight: np.ndarray,
    weight: np.ndarray,
    eps: np.float32,
    cos: np.ndarray,
    sin: np.ndarray,
    storage: np.ndarray,
    slots: np.ndarray,
    queries: np.ndarray,
) -> None:
    """Fills queries [T, Q], or none if they are [T, 0], and the slots [T] of the storage."""
    rank, rope_dim = len(weight), cos.shape[1]
    for t in range(len(inputs)):
        row, place = inputs[t, inputs.shape[1] - rank - rope_dim :], storage[slots[t], 0, 0]
        norm_row(row[:rank], weight, eps, place[:rank])
        turn(row[rank:], cos[t], sin[t], rope_dim // 2, place[rank:])
        if queries.shape[1]:
            norm_row(inputs[t, : queries.shape[1]], query_weight, eps, queries[t])
