"""Decoder layers of few rows on a CPU as one compiled function; needs numba."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.kernels.cpu.experts import ExpertWeights, expert_weights
from eagle_rt.kernels.cpu.feed_forward import GateWeights
from eagle_rt.kernels.cpu.gated import in_float32
from eagle_rt.kernels.cpu.layer import LayerWeights
from eagle_rt.kernels.cpu.layers import RunWeights, layers
from eagle_rt.kernels.cpu.multiply import Weights
from eagle_rt.kernels.cpu.row_attention import sinks_for
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of
from eagle_rt.kernels.gate import Gate
from eagle_rt.kernels.panel_product import ProductStack
from eagle_rt.kernels.rms_norm import RMSNorm
from eagle_rt.kernels.whole_pass import LayerParts, WholePass


class LayerStack:
    """What `models.layers.Block` does, for like layers in a row, and the norms after each; where there is none, what they return is
    not to be used. See `whole_pass.layer_stack`."""

    def __init__(self, parts: Sequence[LayerParts], norms: Sequence[RMSNorm | None], first: int) -> None:
        products = zip(*(layer.products for layer in parts), strict=True)
        qkv, output, *feed_forward = (ProductStack(own, len(own)).weights for own in products)
        head_norms = parts[0].head_norms
        before_gate = [layer.feed_forward_norm for layer in parts]
        own = LayerWeights(
            qkv,
            np.stack([of_both(norms and (norms.queries, norms.keys)) for norms in (layer.head_norms for layer in parts)]),
            np.float32(head_norms.eps if head_norms else 0.0),
            bool(head_norms and head_norms.follow_turning),
            np.stack([sinks_for(layer.sinks, layer.num_heads) for layer in parts]),
            output,
            side_by_side(before_gate),
            np.stack([of_both(layer.output_norms) for layer in parts]),
            np.float32(before_gate[0].eps),
            feed_forward_weights(feed_forward, parts),
        )
        given = [norm or RMSNorm(torch.ones_like(before_gate[0].weight), 1.0) for norm in norms]
        self._weights = RunWeights(own, side_by_side(given), np.float32(given[0].eps))
        self._first, self._last = first, first + len(parts)
        self._windows = list(dict.fromkeys(layer.window for layer in parts))
        self._window_of_layer = np.array([self._windows.index(layer.window) for layer in parts])
        self._captured: dict[tuple[int, ...], NDArray[np.int64]] = {}

    def __call__(
        self, x: Tensor, attention_input: Tensor, shared: WholePass, captured: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """([T, H] the residual stream behind the layers, [T, H] the norm of that, what is captured [T, C * H] side by side).

        x: [T, H] what enters the first layer, and [T, in] what its attention reads. captured: before which layers the residual
        stream is wanted, the number of layers for behind the last one, and -1 for its norm.
        """
        use_torch_threads()
        if captured not in self._captured:
            self._captured[captured] = np.array(captured, dtype=np.int64)
        cos, sin = zip(*(shared.angles.of(window) for window in self._windows), strict=True)
        stream, normed, features = torch.empty_like(x), torch.empty_like(x), x.new_empty(len(x), len(captured) * x.shape[1])
        layers(
            array_of(x.contiguous()),
            array_of(attention_input.contiguous()),
            self._weights,
            (stacked(cos), stacked(sin)),
            shared.storage[self._first : self._last],
            shared.slots,
            shared.seen.seen_rows(),
            stacked([shared.seen.lows_of(window) for window in self._windows]),
            self._window_of_layer,
            self._captured[captured],
            (array_of(stream), array_of(normed), array_of(features)),
        )
        return stream, normed, features


def stacked(arrays: Sequence[NDArray]) -> NDArray:
    """With one more axis, the first; without a copy where there is only one."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def feed_forward_weights(products: list[Weights], parts: Sequence[LayerParts]) -> GateWeights | ExpertWeights:
    """Of all layers, from those of their products."""
    form = parts[0].feed_forward
    if isinstance(form, Gate):
        gate_and_up, down = products
        return GateWeights(gate_and_up, down, in_float32(form))
    router, gate_and_up, down = products
    choice_biases = np.stack([layer.choice_bias for layer in parts if layer.choice_bias is not None])
    return expert_weights(router, gate_and_up, down, choice_biases, np.zeros((len(parts), 0), dtype=np.float32), form)


def side_by_side(norms: Sequence[RMSNorm]) -> NDArray[np.float32]:
    """Their weights, in float32 whatever the model's precision is: as exact as Gemma's, which would need functions of their own."""
    return torch.stack([norm.weight.float() for norm in norms]).numpy()


def of_both(norms: tuple[RMSNorm, RMSNorm] | None) -> NDArray[np.float32]:
    """[2, size], or [2, 0] for none."""
    return side_by_side(norms) if norms else np.empty((2, 0), dtype=np.float32)
