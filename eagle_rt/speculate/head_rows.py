"""How far the head has read each text, and the features that it still needs to read on."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class HeadRows:
    """The head's cache holds the first num_made rows of a text; `waiting` are the features [n, F] of the rows after those, in
    order.

    state: [H] the head's after the last row made, once there is one. is_lost: features of earlier rows are missing, so that the
    head can never catch up.
    """

    num_made: int
    state: Tensor | None = None
    waiting: list[Tensor] = field(default_factory=list)
    num_waiting: int = 0
    is_lost: bool = False


class HeadRowsBook:
    """`HeadRows` of every sequence. A head that isn't drafting isn't fed: it catches up in one pass when it is needed again."""

    def __init__(self) -> None:
        self._rows: dict[str, HeadRows] = {}

    def begin(self, sequence_id: str, num_made: int, num_cached: int) -> None:
        """A text of which the target's cache holds num_cached rows, and the head's the first num_made."""
        self._rows[sequence_id] = HeadRows(num_made, is_lost=num_made < num_cached)

    def __getitem__(self, sequence_id: str) -> HeadRows:
        return self._rows[sequence_id]

    def add(self, sequence_id: str, features: Tensor) -> None:
        """Features [n, F] of the next n rows."""
        rows = self._rows[sequence_id]
        if not rows.is_lost:
            rows.waiting.append(features)
            rows.num_waiting += features.shape[0]

    def take(self, sequence_ids: list[str]) -> Tensor:
        """[T, F] all that is waiting for these sequences, one after the other: their rows are made now."""
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
        return sum(rows.num_waiting for rows in self._rows.values())
