"""What time costs in tokens."""

from collections.abc import Callable
from functools import cached_property

import numpy as np

from eagle_rt.speculate.costs import Conditions, StepCosts
from eagle_rt.speculate.forest import Floats, Ints

# Speeds over plain decoding: of how many plain steps the first one is a mean, and how much of them is remembered.
FIRST_STEPS, SPEED_MEMORY = 2.0, 0.98
# The rows of a typical step with drafts.
ROWS_OF_A_SEQUENCE, MORE_ROWS = 4.0, 8.0
# The rows of a sequence that a head reads before it drafts: what the step before has gained.
ROWS_READ = 3.0


class Speed:
    """Of the steps of similar batches over that of plain decoding, as a moving mean."""

    def __init__(self, begin: float) -> None:
        self._gained, self._plain = begin * FIRST_STEPS, FIRST_STEPS

    def add(self, gained: float, plain: float) -> None:
        """A step gained so many tokens a sequence, where plain decoding would have gained the others in its time."""
        self._gained = SPEED_MEMORY * self._gained + gained
        self._plain = SPEED_MEMORY * self._plain + plain

    @property
    def value(self) -> float:
        return self._gained / self._plain


class PriceList:
    """What 0, 1, 2, ... of something cost, worked out as far as it is asked for. prices_of: what any numbers cost."""

    def __init__(self, prices_of: Callable[[Floats], Floats]) -> None:
        self._prices_of, self._prices = prices_of, np.zeros(0)

    def up_to(self, count: int) -> Floats:
        """[count + 1]."""
        if count >= len(self._prices):
            self._prices = self._prices_of(np.arange(2.0 * count + 1))
        return self._prices[: count + 1]


class Price:
    """What time costs in tokens, for the steps of one batch size: `rate` tokens a millisecond; verifying anything at all, and each
    node; a node that is fed to the head, and a further level for each sequence. speed: of steps, over that of plain decoding.

    verify: lists what a pass of the target with so many nodes costs.
    """

    def __init__(self, costs: StepCosts, speed: float, conditions: Conditions, num_uses: int = 1) -> None:
        batch_size = conditions.batch_size
        # What one more row costs is a mean over as many as a step has: that of the very next one would be lost in noise. But the
        # first of all may cost more than all others.
        rows = np.array([batch_size, 2.0 * batch_size, ROWS_OF_A_SEQUENCE * batch_size + MORE_ROWS])
        rows[1:] = costs.filled_up(rows[1:])
        verify, level = (costs.ms(part, batch_size, rows, conditions).tolist() for part in ("verify", "level"))
        # No tree is worth less than plain decoding.
        self.plain_ms: float = verify[0]
        self.rate = max(1.0, speed) * batch_size / self.plain_ms
        means = [(verify[2] - verify[place]) / (rows[2] - rows[place]) for place in (0, 1) if rows[place] < rows[2]]
        self.node = self.rate * min(means)
        self.any_node = self.rate * (verify[2] - verify[0]) - self.node * (rows[2] - rows[0])
        self.level_row = self.rate * (level[2] - level[0]) / (rows[2] - rows[0])
        self.level_sequence = self.rate * level[0] / batch_size
        self.batch_size = batch_size
        self.num_uses = self.num_uses_left = num_uses

        rate = self.rate  # a list that knew its price would keep it alive

        def listed(part: str, num_sequences: int, first_rows: int = 0) -> PriceList:
            return PriceList(lambda counts: rate * costs.ms(part, num_sequences, first_rows + counts, conditions))

        self.verify = listed("verify", batch_size, batch_size)
        self._level_of_none, self._level_of_one = listed("level", 0), listed("level", 1)
        # Of the first level of 0, 1, ... sequences; and of a row that the head has missed before.
        numbers = np.arange(1.0, batch_size + 1)
        starts = self.rate * costs.ms("start", np.arange(1, batch_size + 1), ROWS_READ * numbers, conditions)
        starts += self.any_node * (1.0 - numbers / batch_size)  # what the shares in `utility` don't add up to
        self.starts: list[float] = [0.0, *starts.tolist()]
        start = costs.ms("start", batch_size, np.array([batch_size, 33.0 * batch_size]), conditions).tolist()
        self.missed_row = self.rate * (start[1] - start[0]) / (32 * batch_size)

    @cached_property
    def least_level(self) -> float:
        """What no level costs less than."""
        return float(self._level_of_one.up_to(self.batch_size)[1:].min())

    def level(self, num_sequences: Ints) -> Floats:
        """[n] of levels of 1 to n rows, of so many sequences each."""
        count = len(num_sequences)
        of_none, of_one = self._level_of_none.up_to(count)[1:], self._level_of_one.up_to(count)[1:]
        return of_none + num_sequences * (of_one - of_none)

    def utility(self, promises: Floats) -> Floats:
        """Expected tokens of drafts of such promise [..., D, R] beyond the price of their nodes and of levels past the first."""
        gains = np.maximum(0.0, promises - self.node)
        gains[..., 1:, :] = np.maximum(0.0, promises[..., 1:, :] - (self.node + self.level_row))
        gains = gains.sum(axis=-1)
        gains[..., 1:] -= self.level_sequence
        return np.maximum(0.0, gains.cumsum(axis=-1).max(axis=-1) - self.any_node / self.batch_size)
