"""Products of heads on a CPU by our own kernel; needs numba."""

import torch
from torch import Tensor

from eagle_rt.kernels.cpu.head_product import head_product
from eagle_rt.kernels.cpu.product import PANEL
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of, words_of
from eagle_rt.kernels.panel_product import in_panels, words_in


def fill_panels(weight: Tensor) -> bool:
    """Whether heads of W [heads, out, in] leave nothing of a panel or of a word empty."""
    return weight.shape[1] % PANEL == 0 and weight.shape[2] * weight.itemsize % 4 == 0


class PanelHeads:
    """See `HeadProducts`, with W laid out in panels, see `cpu.product`. A row comes out the same whatever else is in x."""

    def __init__(self, weight: Tensor) -> None:
        self._words = words_in(in_panels(weight.flatten(0, 1)))
        self._out_size = weight.shape[1]
        self(weight.new_zeros(1, weight.shape[0], weight.shape[2]))  # compiled now rather than in the first pass

    def __call__(self, x: Tensor) -> Tensor:
        use_torch_threads()
        outputs = torch.empty(*x.shape[:2], self._out_size, dtype=x.dtype)
        head_product(words_of(array_of(x.contiguous())), self._words, array_of(outputs.flatten(1)))
        return outputs
