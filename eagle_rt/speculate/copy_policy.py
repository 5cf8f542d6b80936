"""Which copies are verified where no head drafts: all that trees have room for, or those that pay."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from eagle_rt.speculate.compiled import worth_verifying
from eagle_rt.speculate.copies import Chains, Copy, CopyBook
from eagle_rt.speculate.costs import Observation, StepCosts
from eagle_rt.speculate.drafters import A_SURPRISE, LEAST_BETWEEN, MOST_BETWEEN, MUCH_WRONG, PLAIN_SHARE, num_plain_steps
from eagle_rt.speculate.forest import Floats, Ints
from eagle_rt.speculate.host_verifier import Confirmed, Drafted, HostOutcome
from eagle_rt.speculate.members import conditions_of
from eagle_rt.speculate.policy import MOST_RESTS, Rests, bounds_of
from eagle_rt.speculate.prices import Price, PriceBook
from eagle_rt.speculate.sequences import HostSequence

# No step takes less.
LEAST_MS = 1e-3
# After so many plain steps the last price says no more which copies are not worth looking at.
STEPS_OF_A_PRICE = 64


@dataclass(frozen=True)
class CopyStep:
    """What verifying copies alone took: rows, roots included, and milliseconds. between_ms: what passes between plain steps;
    is_warm: the step before had drafts, too, else this one takes longer than those that follow it."""

    num_rows: int
    ms: float
    between_ms: float = 0.0
    is_warm: bool = True


class CopyPolicy(Protocol):
    @property
    def plain_ms(self) -> float:
        """What a plain step is believed to take, where one was decided against last, with what passes after it."""
        ...

    def least_chance(self, batch_size: int) -> float:
        """In batches of so many, copies whose first token is less likely to be right are not worth verifying."""
        ...

    def keep(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, between_ms: float) -> Ints:
        """The places, ascending, of the copied tokens that the target verifies; with each those before it. between_ms: what passes
        between plain steps."""
        ...

    def add_rest(self, batch_size: int, ms: float) -> None:
        """A plain step of so many sequences took so long."""
        ...

    def add_drafted(self, sequences: Sequence[HostSequence], num_gained: int, ms: float) -> None:
        """A step in which a head has drafted gained so many tokens in so many milliseconds, all told."""
        ...

    def learn(self, sequences: Sequence[HostSequence], num_gained: int, step: CopyStep) -> None:
        """A step that verified copies alone gained so many tokens."""
        ...


class FixedCopies:
    """All of every copy, in batches of up to max_batch_size, however long looking takes."""

    plain_ms = math.inf

    def __init__(self, max_batch_size: int | None) -> None:
        self._max_batch_size = max_batch_size

    def least_chance(self, batch_size: int) -> float:
        return 0.0

    def keep(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, between_ms: float) -> Ints:
        is_small = self._max_batch_size is None or len(sequences) <= self._max_batch_size
        return np.arange(len(chances) if is_small else 0)

    def add_rest(self, batch_size: int, ms: float) -> None:
        pass

    def add_drafted(self, sequences: Sequence[HostSequence], num_gained: int, ms: float) -> None:
        pass

    def learn(self, sequences: Sequence[HostSequence], num_gained: int, step: CopyStep) -> None:
        pass


class PayingCopies:
    """Those that are expected to gain more tokens than their rows cost, at the price that time has (see `adaptive.py`). Larger
    batches than max_batch_size verify none.

    Where all steps have copies nothing shows what plain ones take, which prices are in units of. So some are made in a row now and
    then: after twice as many steps with copies each time, and soon again where they took more or less than was believed.
    """

    def __init__(self, costs: StepCosts, max_batch_size: int | None) -> None:
        self.costs, self.prices = costs, PriceBook(costs)
        self._max_batch_size = max_batch_size
        self._price: Price | None = None  # of the last step that was decided on
        self._rests: deque[tuple[int, float]] = deque(maxlen=MOST_RESTS)  # plain steps since then
        # Plain steps that are still to be made in a row; steps with copies since the last ones, and after how many more are due.
        self._num_plain, self._num_copied, self._most_copied = 0, 0, LEAST_BETWEEN

    @property
    def plain_ms(self) -> float:
        return self._price.plain_ms if self._price else 0.0

    def least_chance(self, batch_size: int) -> float:
        """Prices may fall: none holds for ever."""
        price = self._price
        return price.least_node if price and price.batch_size == batch_size and len(self._rests) < STEPS_OF_A_PRICE else 0.0

    def add_rest(self, batch_size: int, ms: float) -> None:
        self._rests.append((batch_size, ms))

    def add_drafted(self, sequences: Sequence[HostSequence], num_gained: int, ms: float) -> None:
        """Time is as dear as all that is done in it makes it."""
        batch_size, conditions = len(sequences), conditions_of(sequences)
        plain_ms = self.prices.last(conditions).plain_ms
        self.prices.steps(conditions).add(num_gained / batch_size, ms / plain_ms, 0.0, 1.0, None)
        self.prices.add_steps(1)

    def keep(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, between_ms: float) -> Ints:
        if self._num_plain:
            self._num_plain -= 1
            return owners[:0]
        rests = Rests(list(self._rests), between_ms)
        self._rests.clear()
        if self._max_batch_size is not None and len(sequences) > self._max_batch_size:
            return owners[:0]
        self._price = price = self._priced(sequences, rests)
        limits = bounds_of(tuple(sequence.bounds for sequence in sequences)).most_drafts
        places = worth_verifying(chances, owners, limits, price.verify(len(chances)), False)[0]
        return owners[:0] if len(places) and self._plain_steps_are_due(price) else places

    def learn(self, sequences: Sequence[HostSequence], num_gained: int, step: CopyStep) -> None:
        batch_size, conditions, price = len(sequences), conditions_of(sequences), self._price
        assert price
        if step.is_warm:
            self.costs.correct(Observation("verify", batch_size, step.num_rows, step.ms), conditions)
        self.prices.steps(conditions).add(num_gained / batch_size, (step.ms + step.between_ms) / price.plain_ms, 0.0, 1.0, None)
        self.prices.add_steps(1)

    def _priced(self, sequences: Sequence[HostSequence], rests: Rests) -> Price:
        """What time costs now, after these steps."""
        conditions = conditions_of(sequences)
        price, count = self.prices.at(conditions), len(rests.steps)
        if count:
            for observation in rests.observations(len(sequences), price.plain_ms):
                self.costs.correct(observation, conditions)
                surprise = abs(math.log((observation.ms + rests.between_ms) / price.plain_ms))
                if surprise > MUCH_WRONG:
                    self.prices.forget(conditions)
                if surprise > A_SURPRISE:
                    self._most_copied = LEAST_BETWEEN
            self.prices.between_ms = rests.between_ms
            self.prices.steps(conditions).add_rests(count, sum(ms for _, ms in rests.steps))
            self.prices.add_steps(count)
        return self.prices.at(conditions)

    def _plain_steps_are_due(self, price: Price) -> bool:
        """Instead of one more with copies: they may lose a share of the time."""
        self._num_copied += 1
        least = max(LEAST_BETWEEN, num_plain_steps(price) * (price.speed - 1.0) / PLAIN_SHARE)
        if self._num_copied < min(self._most_copied, least):
            return False
        self._num_copied, self._most_copied = 0, min(MOST_BETWEEN, 2 * self._most_copied)
        self._num_plain = num_plain_steps(price) - 1
        return True


class Copying:
    """What texts repeat, and which of it is verified by itself."""

    def __init__(self, policy: CopyPolicy) -> None:
        self.book, self.policy = CopyBook(), policy
        self._decided = 0.0  # when that was, in seconds of the clock

    def of(self, sequences: Sequence[HostSequence]) -> list[Copy]:
        """Those that may be worth it."""
        return self.book.of(sequences, self.policy.least_chance(len(sequences)))

    def alone(self, sequences: Sequence[HostSequence], copies: list[Copy], between_ms: float) -> Drafted | None:
        """What is verified where nothing else is drafted; None if nothing is worth it."""
        chains = Chains.of(copies)
        kept = self.policy.keep(sequences, chains.chances, chains.owners, between_ms)
        self._decided = time.perf_counter()
        return Drafted.of_chains(sequences, chains, kept) if len(kept) else None

    def saved(self, outcome: HostOutcome, seconds: float) -> float:
        """Seconds that such a step has saved, looking included, beside as many plain ones as would have gained its tokens."""
        num_gained = sum(map(len, outcome.tokens)) / len(outcome.tokens)
        return num_gained * self.policy.plain_ms / 1000 - seconds

    def learn(
        self,
        sequences: Sequence[HostSequence],
        drafted: Drafted,
        confirmed: Confirmed,
        between: tuple[float, ...],
        *,
        is_warm: bool,
    ) -> None:
        """What came of that, now that the step ends: of its time what has passed since it was decided on, since a plain one would
        have looked and asked as well. between: milliseconds that pass after plain steps, and after those with copies; what they
        differ by belongs to the step. is_warm: see `CopyStep`."""
        ms = 1000 * (time.perf_counter() - self._decided)
        num_gained, num_rows, (plain_ms, copied_ms) = sum(map(len, confirmed.tokens)), len(drafted.trees.owners), between
        more_ms = copied_ms - plain_ms if plain_ms and copied_ms else 0.0
        self.policy.learn(sequences, num_gained, CopyStep(num_rows, max(LEAST_MS, ms + more_ms), plain_ms, is_warm))
