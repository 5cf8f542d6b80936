"""How far the head has read each text, and the features that it still needs to read on."""

from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

# Steps whose features are put aside unsorted.
MOST_UNSORTED = 128


@dataclass(eq=False)
class HeadRows:
    """The head's cache holds the first num_made rows of a text; features of the num_waiting rows after those wait for it.

    state: [H] the head's after the last row made, once there is one. is_lost: features of earlier rows are missing, so that the
    head can never catch up, or need not, since nothing is drafted for it. sorted: of what waits, [n, F] each, in order, what is
    not among the book's unsorted steps.
    """

    num_made: int
    state: Tensor | None = None
    num_waiting: int = 0
    is_lost: bool = False
    sorted: list[Tensor] = field(default_factory=list, repr=False)


class HeadRowsBook:
    """`HeadRows` of every sequence. A head that isn't drafting isn't fed: it catches up in one pass when it is needed again.

    Whole steps of features are sorted by sequence only when one is read, or many have come together: with caches full of what the
    target has just read, that would take several times as long; and what has ended by then need not be.
    """

    def __init__(self) -> None:
        self._rows: dict[str, HeadRows] = {}
        self._unsorted: list[tuple[list[HeadRows], list[int], Tensor]] = []

    def begin(self, sequence_id: str, num_made: int, num_cached: int, *, may_draft: bool = True) -> None:
        """A text of which the target's cache holds num_cached rows, and the head's the first num_made."""
        self._rows[sequence_id] = HeadRows(num_made, is_lost=num_made < num_cached or not may_draft)

    def __getitem__(self, sequence_id: str) -> HeadRows:
        return self._rows[sequence_id]

    def add(self, sequence_id: str, features: Tensor) -> None:
        """Features [n, F] of the next n rows of a text that is still being read."""
        rows = self._rows[sequence_id]
        if not rows.is_lost:
            rows.sorted.append(features)
            rows.num_waiting += len(features)

    def add_step(self, sequence_ids: list[str], counts: list[int], features: Tensor) -> None:
        """Features [T, F] of so many next rows of each sequence."""
        all_rows = [self._rows[sequence_id] for sequence_id in sequence_ids]
        for rows, count in zip(all_rows, counts, strict=True):
            if not rows.is_lost:
                rows.num_waiting += count
        self._unsorted.append((all_rows, counts, features))

    @property
    def is_due(self) -> bool:
        """Whether so many steps are unsorted that it is time to, and to look whether too much waits."""
        return len(self._unsorted) >= MOST_UNSORTED

    def sort(self) -> None:
        for (all_rows, counts), like in groupby(self._unsorted, key=lambda step: step[:2]):
            features = torch.stack([own for _, _, own in like])
            for rows, own in zip(all_rows, features.split(counts, dim=1), strict=True):
                if not rows.is_lost:
                    rows.sorted.append(own.flatten(0, 1))
        self._unsorted.clear()

    def take(self, sequence_ids: list[str]) -> Tensor:
        """[T, F] all that is waiting for these sequences, one after the other: their rows are made now."""
        self.sort()
        parts = []
        for sequence_id in sequence_ids:
            rows = self._rows[sequence_id]
            parts += rows.sorted
            rows.num_made += rows.num_waiting
            rows.sorted, rows.num_waiting = [], 0
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)

    def forget(self, sequence_id: str) -> None:
        if rows := self._rows.pop(sequence_id, None):
            rows.is_lost = True

    @property
    def num_waiting(self) -> int:
        return sum(rows.num_waiting for rows in self._rows.values())
