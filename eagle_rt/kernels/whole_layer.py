"""A decoder layer of few rows on a CPU as one compiled function; needs numba."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagle_rt.kernels.cpu.layer import LayerWeights, layer
from eagle_rt.kernels.cpu.vectors import array_of
from eagle_rt.kernels.panel_product import PanelProduct
from eagle_rt.kernels.rms_norm import RMSNorm
from eagle_rt.kernels.whole_pass import WholePass


class WholeLayer:
    """What `models.layers.Block` does, given what it is made of: products of queries, keys and values, of the output, of gate and
    up, and of down, all of which are whole; norms of queries and keys, if there are any, and the one before the gate."""

    def __init__(
        self, products: Sequence[PanelProduct], query_norm: RMSNorm | None, key_norm: RMSNorm | None, feed_forward_norm: RMSNorm
    ) -> None:
        qkv, output, gate_and_up, down = products
        norm = feed_forward_norm
        head_norms, head_norm_eps = norm.weight.new_empty(2, 0), 0.0
        if query_norm and key_norm:
            head_norms, head_norm_eps = torch.stack((query_norm.weight, key_norm.weight)), query_norm.eps
        self._weights = LayerWeights(
            qkv.weights,
            array_of(head_norms),
            np.float32(head_norm_eps),
            output.weights,
            array_of(norm.weight),
            np.float32(norm.eps),
            gate_and_up.weights,
            down.weights,
        )

    def __call__(
        self, x: Tensor, attention_input: Tensor, index: int, window: int | None, shared: WholePass
    ) -> tuple[Tensor, Tensor]:
        """(x [T, H] after the attention of attention_input [T, in], what the feed-forward part adds to it), for this layer of the
        cache and window."""
        total, delta = torch.empty_like(x), torch.empty_like(x)
        layer(
            array_of(x.contiguous()),
            array_of(attention_input.contiguous()),
            self._weights,
            shared.angles,
            shared.storage[index],
            shared.slots,
            shared.seen.seen_rows(window),
            (array_of(total), array_of(delta)),
        )
        return total, delta
