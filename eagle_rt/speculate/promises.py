"""What the drafts of sequences have promised lately."""

import numpy as np

from eagle_rt.speculate.forest import Floats

# What the best nodes of a draft promise, best first, before any was made: some drafts promise much and some little.
FIRST_PROMISES = np.array([0.15, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98])[:, None] ** np.arange(1.0, 9.0)
# How many drafts of a sequence are remembered, and how many of all; a try after a pause counts as several.
NUM_OWN, NUM_COMMON, NUM_OF_A_TRY = 8, 128, 4
# Plain steps before a sequence that does not draft is tried again; they double while tries fail.
FIRST_WAIT = 16


class Promises:
    """What the latest drafts have promised: [N, P] expected acceptance of their P best nodes, best first.

    Each for itself, since a draft is an option: it is worth the mean of what its nodes are worth, not what its mean nodes are.
    """

    def __init__(self, begin: Floats) -> None:
        self.latest = begin.copy()
        self._next = 0

    def add(self, promises: Floats, times: int = 1) -> None:
        for _ in range(times):
            self.latest[self._next] = promises
            self._next = (self._next + 1) % len(self.latest)


class DraftHistory:
    """What is known of a sequence's drafts."""

    def __init__(self, promises: Promises) -> None:
        self.promises = promises
        self.correction = 0.0
        self.num_idle, self.wait = 0, FIRST_WAIT
