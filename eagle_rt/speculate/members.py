"""What is known of the sequences of a batch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eagle_rt.speculate.acceptance import AcceptanceEstimator
from eagle_rt.speculate.costs import Conditions
from eagle_rt.speculate.policy import bounds_of
from eagle_rt.speculate.promises import CommonPromises, DraftHistory
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape


class Members:
    """What remains the same from step to step, until one leaves. [B] each.

    kinds: 0 for greedy and 1 for sampled sequences. numbers: [5, B] slopes and offsets of the estimator's lines, with each one's
    own correction and the drift of all; kinds; and the most levels and nodes of a level.
    """

    def __init__(
        self, key: list[tuple[str, TreeShape | None]], sequences: Sequence[HostSequence], histories: list[DraftHistory]
    ) -> None:
        self.key, self.histories = key, histories
        self.bounds = bounds_of(tuple(sequence.bounds for sequence in sequences))
        self.temperatures = np.array([sequence.temperature for sequence in sequences])
        self.kinds = (self.temperatures > 0).astype(np.int64)
        self._weights: NDArray | None = None
        self._drift = 0.0

    def __len__(self) -> int:
        return len(self.key)

    def estimate(self, estimator: AcceptanceEstimator) -> None:
        """As the estimator and the corrections are now."""
        if self._weights is not estimator.weights:
            self._weights = estimator.weights
            self._lines = [estimator.line(temperature) for temperature in self.temperatures.tolist()]
        corrected = [offset + history.correction for (_, offset), history in zip(self._lines, self.histories, strict=True)]
        slopes = [slope for slope, _ in self._lines]
        self.numbers = np.array([slopes, corrected, self.kinds, self.bounds.num_steps, self.bounds.top_ks], dtype=np.float64)
        self.numbers[1] += self._drift

    def drift_to(self, logits: float) -> None:
        """All nodes are accepted more often than is estimated, by so many logits."""
        self.numbers[1] += logits - self._drift
        self._drift = logits


class MembersBook:
    """The batch of now, and what its sequences have drafted. common: what drafts have promised lately, for greedy and for sampled
    sequences."""

    def __init__(self, estimator: AcceptanceEstimator) -> None:
        self.common = {is_sampled: CommonPromises() for is_sampled in (False, True)}
        self._estimator = estimator
        self._histories: dict[str, DraftHistory] = {}
        self._members: Members | None = None

    def of(self, sequences: Sequence[HostSequence]) -> Members:
        """The very same object for the same sequences."""
        key = [(sequence.id, sequence.bounds) for sequence in sequences]
        if self._members is None or self._members.key != key:
            self._members = Members(key, sequences, [self._history(sequence) for sequence in sequences])
            self._members.estimate(self._estimator)
        return self._members

    def forget(self, sequence_id: str) -> bool:
        """Whether it was ever in a batch: requests may end while they wait, and be ended twice."""
        return self._histories.pop(sequence_id, None) is not None

    def _history(self, sequence: HostSequence) -> DraftHistory:
        history = self._histories.get(sequence.id)
        if history is None:
            history = self._histories[sequence.id] = DraftHistory(self.common[sequence.temperature > 0])
        return history


def conditions_of(sequences: Sequence[HostSequence]) -> Conditions:
    context = sum(sequence.num_cached for sequence in sequences) / len(sequences)
    return Conditions(len(sequences), context, any(sequence.temperature > 0 for sequence in sequences))
