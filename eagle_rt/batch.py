"""The tensors of one forward pass: data only."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class CacheRows:
    """The cache slots of one sequence, in the order of its text and then its scratch rows.

    slots: [capacity] int64; first: the first slot, if they lie side by side, and None otherwise.
    """

    slots: Tensor
    first: int | None

    def up_to(self, num_rows: int) -> Tensor | slice:
        """The first `num_rows` of them; a slice reads the cache without copying it."""
        return self.slots[:num_rows] if self.first is None else slice(self.first, self.first + num_rows)


@dataclass(frozen=True)
class Batch:
    """T packed query tokens of B sequences, and where their keys and values live.

    tokens, positions, slots: [T] int64; `slots` are the cache rows that the pass writes.
    query_starts: B + 1 host integers; sequence b owns the rows query_starts[b] : query_starts[b + 1].
    kv_lens: B host integers, rows visible to sequence b, the ones written by this pass included.
    kv_slots: B tensors [kv_lens[b]] int64, or slices where those rows lie side by side.
    tree_mask: [B, Q, C] bool over the last C visible rows (Q query rows for every sequence, and every row before those C
        is visible to all); None means causal.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: tuple[int, ...]
    kv_lens: tuple[int, ...]
    kv_slots: tuple[Tensor | slice, ...]
    tree_mask: Tensor | None

    @property
    def batch_size(self) -> int:
        return len(self.kv_lens)
