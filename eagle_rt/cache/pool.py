"""The tensors of a paged KV cache."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from eagle_rt.cache.memories import Memories

T = TypeVar("T")


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
    """Rows of every cache slot, of each layer [S, 2, heads, head_dim], key and value side by side, or [S, 1, heads, head_dim] where
    its row has one for both.

    There is one pool for the target and one for the head, indexed by the same slots. rows: what each layer keeps of a token;
    storages: of like layers, by their rows, one behind the other [L, S, ...]. is_part: others hold other heads, and what is done
    to rows has to be done there too. memories: of layers that have those instead, if the model has such.
    """

    is_part = False
    memories: Memories | None = None

    def __init__(self, rows: Sequence[RowShape], num_slots: int, dtype: torch.dtype, device: str) -> None:
        self.rows = tuple(rows)
        self.storages = {
            row: torch.zeros(count, num_slots, *row.sizes, dtype=dtype, device=device) for row, count in Counter(self.rows).items()
        }
        self.layers = self._by_layer({row: storage.unbind(0) for row, storage in self.storages.items()})

    def _by_layer(self, own: dict[RowShape, Iterable[T]]) -> tuple[T, ...]:
        """Of each layer its own, from those of like layers in order."""
        following = {row: iter(values) for row, values in own.items()}
        return tuple(next(following[row]) for row in self.rows)

    @property
    def storage(self) -> Tensor:
        """[L, S, ...] that of all layers, where these are alike."""
        (only,) = self.storages.values()
        return only

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """rows: [T, 2 or 1, heads, head_dim] goes to slots [T]."""
        self.layers[layer].index_copy_(0, slots, rows)

    def read(
        self, layer: int, slots: Tensor | slice, num_sequences: int = 1, buffer: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer, each [n, heads, K, numbers of a head], from n * K slots; views where `slots` is a slice.

        buffer: flat memory for n * K rows of any layer, to copy them to.
        """
        storage, row = self.layers[layer], self.rows[layer]
        if isinstance(slots, slice):
            rows = storage[slots]
        else:
            out = None if buffer is None else buffer[: len(slots) * row.num_numbers].view(len(slots), *row.sizes)
            rows = torch.index_select(storage, 0, slots, out=out)
        keys, values = row.split(rows.unflatten(0, (num_sequences, -1)))
        return keys.transpose(1, 2), values.transpose(1, 2)

    def views(self, slots: slice) -> tuple[tuple[Tensor, Tensor], ...]:
        """`read` of every layer at once."""
        own = {}
        for row, storage in self.storages.items():
            keys, values = (part.transpose(2, 3).unbind(0) for part in row.split(storage[:, None, slots]))
            own[row] = zip(keys, values, strict=True)
        return self._by_layer(own)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy rows [M] in every layer. Sources and destinations may overlap: all rows are read before any is written."""
        for storage in self.storages.values():
            storage.index_copy_(1, destinations, storage.index_select(1, sources))
