"""The tensors of a paged KV cache."""

import torch
from torch import Tensor

from eagle_rt.cache.memories import Memories


class KVPool:
    """Keys and values of every cache slot: storage [L, S, 2, heads, head_dim], key and value side by side.

    There is one pool for the target and one for the head, indexed by the same slots. is_part: others hold other heads, and what
    is done to rows has to be done there too. memories: of layers that have those instead, if the model has such.
    """

    is_part = False
    memories: Memories | None = None

    def __init__(self, num_layers: int, num_slots: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        self.storage = torch.zeros(num_layers, num_slots, 2, num_heads, head_dim, dtype=dtype, device=device)
        self._layers = self.storage.unbind(0)

    @staticmethod
    def bytes_per_slot(num_layers: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return num_layers * 2 * num_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, keys_and_values: Tensor) -> None:
        """keys_and_values: [T, 2, heads, head_dim] goes to slots [T]."""
        self._layers[layer].index_copy_(0, slots, keys_and_values)

    def read(
        self, layer: int, slots: Tensor | slice, num_sequences: int = 1, buffer: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer, each [n, heads, K, head_dim], from n * K slots; views where `slots` is a slice.

        buffer: [n * K, 2, heads, head_dim] memory to copy them to.
        """
        storage = self._layers[layer]
        rows = storage[slots] if isinstance(slots, slice) else torch.index_select(storage, 0, slots, out=buffer)
        keys, values = rows.unflatten(0, (num_sequences, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return keys, values

    def views(self, slots: slice) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """`read` of every layer at once: (keys of each layer, values of each layer)."""
        keys, values = self.storage[:, slots].permute(2, 0, 3, 1, 4)[:, :, None].unbind(0)
        return keys.unbind(0), values.unbind(0)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy rows [M] in every layer. Sources and destinations may overlap: all rows are read before any is written."""
        self.storage.index_copy_(1, destinations, self.storage.index_select(1, sources))
