"""What the decisions for a batch of sequences need to know of them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eagle_rt.speculate.acceptance import AcceptanceEstimator
from eagle_rt.speculate.costs import Conditions
from eagle_rt.speculate.policy import bounds_of
from eagle_rt.speculate.promises import DraftHistory
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape


class Members:
    """What remains the same from step to step, until one leaves. [B] each.

    kinds: 0 for greedy and 1 for sampled sequences, and `kind` where all are alike. slopes, offsets: of the estimator's lines, with
    each one's own correction.
    """

    def __init__(
        self, key: list[tuple[str, TreeShape | None]], sequences: Sequence[HostSequence], histories: list[DraftHistory]
    ) -> None:
        self.key, self.histories = key, histories
        self.bounds = bounds_of(tuple(sequence.bounds for sequence in sequences))
        self.least_steps, self.most_steps = int(self.bounds.num_steps.min()), int(self.bounds.num_steps.max())
        self.temperatures = np.array([sequence.temperature for sequence in sequences])
        self.kinds = (self.temperatures > 0).astype(np.int64)
        self.kind = int(self.kinds[0]) if (self.kinds == self.kinds[0]).all() else None
        self._weights: NDArray | None = None

    def estimate(self, estimator: AcceptanceEstimator) -> None:
        """As the estimator and the corrections are now."""
        if self._weights is not estimator.weights:
            self._weights = estimator.weights
            self.slopes, self._common_offsets = estimator.lines(self.temperatures)
        self.offsets = self._common_offsets + [history.correction for history in self.histories]


def conditions_of(sequences: Sequence[HostSequence]) -> Conditions:
    context = sum(sequence.num_cached for sequence in sequences) / len(sequences)
    return Conditions(len(sequences), context, any(sequence.temperature > 0 for sequence in sequences))
