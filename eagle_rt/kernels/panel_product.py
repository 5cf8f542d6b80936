"""Products of rows on a CPU by our own kernels; needs numba."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.cpu import int4_product, int8_product, product
from eagle_rt.kernels.cpu.int4_product import Int4Weights
from eagle_rt.kernels.cpu.int8_product import Int8Weights
from eagle_rt.kernels.cpu.multiply import Weights, multiply, weights_at
from eagle_rt.kernels.cpu.product import PANEL, RowWeights
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import array_of
from eagle_rt.kernels.eight_bits import EightBits, rounded_to_eight_bits, stored_eight_bits
from eagle_rt.kernels.four_bits import GROUP, FourBits, in_four_bits, stored_four_bits
from eagle_rt.kernels.packed_linear import OpaqueProduct

WORDS = {torch.float32: torch.float32, torch.bfloat16: torch.int32, torch.int8: torch.uint32, torch.uint8: torch.uint32}


class PanelProduct(OpaqueProduct):
    """x W^T + b with W [out, in] laid out in panels, see `cpu.product`. A row comes out the same whatever else is in x.

    dtype: of x. What the weights hold beyond `out` and `in` is nothing, and where there is none of that they are whole.
    """

    inputs_of_word: int

    def __init__(self, shape: torch.Size, dtype: torch.dtype, weights: Weights) -> None:
        super().__init__()
        self.out_size, self.in_size = shape
        self.dtype, self.weights = dtype, weights
        self._num_inputs = weights.words.shape[1] * self.inputs_of_word
        self._num_more_inputs = self._num_inputs - self.in_size
        self.is_whole = self._num_more_inputs == 0 and len(weights.bias) == self.out_size
        self.apply(torch.zeros(1, self.in_size, dtype=dtype))  # compiled now rather than in the first pass

    def apply(self, x: Tensor) -> Tensor:
        use_torch_threads()
        if self._num_more_inputs:
            x = functional.pad(x, (0, self._num_more_inputs))
        outputs = x.new_empty(len(x), len(self.weights.bias))
        multiply(array_of(x.contiguous()), self.weights, array_of(outputs))
        return outputs[:, : self.out_size]

    def move_to(self, place: Weights) -> None:
        """Keep the weights there."""
        for own, values in zip(place, self.weights, strict=True):
            own[...] = values
        self.weights = place

    def _held(self, dtype: torch.dtype, size: int | None = None) -> Tensor:
        """[out, in, or this size] the numbers in the words, copied."""
        panels = torch.from_numpy(self.weights.words).view(dtype).unflatten(2, (PANEL, -1))
        return panels.transpose(1, 2).flatten(2).flatten(0, 1)[: self.out_size, : size or self.in_size].contiguous()


class RowProduct(PanelProduct):
    """The weight as it is."""

    rows_at_once = product.MOST_ROWS

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.inputs_of_word = 4 // weight.itemsize
        weights = RowWeights(words_in(in_panels(weight)), filled_up(bias, len(weight)))
        super().__init__(weight.shape, weight.dtype, weights)

    def unpacked(self) -> Tensor:
        return self._held(self.dtype)


class Int8Product(PanelProduct):
    """The weight in eight bits, each output's in steps of its own; dtype: of x."""

    num_bits = 8
    rows_at_once = int8_product.MOST_ROWS
    inputs_of_word = 4

    def __init__(self, weight: EightBits, bias: Tensor | None, dtype: torch.dtype) -> None:
        numbers, out_size = weight.numbers, len(weight.numbers)
        # Exact in float32: sums are below 2**24.
        offsets = filled_up(-128 * numbers.sum(1, dtype=torch.int32), out_size).astype(np.int32)
        weights = Int8Weights(words_in(in_panels(numbers)), filled_up(weight.scales, out_size), offsets, filled_up(bias, out_size))
        super().__init__(numbers.shape, dtype, weights)

    def unpacked(self) -> Tensor:
        assert isinstance(self.weights, Int8Weights)
        scales = torch.from_numpy(self.weights.scales)[: self.out_size, None]
        return (self._held(torch.int8) * scales).to(self.dtype)


class Int4Product(PanelProduct):
    """The weight in four bits, see `four_bits`; dtype: of x."""

    num_bits = 4
    rows_at_once = int4_product.MOST_ROWS
    inputs_of_word = int4_product.IN_WORD

    def __init__(self, weight: FourBits, in_size: int, bias: Tensor | None, dtype: torch.dtype) -> None:
        out_size = len(weight.codes)
        first, second = weight.codes.view(out_size, -1, 2, 4).unbind(2)
        weights = Int4Weights(
            words_in(in_panels((first | second << 4).flatten(1))),
            in_columns(weight.ratios).view(np.uint16),
            in_columns(weight.nothings),
            np.array(weight.levels, dtype=np.uint8),
            filled_up(weight.scales, out_size),
            filled_up(bias, out_size),
        )
        super().__init__(torch.Size((out_size, in_size)), dtype, weights)

    def unpacked(self) -> Tensor:
        weights = self.weights
        assert isinstance(weights, Int4Weights)
        both = self._held(torch.uint8, self._num_inputs // 2).unflatten(1, (-1, 4))
        codes = torch.stack((both & 15, both >> 4), dim=2).view(self.out_size, -1, GROUP)
        ratios, nothings = (from_columns(own)[: self.out_size] for own in (weights.ratios.view(np.float16), weights.nothings))
        scales = torch.from_numpy(weights.scales)[: self.out_size]
        widened = FourBits(codes, ratios, nothings, tuple(weights.levels.tolist()), scales).widened()
        return widened[:, : self.in_size].to(self.dtype)


def quantized_product(weight: Tensor, bias: Tensor | None, quantization: str) -> PanelProduct | None:
    """See `products.product_with`; None where nothing is to be rounded and the weight lies on no levels that are known here, or has
    more inputs than sums have room for, of which no model has as many."""
    if quantization != "int8" and (four_bits := in_four_bits(weight) if quantization == "int4" else stored_four_bits(weight)):
        return Int4Product(four_bits, weight.shape[1], bias, weight.dtype)
    if weight.shape[1] > int8_product.MOST_INPUTS:
        return None
    eight_bits = rounded_to_eight_bits(weight) if quantization == "int8" else stored_eight_bits(weight)
    return eight_bits and Int8Product(eight_bits, bias, weight.dtype)


class ProductStack:
    """So many like products, or like stacks of them, behind one another: their weights have one more axis, the first. Each moves
    there before the next is asked for, so that no more than one is in memory twice; a single one stays where it is."""

    def __init__(self, products: "Iterable[PanelProduct | ProductStack]", number: int) -> None:
        self._products: list[PanelProduct | ProductStack] = []
        for own in products:
            if not self._products:
                places: list[Any] = [
                    values[None] if number == 1 else np.empty((number, *values.shape), values.dtype) for values in own.weights
                ]
                self.weights: Weights = type(own.weights)(*places)
                self.is_whole, self.num_bits = own.is_whole, own.num_bits
            if number > 1:
                own.move_to(weights_at(self.weights, len(self._products)))
            self._products.append(own)
        self.is_full = len(self._products) == number

    def move_to(self, place: Weights) -> None:
        """Keep the weights there."""
        self.weights = place
        for number, own in enumerate(self._products):
            own.move_to(weights_at(place, number))

    def unpacked(self) -> Tensor:
        """[P, out, in] copied."""
        return torch.stack([own.unpacked() for own in self._products])


def are_alike(products: "Sequence[PanelProduct | ProductStack]") -> bool:
    """Whether they can be a stack."""
    kinds = {(type(own.weights), *((values.shape, values.dtype) for values in own.weights)) for own in products}
    return len(kinds) == 1


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


def in_columns(values: Tensor) -> np.ndarray:
    """Of each output [out, C] as [panels, C, PANEL], filled up with nothing."""
    return functional.pad(values, (0, 0, 0, -len(values) % PANEL)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous().numpy()


def from_columns(columns: np.ndarray) -> Tensor:
    """[N, C] again."""
    return torch.from_numpy(columns).transpose(1, 2).flatten(0, 1)
