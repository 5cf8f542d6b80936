"""How far the head has read each text, and the features that it still needs to read on."""

from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

# Steps whose features are put aside unsorted.
MOST_UNSORTED = 128


@dataclass
class HeadRows:
    """The head's cache holds the first num_made rows of a text; `waiting` are the features [n, F] of the rows after those, in
    order.

    state: [H] the head's after the last row made, once there is one. is_lost: features of earlier rows are missing, so that the
    head can never catch up, or need not, since nothing is drafted for it.
    """

    num_made: int
    state: Tensor | None = None
    waiting: list[Tensor] = field(default_factory=list)
    num_waiting: int = 0
    is_lost: bool = False


class HeadRowsBook:
    """`HeadRows` of every sequence. A head that isn't drafting isn't fed: it catches up in one pass when it is needed again.

    Whole steps of features are sorted by sequence only when somebody asks: with caches full of what the target has just read, that
    would take several times as long.
    """

    def __init__(self) -> None:
        self._rows: dict[str, HeadRows] = {}
        self._unsorted: list[tuple[list[str], list[int], Tensor]] = []

    def begin(self, sequence_id: str, num_made: int, num_cached: int, *, may_draft: bool = True) -> None:
        """A text of which the target's cache holds num_cached rows, and the head's the first num_made."""
        self._sort()
        self._rows[sequence_id] = HeadRows(num_made, is_lost=num_made < num_cached or not may_draft)

    def __getitem__(self, sequence_id: str) -> HeadRows:
        self._sort()
        return self._rows[sequence_id]

    def add_step(self, sequence_ids: list[str], counts: list[int], features: Tensor) -> None:
        """Features [T, F] of so many next rows of each sequence."""
        self._unsorted.append((sequence_ids, counts, features))

    @property
    def is_due(self) -> bool:
        """Whether it is time to look whether too much waits."""
        return len(self._unsorted) >= MOST_UNSORTED

    def _sort(self) -> None:
        for (sequence_ids, counts), like in groupby(self._unsorted, key=lambda step: step[:2]):
            features = torch.stack([own for _, _, own in like])
            for sequence_id, own in zip(sequence_ids, features.split(counts, dim=1), strict=True):
                if sequence_id in self._rows:
                    self.add(sequence_id, own.flatten(0, 1))
        self._unsorted.clear()

    def add(self, sequence_id: str, features: Tensor) -> None:
        """Features [n, F] of the next n rows."""
        rows = self._rows[sequence_id]
        if not rows.is_lost:
            rows.waiting.append(features)
            rows.num_waiting += features.shape[0]

    def take(self, sequence_ids: list[str]) -> Tensor:
        """[T, F] all that is waiting for these sequences, one after the other: their rows are made now."""
        self._sort()
        parts = []
        for sequence_id in sequence_ids:
            rows = self._rows[sequence_id]
            parts += rows.waiting
            rows.num_made += rows.num_waiting
            rows.waiting, rows.num_waiting = [], 0
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def forget(self, sequence_id: str) -> None:
        self._rows.pop(sequence_id, None)

    @property
    def num_waiting(self) -> int:
        self._sort()
        return sum(rows.num_waiting for rows in self._rows.values())
