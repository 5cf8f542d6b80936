"""What the drafts of sequences have promised lately."""

import numpy as np

from eagle_rt.speculate.forest import Candidates, Floats, ranks_within_owners

# A draft is remembered by its best nodes of each level, so many, down to a depth.
NUM_LEVELS, NODES_OF_A_LEVEL = 8, 4
# What drafts promise before any was made: chains, of which some promise much and some little.
FIRST_PROMISES = np.zeros((8, NUM_LEVELS, NODES_OF_A_LEVEL))
FIRST_PROMISES[..., 0] = np.array([0.15, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98])[:, None] ** np.arange(1.0, NUM_LEVELS + 1)
# Where not even such drafts would pay none are tried.
HOPED_FOR = FIRST_PROMISES[4:]
# How many drafts of a sequence are remembered, and how many of all; a try after a pause counts as several, and so do the very
# first drafts of all, since what is believed before them is made up.
NUM_OWN, NUM_COMMON, NUM_OF_A_TRY, NUM_OF_A_FIRST = 8, 128, 4, 4
# Plain steps before a sequence that does not draft is tried again; they double while tries fail.
FIRST_WAIT = 16


class Promises:
    """What the latest drafts have promised: [N, D, R] expected acceptance of the best R nodes of each of D levels, best first.

    Each for itself, since a draft is an option: it is worth the mean of what its nodes are worth, not what its mean nodes are.
    """

    def __init__(self, begin: Floats) -> None:
        self.latest = begin.copy()
        self.num_known = self._next = 0

    def add(self, promises: Floats, times: int = 1) -> None:
        for _ in range(times):
            self.latest[self._next] = promises
            self._next = (self._next + 1) % len(self.latest)
        self.num_known = min(len(self.latest), self.num_known + times)


class CommonPromises(Promises):
    """Of all sequences that are alike."""

    def __init__(self) -> None:
        super().__init__(FIRST_PROMISES.repeat(NUM_COMMON // len(FIRST_PROMISES), axis=0))

    def add(self, promises: Floats, times: int = 1) -> None:
        super().add(promises, times if self.num_known == NUM_COMMON else NUM_OF_A_FIRST)


class DraftHistory:
    """What is known of a sequence's drafts. common: what is believed of those that it has not made yet."""

    def __init__(self, common: Promises) -> None:
        self._own, self._common = Promises(common.latest[:: NUM_COMMON // NUM_OWN]), common
        self.correction = 0.0
        self.num_idle, self.wait = 0, FIRST_WAIT

    @property
    def promises(self) -> Floats:
        """[NUM_OWN, D, R] of its latest drafts."""
        own = self._own
        if own.num_known < NUM_OWN:
            own.latest[own.num_known :] = self._common.latest[:: NUM_COMMON // NUM_OWN][own.num_known :]
        return own.latest

    def add(self, promises: Floats) -> None:
        """It has made a draft."""
        self._own.add(promises, times=NUM_OF_A_TRY if self.num_idle else 1)
        self._common.add(promises)


def promises_of(candidates: Candidates, batch_size: int) -> Floats:
    """[B, D, R] of the drafts of a step."""
    promises = np.zeros((batch_size, NUM_LEVELS, NODES_OF_A_LEVEL))
    levels = candidates.owners * NUM_LEVELS + np.minimum(candidates.depths, NUM_LEVELS) - 1
    ranks = ranks_within_owners(levels, candidates.values)
    best = ranks < NODES_OF_A_LEVEL
    promises.reshape(-1, NODES_OF_A_LEVEL)[levels[best], ranks[best]] = np.exp(candidates.values[best])
    return promises
