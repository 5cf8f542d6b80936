"""A decoder layer of few rows on a CPU in one compiled function; needs numba.

Between its products a layer is some twenty small operators, each of which takes torch longer to begin than to do. The twin is
`models.layers.Block`.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from eagle_rt.kernels.cpu.add_rms_norm import add_rows, norm_rows
from eagle_rt.kernels.cpu.experts import ExpertWeights
from eagle_rt.kernels.cpu.feed_forward import GateWeights, feed_forward
from eagle_rt.kernels.cpu.multiply import Weights, multiply
from eagle_rt.kernels.cpu.rotate_and_write import rotate_rows
from eagle_rt.kernels.cpu.row_attention import row_attention, scale_of
from eagle_rt.kernels.cpu.vectors import pairs_of


class LayerWeights(NamedTuple):
    """head_norms: [2, head_dim] those of queries and keys, or [2, 0]; whether they follow turning: see `HeadNorms`. output_norms:
    [2, H] of what attention gives and of what the feed-forward part does, or [2, 0]. sinks: [heads], of `sinks_for`."""

    qkv: Weights
    head_norms: NDArray[np.float32]
    head_norm_eps: np.float32
    norms_follow_turning: bool
    sinks: NDArray[np.float32]
    output: Weights
    norm: NDArray[np.float32]
    output_norms: NDArray[np.float32]
    norm_eps: np.float32
    feed_forward: GateWeights | ExpertWeights


@njit(cache=True)
def layer(
    x: np.ndarray,
    attention_input: np.ndarray,
    weights: LayerWeights,
    angles: tuple[np.ndarray, np.ndarray],
    storage: np.ndarray,
    slots: np.ndarray,
    seen_rows: tuple,
    outputs: tuple[np.ndarray, np.ndarray],
) -> None:
    """Fills the outputs, [T, H] each: x plus the attention of the attention input [T, in], and what the feed-forward part adds.

    angles: cos and sin [T, head_dim]. storage: [S, 2, kv heads, head_dim], whose slots [T] are written. seen_rows: what
    `row_attention` takes beside queries, cache, outputs, sinks and scale.
    """
    total, delta = outputs
    num_rows, num_kv_heads, head_dim = len(x), storage.shape[2], storage.shape[3]
    qkv = np.empty((num_rows, len(weights.qkv.bias)), dtype=x.dtype)
    multiply(attention_input, weights.qkv, qkv)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    queries = np.empty((num_rows, num_heads, head_dim), dtype=x.dtype)
    rotate_rows(
        qkv.reshape((num_rows, num_heads + 2 * num_kv_heads, head_dim)),
        angles[0],
        angles[1],
        weights.head_norms,
        weights.head_norm_eps,
        weights.norms_follow_turning,
        storage,
        slots,
        queries,
    )
    attended = np.empty_like(queries)
    scale = scale_of(head_dim)
    row_attention(pairs_of(queries), pairs_of(storage), pairs_of(attended), weights.sinks, scale, *seen_rows)
    added, normed = np.empty_like(x), np.empty_like(x)
    multiply(attended.reshape((num_rows, num_heads * head_dim)), weights.output, added)
    has_output_norms = weights.output_norms.shape[1] > 0
    if has_output_norms:
        norm_rows(added, weights.output_norms[0], weights.norm_eps, added)
    add_rows(x, added, total)
    norm_rows(total, weights.norm, weights.norm_eps, normed)
    feed_forward(normed, weights.feed_forward, delta)
    if has_output_norms:
        norm_rows(delta, weights.output_norms[1], weights.norm_eps, delta)
