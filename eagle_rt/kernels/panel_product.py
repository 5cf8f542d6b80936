"""Products of rows on a CPU by our own kernels; needs numba."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.cpu import int8_product, product
from eagle_rt.kernels.cpu.int8_product import Int8Weights
from eagle_rt.kernels.cpu.multiply import Weights, multiply
from eagle_rt.kernels.cpu.product import PANEL, RowWeights
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of
from eagle_rt.kernels.packed_linear import OpaqueProduct

# Rows that are rounded to eight bits at a time: no more of a weight is in memory twice.
ROUNDED_ROWS = 4096
WORDS = {torch.float32: torch.float32, torch.bfloat16: torch.int32, torch.int8: torch.uint32}


class PanelProduct(OpaqueProduct):
    """x W^T + b with W [out, in] laid out in panels, see `cpu.product`. A row comes out the same whatever else is in x.

    panels: [panels, in words, PANEL, numbers of a word]; what they and the weights hold beyond `out` and `in` is nothing, and where
    there is none of that they are whole.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, panels: Tensor, weights: Weights) -> None:
        super().__init__()
        self.out_size, self.in_size = shape
        self.panels, self.weights = panels, weights
        self._num_more_inputs = panels.shape[1] * panels.shape[3] - self.in_size
        self.is_whole = self._num_more_inputs == 0 and len(weights.bias) == self.out_size
        self.apply(torch.zeros(1, self.in_size, dtype=dtype))  # compiled now rather than in the first pass

    def apply(self, x: Tensor) -> Tensor:
        use_torch_threads()
        if self._num_more_inputs:
            x = functional.pad(x, (0, self._num_more_inputs))
        outputs = x.new_empty(len(x), len(self.weights.bias))
        multiply(array_of(x.contiguous()), self.weights, array_of(outputs))
        return outputs[:, : self.out_size]

    def move_to(self, panels: Tensor) -> None:
        """Keep the weight there."""
        self.panels = panels.copy_(self.panels)
        self.weights = self.weights._replace(words=words_in(panels))

    def unpacked(self) -> Tensor:
        weight = self.panels.transpose(1, 2).flatten(2).flatten(0, 1)
        return weight[: self.out_size, : self.in_size].contiguous()


class RowProduct(PanelProduct):
    """The weight as it is."""

    rows_at_once = product.MOST_ROWS

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        panels = in_panels(weight)
        weights = RowWeights(words_in(panels), filled_up(bias, len(weight)))
        super().__init__(weight.shape, weight.dtype, panels, weights)


class Int8Product(PanelProduct):
    """The weight in eight bits, each output's in steps of its own: 127 of them are its largest."""

    rows_at_once = int8_product.MOST_ROWS

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._dtype, self._scales = weight.dtype, weight.abs().amax(1).float() / 127
        rounded, totals = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
        parts = zip(*(whole.split(ROUNDED_ROWS) for whole in (rounded, totals, weight, self._scales)), strict=True)
        for own, own_totals, part, steps in parts:
            whole_steps = (part.float() / steps.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
            own.copy_(whole_steps)
            own_totals.copy_(whole_steps.sum(1))  # exact: whole numbers below 2**24
        panels, offsets = in_panels(rounded), filled_up(-128 * totals, len(weight)).astype(np.int32)
        weights = Int8Weights(words_in(panels), filled_up(self._scales, len(weight)), offsets, filled_up(bias, len(weight)))
        super().__init__(weight.shape, weight.dtype, panels, weights)

    def unpacked(self) -> Tensor:
        return (super().unpacked() * self._scales[:, None]).to(self._dtype)


class ProductStack:
    """Like products, or like stacks of them, behind one another: their panels and weights have one more axis, the first. They move
    one by one, so that no more than one is in memory twice."""

    def __init__(self, products: "Sequence[PanelProduct | ProductStack]") -> None:
        self._products, self.is_whole = products, all(own.is_whole for own in products)
        self.panels = products[0].panels[None]
        if len(products) > 1:
            self.panels = self.panels.new_empty(len(products), *self.panels.shape[1:])
            for own, place in zip(products, self.panels, strict=True):
                own.move_to(place)
        small = {name: np.stack([getattr(own.weights, name) for own in products]) for name in products[0].weights._fields[1:]}
        self.weights = products[0].weights._replace(words=words_in(self.panels), **small)

    def move_to(self, panels: Tensor) -> None:
        """Keep the weights there."""
        for own, place in zip(self._products, panels, strict=True):
            own.move_to(place)
        self.panels, self.weights = panels, self.weights._replace(words=words_in(panels))

    def unpacked(self) -> Tensor:
        """[P, out, in] copied."""
        return torch.stack([own.unpacked() for own in self._products])


def in_panels(weight: Tensor) -> Tensor:
    """W [out, in] as panels, filled up with nothing."""
    out_size, in_size = weight.shape
    together = 4 // weight.itemsize
    num_more_inputs, num_more_outputs = -in_size % together, -out_size % PANEL
    if num_more_inputs or num_more_outputs:
        weight = functional.pad(weight, (0, num_more_inputs, 0, num_more_outputs))
    num_panels, num_words = len(weight) // PANEL, weight.shape[1] // together
    panels = weight.new_empty(num_panels, num_words, PANEL, together)
    panels.transpose(1, 2).copy_(weight.view(num_panels, PANEL, num_words, together))
    return panels


def words_in(panels: Tensor) -> np.ndarray:
    """Their memory as products read it, with the last axis in one word."""
    return panels.view(WORDS[panels.dtype])[..., 0].numpy()


def filled_up(values: Tensor | None, out_size: int) -> np.ndarray:
    """One of each output, as float32 for whole panels."""
    values = torch.zeros(out_size) if values is None else values.float()
    return functional.pad(values, (0, -out_size % PANEL)).numpy()
