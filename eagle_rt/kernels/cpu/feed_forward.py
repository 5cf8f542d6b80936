"""The feed-forward part of a layer, of either kind, for compiled functions; needs numba."""

from typing import NamedTuple

import numpy as np
from numba import njit
from numba.core import types
from numba.extending import overload
from numpy.typing import NDArray

from eagle_rt.kernels.cpu.experts import ExpertWeights, mix_rows
from eagle_rt.kernels.cpu.gated import gate_rows
from eagle_rt.kernels.cpu.multiply import Weights, multiply, weights_at
from eagle_rt.kernels.gate import Gate


class GateWeights(NamedTuple):
    """Of a part without experts. gate: of `in_float32`."""

    gate_and_up: Weights
    down: Weights
    gate: Gate


def feed_forward(x: NDArray, weights: GateWeights | ExpertWeights, outputs: NDArray) -> None:
    """Fills outputs [T, H] with what the part adds to x [T, H]. Both are an `array_of`."""
    raise NotImplementedError("only in compiled functions")


def feed_forward_at(weights: GateWeights | ExpertWeights, layer: int) -> GateWeights | ExpertWeights:
    """Of weights with one more axis, the first: those of one layer."""
    raise NotImplementedError("only in compiled functions")


@njit(cache=True)
def gate_and_down(x: np.ndarray, weights: GateWeights, outputs: np.ndarray) -> None:
    gate_and_up = np.empty((len(x), len(weights.gate_and_up.bias)), dtype=x.dtype)
    multiply(x, weights.gate_and_up, gate_and_up)
    gated = np.empty((len(x), gate_and_up.shape[1] // 2), dtype=x.dtype)
    gate_rows(gate_and_up, weights.gate, gated)
    multiply(gated, weights.down, outputs)


@overload(feed_forward)
def _compiled_feed_forward(x, weights, outputs):  # numba wants the parameters of what it returns, and no annotations
    assert isinstance(weights, (types.NamedTuple, types.NamedUniTuple))
    if weights.instance_class is ExpertWeights:
        return lambda x, weights, outputs: mix_rows(x, x, weights, outputs)
    return lambda x, weights, outputs: gate_and_down(x, weights, outputs)


@overload(feed_forward_at)
def _compiled_feed_forward_at(weights, layer):  # numba wants the parameters of what it returns, and no annotations
    assert isinstance(weights, (types.NamedTuple, types.NamedUniTuple))
    if weights.instance_class is ExpertWeights:
        return lambda weights, layer: ExpertWeights(
            weights_at(weights.router, layer),
            weights_at(weights.gate_and_up, layer),
            weights_at(weights.down, layer),
            weights.choice_bias[layer],
            weights.share_scales[layer],
            weights.top_k,
            weights.normalizes,
            weights.gate,
            weights.by_sigmoid,
            weights.scale,
            weights.num_shared,
            weights.gates_shared,
            weights.num_groups,
            weights.top_groups,
            weights.weighs_inputs,
        )
    return lambda weights, layer: GateWeights(weights_at(weights.gate_and_up, layer), weights_at(weights.down, layer), weights.gate)
