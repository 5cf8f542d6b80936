"""What the drafts of sequences have promised lately."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from eagle_rt.speculate.compiled import best_of_levels
from eagle_rt.speculate.forest import Candidates, Floats
from eagle_rt.speculate.prices import Price

# A draft is remembered by its best nodes of each level, so many, down to a depth.
NUM_LEVELS, NODES_OF_A_LEVEL = 8, 4
# What drafts promise before any was made: chains, of which some promise much and some little, by the chance of each of their nodes.
FIRST_CHANCES = np.array([0.15, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98])
FIRST_PROMISES = np.zeros((8, NUM_LEVELS, NODES_OF_A_LEVEL))
FIRST_PROMISES[..., 0] = FIRST_CHANCES[:, None] ** np.arange(1.0, NUM_LEVELS + 1)
# Where not even such drafts would pay none are tried.
HOPED_FOR = FIRST_PROMISES[4:]
# How many drafts of a sequence are remembered, and how many of all; the very first drafts of all count as several, since what is
# believed before them is made up.
NUM_OWN, NUM_RECENT, NUM_COMMON, NUM_OF_A_FIRST = 8, 16, 64, 4
# Plain steps before a sequence that does not draft is tried, for so many steps, and then again; they double while tries fail.
FIRST_WAIT, LONGEST_WAIT, DRAFTS_OF_A_TRY = 16, 512, 4
# A difference that chance makes likely, in variances: where few drafts are poor by chance and are believed, none follow that would
# show it.
LIKELY_CHANCE = 2.0


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
    """Of all sequences that are alike. edition: rises with every NUM_RECENT drafts; what is believed stays the same in between."""

    def __init__(self) -> None:
        super().__init__(np.tile(FIRST_PROMISES, (NUM_COMMON // len(FIRST_PROMISES), 1, 1)))
        self.edition = self._num_unpublished = 0
        self._utilities: WeakKeyDictionary[Price, tuple[float, float]] = WeakKeyDictionary()

    def utility(self, price: Price) -> tuple[float, float]:
        """What the next draft of any of them is worth at this price, and the variance of that: worked out once for each edition."""
        if price not in self._utilities:
            utilities = price.utility(self.latest)
            variance = float(utilities.var())
            recent = np.roll(utilities, -self._next)[-NUM_RECENT:]
            self._utilities[price] = held_to(float(utilities.mean()), variance, float(recent.mean()), NUM_RECENT), variance
        return self._utilities[price]

    def add(self, promises: Floats, times: int = 1) -> None:
        times = times if self.num_known == NUM_COMMON else NUM_OF_A_FIRST
        super().add(promises, times)
        self._num_unpublished += times
        if self._num_unpublished >= NUM_RECENT:
            self.edition, self._num_unpublished = self.edition + 1, 0
            self._utilities.clear()


class DraftHistory:
    """What is known of a sequence's drafts. common: of all that are like it."""

    def __init__(self, common: CommonPromises) -> None:
        self.own, self.common = Promises(np.zeros((NUM_OWN, NUM_LEVELS, NODES_OF_A_LEVEL))), common
        self.correction = 0.0
        # What the next draft is worth, at which price and by which edition; none when that has to be worked out anew.
        self.utility, self.edition = 0.0, 0
        self.price: Price | None = None
        # Steps since it last drafted; after so many it is tried, and has been so often; and how long it waits after these tries.
        self.num_idle, self.wait, self.num_tried, self.next_wait = 0, FIRST_WAIT, 0, FIRST_WAIT

    def add(self, promises: Floats) -> None:
        """It has made a draft."""
        self.price = None
        self.own.add(promises)
        self.common.add(promises)

    def tried(self, has_failed: bool) -> None:
        """It has drafted for what that shows, as it does in the steps that follow, until that is enough."""
        self.num_idle, self.num_tried = 0, self.num_tried + 1
        if self.num_tried < DRAFTS_OF_A_TRY:
            self.wait = 1
            return
        self.num_tried, self.next_wait = 0, min(LONGEST_WAIT, 2 * self.next_wait) if has_failed else FIRST_WAIT
        self.wait = self.next_wait


def utilities_at(price: Price, histories: Sequence[DraftHistory]) -> list[float]:
    """What the next drafts of these sequences are worth: what they have promised themselves, held to what all have."""
    stale = [history for history in histories if history.price is not price or history.edition != history.common.edition]
    if stale:
        utilities = price.utility(np.array([history.own.latest for history in stale])).tolist()
        for history, own in zip(stale, utilities, strict=True):
            num_known, (common, variance) = history.own.num_known, history.common.utility(price)
            mean = sum(own[:num_known]) / max(1, num_known)
            history.utility = held_to(common, variance, mean, num_known)
            history.price, history.edition = price, history.common.edition
    return [history.utility for history in histories]


def held_to(common: float, variance: float, mean: float, count: int) -> float:
    """What to believe of some whose first `count` have this mean, where all have a mean of `common` and this variance: the farther
    from that than chance explains, the more their own. Source: the positive-part estimator of James and Stein (1961)."""
    squared = (mean - common) ** 2
    return common + (mean - common) * max(0.0, 1.0 - LIKELY_CHANCE * variance / (count * squared)) if count and squared else common


def promises_of(candidates: Candidates, batch_size: int) -> Floats:
    """[B, D, R] of the drafts of a step."""
    owners, depths, chances = candidates.owners, candidates.depths, candidates.values
    return best_of_levels(owners, depths, chances, batch_size, NUM_LEVELS, NODES_OF_A_LEVEL)
