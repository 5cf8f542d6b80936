"""Norm and rotation of queries and keys, and the writing of keys and values, on a CPU in one compiled function; needs numba.

The twins are `HeadNorms`, `kernels.rotary.rotate` and `KVPool.write`.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from eagle_rt.kernels.cpu.add_rms_norm import norm_row
from eagle_rt.kernels.cpu.vectors import FLAGS, array_of, number_of, stored_as
from eagle_rt.kernels.rms_norm import HeadNorms


def rotate_and_write(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    storage: Tensor,
    slots: Tensor,
) -> Tensor:
    """Queries [T, heads, head_dim] of qkv [T, heads + 2 kv heads, head_dim]; keys and values go to slots [T] of storage [S, 2, kv
    heads, head_dim].

    cos, sin: [T, 1, head_dim], see `rotate`.
    """
    queries = qkv.new_empty(qkv.shape[0], num_heads, qkv.shape[2])
    weights = norms.weights if norms else (qkv.new_empty(0),) * 2
    rotate_rows(
        array_of(qkv),
        array_of(cos.flatten(1)),
        array_of(sin.flatten(1)),
        array_of(torch.stack(weights)),
        np.float32(norms.eps if norms else 0.0),
        bool(norms and norms.follow_turning),
        array_of(storage),
        slots.contiguous().numpy(),
        array_of(queries),
    )
    return queries


@njit(cache=True, fastmath=set(FLAGS))
def rotate_rows(
    qkv: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    weights: np.ndarray,
    eps: np.float32,
    norms_follow_turning: bool,
    storage: np.ndarray,
    slots: np.ndarray,
    queries: np.ndarray,
) -> None:
    """Fills queries [T, heads, head_dim] and the slots [T] of the storage; weights: [2, head_dim], or [2, 0] for no norm, or
    [3, head_dim] where values are normed, too."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads, half = storage.shape[2], head_dim // 2
    for t in range(num_rows):
        for head in range(num_heads + num_kv_heads):
            row, is_key = qkv[t, head], head >= num_heads
            target = storage[slots[t], 0, head - num_heads] if is_key else queries[t, head]
            if weights.shape[1] and not norms_follow_turning:
                norm_row(row, weights[1 if is_key else 0], eps, row)
            turn(row, cos[t], sin[t], half, target)
            if weights.shape[1] and norms_follow_turning:
                norm_row(target, weights[1 if is_key else 0], eps, target)
        for head in range(num_kv_heads):
            row, target = qkv[t, num_heads + num_kv_heads + head], storage[slots[t], 1, head]
            if weights.shape[0] > 2:
                norm_row(row, weights[2], eps, target)
            else:
                target[:] = row


@njit(cache=True, fastmath=set(FLAGS))
def turn(row: np.ndarray, cos: np.ndarray, sin: np.ndarray, half: int, target: np.ndarray) -> None:
    """Fills target [2 * half] with the pairs (i, i + half) of a row, turned."""
    for i in range(half):
        first, second = number_of(row[i]), number_of(row[half + i])
        target[i] = stored_as(first * number_of(cos[i]) + second * number_of(sin[i]), target)
        target[half + i] = stored_as(second * number_of(cos[half + i]) + first * number_of(sin[half + i]), target)
