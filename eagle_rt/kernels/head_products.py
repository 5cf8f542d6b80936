"""A product for each head, with a weight of its own: what leads from heads of queries to latents, and from those to values."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_rt.kernels.products import takes_own_kernel

if TYPE_CHECKING:  # not everywhere is numba installed
    from eagle_rt.kernels.panel_heads import PanelHeads


class HeadProducts:
    """y[t, h] = W[h] x[t, h] for x [T, heads, in], given W [heads, out, in]."""

    def __init__(self, weight: Tensor) -> None:
        self._panels = panel_heads(weight)
        self._transposed = None if self._panels else weight.transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if self._panels:
            return self._panels(x)
        assert self._transposed is not None
        outputs = x.new_empty(*x.shape[:2], self._transposed.shape[2])
        torch.bmm(x.transpose(0, 1), self._transposed, out=outputs.transpose(0, 1))
        return outputs


def panel_heads(weight: Tensor) -> "PanelHeads | None":
    """W laid out for our kernel for CPUs, where that serves."""
    if not takes_own_kernel(weight):
        return None
    from eagle_rt.kernels.panel_heads import PanelHeads, fill_panels  # not everywhere is numba installed

    return PanelHeads(weight) if fill_panels(weight) else None
