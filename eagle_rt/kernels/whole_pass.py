"""Passes whose layers are one compiled function, on a CPU: what they share, and which layers can be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.kernels.experts import Mixing
from eagle_rt.kernels.gate import Gate
from eagle_rt.kernels.narrow_experts import NarrowStack
from eagle_rt.kernels.packed_linear import OpaqueProduct, PackedProduct
from eagle_rt.kernels.rms_norm import HeadNorms, RMSNorm

if TYPE_CHECKING:  # not everywhere is numba installed
    from eagle_rt.kernels.panel_product import ProductStack


Angles = tuple[Tensor, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class ByWindow(Generic[T]):
    """What layers without a window have, and what those with one do, which may be the same."""

    without: T
    within: T

    def of(self, window: int | None) -> T:
        return self.without if window is None else self.within


class SeenRows(Protocol):
    """What the attention of one pass goes by."""

    def seen_rows(self) -> tuple[NDArray, ...]:
        """What `cpu.row_attention` takes beside queries, cache, outputs, sinks, scale and lows."""
        ...

    def lows_of(self, window: int | None) -> NDArray:
        """[T] the first places that rows see in layers of this window."""
        ...


@dataclass(frozen=True)
class WholePass:
    """What all layers of a pass share that are one compiled function, as arrays of `cpu.vectors.array_of`.

    angles: cos and sin [T, head_dim]. storage: [L, S, 2, kv heads, head_dim], of which slots [T] are written.
    """

    angles: ByWindow[tuple[NDArray, NDArray]]
    storage: NDArray
    slots: NDArray
    seen: SeenRows


def whole_pass(angles: ByWindow[Angles], storage: Tensor, slots: Tensor, seen: SeenRows | None) -> WholePass | None:
    """angles: cos and sin [T, 1, head_dim]. None where attention cannot be one part of a layer."""
    if not seen:
        return None
    from eagle_rt.kernels.cpu.vectors import array_of  # not everywhere is numba installed

    def arrays(own: Angles) -> tuple[NDArray, NDArray]:
        return array_of(own[0].flatten(1)), array_of(own[1].flatten(1))

    without, within = angles.without, angles.within
    all_arrays = arrays(without)
    both = ByWindow(all_arrays, all_arrays if within is without else arrays(within))
    return WholePass(both, array_of(storage), slots.contiguous().numpy(), seen)


@dataclass(frozen=True)
class LayerParts:
    """What a decoder layer is made of: products of queries, keys and values, of the output, and of the feed-forward part; norms of
    queries and keys, if there are any, and the one before the feed-forward part; and for how many heads, how far back and with
    which sinks its attention sees, see `AttentionBackend.run`.

    feed_forward: how experts are mixed, whose products are those of the router, of gates and ups, and of downs; or the gate of a
    part without experts, whose products are of gate and up, and of down. choice_bias: of experts, see `cpu.experts`.
    output_norms: of what attention gives and of what the feed-forward part does, where these are normed before they are added.
    """

    products: "tuple[OpaqueProduct | ProductStack | NarrowStack | None, ...]"
    num_heads: int
    head_norms: HeadNorms | None
    feed_forward_norm: RMSNorm
    window: int | None
    sinks: Tensor | None
    feed_forward: Mixing | Gate
    choice_bias: NDArray | None = None
    output_norms: tuple[RMSNorm, RMSNorm] | None = None


class StackedLayers(Protocol):
    """Like layers in a row, with the norms after each, as one compiled function: see `layer_stack.LayerStack`."""

    def __call__(
        self, x: Tensor, attention_input: Tensor, shared: WholePass, captured: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def layer_stack(layers: Sequence[LayerParts | None], norms: Sequence[RMSNorm | None], first: int = 0) -> StackedLayers | None:
    """Like layers in a row, which are those from `first` on of the cache, with the norms after each, as one compiled function; None
    where one of them cannot be (None), they are not alike, or not all of their products are our kernel's. The products' weights
    move to where those of all layers lie."""
    parts = [layer for layer in layers if layer]
    products = [product for layer in parts for product in layer.products]
    if not products or any(product is None or isinstance(product, PackedProduct) for product in products):
        return None
    if len(parts) < len(layers) or len({(layer.feed_forward, layer.head_norms is None) for layer in parts}) > 1:
        return None
    from eagle_rt.kernels.layer_stack import LayerStack  # not everywhere is numba installed
    from eagle_rt.kernels.panel_product import PanelProduct, ProductStack, are_alike

    if not all(isinstance(product, (PanelProduct, ProductStack)) and product.is_whole for product in products):
        return None
    if not all(map(are_alike, zip(*(layer.products for layer in parts), strict=True))):
        return None
    return LayerStack(parts, norms, first)
