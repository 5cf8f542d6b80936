"""Which copies are verified where there is no head: all that trees have room for, or those that pay."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from eagle_rt.speculate.compiled import worth_verifying
from eagle_rt.speculate.costs import Observation, StepCosts
from eagle_rt.speculate.forest import Floats, Ints
from eagle_rt.speculate.members import conditions_of
from eagle_rt.speculate.policy import Rests, bounds_of
from eagle_rt.speculate.prices import Price, PriceBook
from eagle_rt.speculate.sequences import HostSequence


class CopyPolicy(Protocol):
    @property
    def least_chance(self) -> float:
        """Copies whose first token is less likely to be right are not worth verifying."""
        ...

    def keep(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, rests: Rests) -> Ints:
        """The places, ascending, of the copied tokens that the target verifies; with each those before it. rests: the plain steps
        since the last one with copies."""
        ...

    def learn(self, sequences: Sequence[HostSequence], num_gained: int, num_rows: int, ms: float, between_ms: float) -> None:
        """A step that verified copies gained so many tokens, with so many rows, roots included, and in so many milliseconds."""
        ...


class FixedCopies:
    """All of every copy, in batches of up to max_batch_size."""

    least_chance = 0.0

    def __init__(self, max_batch_size: int | None) -> None:
        self._max_batch_size = max_batch_size

    def keep(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, rests: Rests) -> Ints:
        is_small = self._max_batch_size is None or len(sequences) <= self._max_batch_size
        return np.arange(len(chances) if is_small else 0)

    def learn(self, sequences: Sequence[HostSequence], num_gained: int, num_rows: int, ms: float, between_ms: float) -> None:
        pass


class PayingCopies:
    """Those that are expected to gain more tokens than their rows cost, at the price that time has (see `adaptive.py`). Larger
    batches than max_batch_size verify none."""

    def __init__(self, costs: StepCosts, max_batch_size: int | None) -> None:
        self.costs, self.prices = costs, PriceBook(costs)
        self._max_batch_size = max_batch_size
        self._price: Price | None = None  # of the last step that was decided on

    @property
    def least_chance(self) -> float:
        return self._price.least_node if self._price else 0.0

    def keep(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, rests: Rests) -> Ints:
        if self._max_batch_size is not None and len(sequences) > self._max_batch_size:
            return owners[:0]
        self._price = price = self._priced(sequences, rests)
        limits = bounds_of(tuple(sequence.bounds for sequence in sequences)).most_drafts
        return worth_verifying(chances, owners, limits, price.verify(len(chances)), False)[0]

    def learn(self, sequences: Sequence[HostSequence], num_gained: int, num_rows: int, ms: float, between_ms: float) -> None:
        batch_size, conditions, price = len(sequences), conditions_of(sequences), self._price
        assert price
        self.costs.correct(Observation("verify", batch_size, num_rows, ms), conditions)
        self.prices.steps(conditions).add(num_gained / batch_size, (ms + between_ms) / price.plain_ms, 0.0, 1.0, None)
        self.prices.add_steps(1)

    def _priced(self, sequences: Sequence[HostSequence], rests: Rests) -> Price:
        """What time costs now, after these steps."""
        conditions = conditions_of(sequences)
        price, count = self.prices.at(conditions), len(rests.steps)
        if count:
            for observation in rests.observations(len(sequences), price.plain_ms):
                self.costs.correct(observation, conditions)
            self.prices.between_ms = rests.between_ms
            self.prices.steps(conditions).add_rests(count, sum(ms for _, ms in rests.steps))
            self.prices.add_steps(count)
        return self.prices.at(conditions)
