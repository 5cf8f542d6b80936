"""Passes whose layers are one compiled function each, on a CPU: what they share, and which layers can be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.kernels.packed_linear import OpaqueProduct, PackedProduct
from eagle_rt.kernels.rms_norm import RMSNorm


class SeenRows(Protocol):
    """What the attention of one pass goes by."""

    def seen_rows(self, window: int | None) -> tuple[NDArray, ...]:
        """What `cpu.row_attention` takes beside queries, cache and outputs, for layers of this window."""
        ...


@dataclass(frozen=True)
class WholePass:
    """What all layers of a pass share that are one compiled function each, as arrays of `cpu.vectors.array_of`.

    angles: cos and sin [T, head_dim]. storage: [L, S, 2, kv heads, head_dim], of which slots [T] are written.
    """

    angles: tuple[NDArray, NDArray]
    storage: NDArray
    slots: NDArray
    seen: SeenRows


def whole_pass(cos: Tensor, sin: Tensor, storage: Tensor, slots: Tensor, seen: SeenRows | None) -> WholePass | None:
    """cos, sin: [T, 1, head_dim]. None where attention cannot be one part of a layer."""
    if not seen:
        return None
    from eagle_rt.kernels.cpu.vectors import array_of  # not everywhere is numba installed

    angles = array_of(cos.flatten(1)), array_of(sin.flatten(1))
    return WholePass(angles, array_of(storage), slots.contiguous().numpy(), seen)


def whole_layer(
    products: Sequence[OpaqueProduct | None], query_norm: RMSNorm | None, key_norm: RMSNorm | None, feed_forward_norm: RMSNorm
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """A decoder layer as one compiled function, see `WholeLayer`; None where not all of its products are our kernel's."""
    if any(product is None or isinstance(product, PackedProduct) for product in products):
        return None
    from eagle_rt.kernels.panel_product import PanelProduct  # not everywhere is numba installed
    from eagle_rt.kernels.whole_layer import WholeLayer

    own = [product for product in products if isinstance(product, PanelProduct) and product.is_whole]
    return WholeLayer(own, query_norm, key_norm, feed_forward_norm) if len(own) == len(products) else None
