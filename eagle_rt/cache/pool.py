"""The tensors of a paged KV cache."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from eagle_rt.cache.memories import Memories


@dataclass(frozen=True)
class RowShape:
    """What a layer keeps of a token: a key and a value, side by side, of head_dim numbers for each of num_heads heads.

    value_dim: where given, only keys are kept, whose first value_dim numbers are the values too: latents that all heads share
    (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1). scale: what scores are multiplied with, 1 / sqrt(head_dim) where None.
    """

    num_heads: int
    head_dim: int
    value_dim: int | None = None
    scale: float | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of a row's tensor."""
        return 2 if self.value_dim is None else 1, self.num_heads, self.head_dim

    @property
    def output_dim(self) -> int:
        """The numbers of a head that attention gives."""
        return self.value_dim or self.head_dim

    @property
    def num_numbers(self) -> int:
        return prod(self.sizes)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Views of rows [..., 2 or 1, heads, head_dim] as keys [..., heads, head_dim] and values [..., heads, output_dim]."""
        keys = rows.select(-3, 0)
        return keys, rows.select(-3, 1) if self.value_dim is None else keys[..., : self.value_dim]


class KVPool:
    """Rows of every cache slot: storage [L, S, 2, heads, head_dim], key and value side by side, or [L, S, 1, heads, head_dim] where
    the `row` has one for both.

    There is one pool for the target and one for the head, indexed by the same slots. is_part: others hold other heads, and what
    is done to rows has to be done there too. memories: of layers that have those instead, if the model has such.
    """

    is_part = False
    memories: Memories | None = None

    def __init__(self, num_layers: int, num_slots: int, row: RowShape, dtype: torch.dtype, device: str) -> None:
        self.row = row
        self.storage = torch.zeros(num_layers, num_slots, *row.sizes, dtype=dtype, device=device)
        self._layers = self.storage.unbind(0)

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """rows: [T, 2 or 1, heads, head_dim] goes to slots [T]."""
        self._layers[layer].index_copy_(0, slots, rows)

    def read(
        self, layer: int, slots: Tensor | slice, num_sequences: int = 1, buffer: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer, each [n, heads, K, numbers of a head], from n * K slots; views where `slots` is a slice.

        buffer: [n * K, 2 or 1, heads, head_dim] memory to copy them to.
        """
        storage = self._layers[layer]
        rows = storage[slots] if isinstance(slots, slice) else torch.index_select(storage, 0, slots, out=buffer)
        keys, values = self.row.split(rows.unflatten(0, (num_sequences, -1)))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def views(self, slots: slice) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """`read` of every layer at once: (keys of each layer, values of each layer)."""
        keys, values = self.row.split(self.storage[:, None, slots])
        return keys.transpose(2, 3).unbind(0), values.transpose(2, 3).unbind(0)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy rows [M] in every layer. Sources and destinations may overlap: all rows are read before any is written."""
        self.storage.index_copy_(1, destinations, self.storage.index_select(1, sources))
