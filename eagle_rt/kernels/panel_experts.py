"""Experts of a feed-forward part on a CPU by our own kernels; needs numba."""

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.cpu.experts import ExpertWeights, mix_rows
from eagle_rt.kernels.cpu.product import PANEL
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of
from eagle_rt.kernels.panel_product import Int8Product, ProductStack, RowProduct


def fill_panels(gate_and_up: Tensor, down: Tensor) -> bool:
    """Whether these experts leave nothing of a panel empty, which `PanelExperts` takes for granted."""
    return all(size % PANEL == 0 for size in (gate_and_up.shape[1] // 2, *down.shape[1:]))


class PanelExperts:
    """`kernels.experts` in one function, from weights laid out for it. A row comes out the same whatever else is in x.

    router: [experts, H]; gate_and_up: [experts, 2 * I, H]; down: [experts, H, I]; in_int8: those of the experts are rounded to
    eight bits. top_k, normalizes: as `kernels.experts.route` takes them. Sizes must be such that they `fill_panels`.
    """

    def __init__(
        self, router: Tensor, gate_and_up: Tensor, down: Tensor, top_k: int, normalizes: bool, *, in_int8: bool = False
    ) -> None:
        kind = Int8Product if in_int8 else RowProduct
        self.router = RowProduct(functional.pad(router, (0, 0, 0, -len(router) % PANEL)), None)
        self.gate_and_up, self.down = (ProductStack([kind(weight, None) for weight in own]) for own in (gate_and_up, down))
        self.routing = top_k, normalizes
        self(torch.zeros(1, router.shape[1], dtype=router.dtype))  # compiled now rather than in the first pass

    def __call__(self, x: Tensor) -> Tensor:
        use_torch_threads()
        outputs = torch.empty_like(x, memory_format=torch.contiguous_format)
        weights = ExpertWeights(self.router.weights, self.gate_and_up.weights, self.down.weights, *self.routing)
        mix_rows(array_of(x.contiguous()), weights, array_of(outputs))
        return outputs
