"""A run of like decoder layers, of few rows, on a CPU in one compiled function; needs numba. The twin is `models.layers.Block`, and
the norms between."""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from eagle_rt.kernels.cpu.add_rms_norm import add_rows, norm_rows
from eagle_rt.kernels.cpu.feed_forward import feed_forward_at
from eagle_rt.kernels.cpu.layer import LayerWeights, layer
from eagle_rt.kernels.cpu.multiply import weights_at


class RunWeights(NamedTuple):
    """layers: of L layers, every array with one more axis, the first; norms: [L, H] those after each."""

    layers: LayerWeights
    norms: NDArray[np.float32]
    norm_eps: np.float32


@njit(cache=True)
def layers(
    x: np.ndarray,
    attention_input: np.ndarray,
    weights: RunWeights,
    angles: tuple[np.ndarray, np.ndarray],
    storage: np.ndarray,
    slots: np.ndarray,
    seen_rows: tuple,
    lows: np.ndarray,
    window_of_layer: np.ndarray,
    captured: np.ndarray,
    outputs: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """Fills the outputs: [T, H] the residual stream behind the layers and the norm of that, and what is captured [T, C * H].

    x: [T, H] what enters the first layer, and [T, in] what its attention reads. slots: as `layer` takes them. storage: [L, S, 2, kv
    heads, head_dim]. seen_rows: what `row_attention` takes beside queries, cache, outputs, sinks, scale and lows. Those, [W, T],
    and angles, [W, T, head_dim] each, are of W windows, of which layers have window_of_layer [L]. captured: [C] before which
    layers the residual stream is, L for behind the last one, and -1 for its norm; of others nothing is filled in.
    """
    stream, normed, features = outputs
    total, delta = np.empty_like(x), np.empty_like(x)
    own = weights.layers
    capture(captured, 0, x, features)
    for i in range(len(storage)):
        own_layer = LayerWeights(
            weights_at(own.qkv, i),
            own.head_norms[i],
            own.head_norm_eps,
            own.norms_follow_turning,
            own.sinks[i],
            weights_at(own.output, i),
            own.norm[i],
            own.output_norms[i],
            own.norm_eps,
            feed_forward_at(own.feed_forward, i),
        )
        window = window_of_layer[i]
        own_angles, own_seen = (angles[0][window], angles[1][window]), (lows[window], *seen_rows)
        layer(x, attention_input, own_layer, own_angles, storage[i], slots, own_seen, (total, delta))
        add_rows(total, delta, stream)
        norm_rows(stream, weights.norms[i], weights.norm_eps, normed)
        x, attention_input = stream, normed
        capture(captured, i + 1, x, features)
    capture(captured, -1, normed, features)


@njit(cache=True)
def capture(captured: np.ndarray, place: int, x: np.ndarray, features: np.ndarray) -> None:
    """Copies x [T, H] to where features [T, C * H] have what is captured at this place."""
    size = x.shape[1]
    for c in range(len(captured)):
        if captured[c] == place:
            # Slices would take ten times as long.
            for t in range(len(x)):
                for h in range(size):
                    features[t, c * size + h] = x[t, h]
