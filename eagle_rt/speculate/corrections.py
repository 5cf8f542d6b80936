"""How far off what steps take is from what was measured at start, learned from every one of them."""

import math

import numpy as np

from eagle_rt.speculate.compiled_costs import NUM_PLACES, NUM_SINGLE_PLACES, learn_difference, place_of

# Means remember some 1 / (1 - memory) measurements, few of how fast the machine is and more of what conditions differ by, and are
# held to what they begin at by so many. How fast the machine is changes within a second, for all parts alike: longer measurements
# than so many milliseconds count for as many more. One counts as no farther from what was expected than LARGEST_RATIO, since the
# machine stands still now and then.
MACHINE_MEMORY, CONDITIONS_MEMORY, HELD_BY, LARGEST_RATIO = 0.9, 0.98, 4.0, 1.5
LONG_MS = 10.0
# What numbers of rows differ by, in logs: how much, before anything is known; how alike that is of numbers one of which is twice
# the other, as a share, and of nearer ones the more; and how far off single measurements are.
DEVIATION, ALIKE, NOISE = 0.15, math.exp(-1.0), 0.1
# What was learned of them fades while so much time goes by, since when memory becomes faster some numbers of rows do, and others do
# not; and what begins as others are begins with this share of what is known of those.
FADE_MS, HANDED_ON = 4000.0, 0.5
# How many rows each place stands for, a logarithm, and the covariance of what they differ by, before anything is known.
LOG_ROWS = np.concatenate((np.log2(np.arange(1.0, NUM_SINGLE_PLACES)), 4.0 + 0.5 * np.arange(NUM_PLACES - NUM_SINGLE_PLACES + 1)))
NO_DIFFERENCES = np.zeros(NUM_PLACES)
AT_FIRST = DEVIATION**2 * ALIKE ** np.abs(np.subtract.outer(LOG_ROWS, LOG_ROWS))


class Moving:
    """A mean over the latest measurements, some 1 / (1 - memory) of them, held to what it begins at."""

    def __init__(self, begin: float, memory: float) -> None:
        self.mean, self._memory, self._weight = begin, memory, HELD_BY

    def move(self, surprise: float, count: float = 1.0) -> float:
        """By its share of what was not expected, since when there might have been so many measurements; what is left."""
        self._weight = self._memory**count * self._weight + 1.0
        self.mean += surprise / self._weight
        return surprise - surprise / self._weight


class Machine(Moving):
    """How fast the machine is, for all parts and conditions. clock_ms: what all that was measured has taken together."""

    def __init__(self) -> None:
        super().__init__(0.0, MACHINE_MEMORY)
        self.clock_ms = 0.0


class RowDifferences:
    """What numbers of rows differ by from what holds for all of them, in logs, of one part and batches of about one size, whatever
    their context.

    Timing is noisy, and what one more row costs is a small difference of such ratios. So this is a Gaussian process, followed by a
    Kalman filter: a measurement tells of near numbers as well, the more the longer these were not measured themselves.

    means: [NUM_PLACES] see `compiled_costs.place_of`. nearest: as which they begin.
    """

    def __init__(self, machine: Machine, nearest: "RowDifferences | None" = None) -> None:
        self.means, self._covariance = np.zeros(NUM_PLACES), AT_FIRST.copy()
        if nearest:
            self.means[:] = nearest.means
            self._covariance += HANDED_ON * (nearest._covariance - AT_FIRST)
        self._machine, self._last_ms = machine, machine.clock_ms

    def learn(self, place: int, surprise: float) -> None:
        """At a place it was so much more than its mean."""
        faded = 1.0 - math.exp((self._last_ms - self._machine.clock_ms) / FADE_MS)
        learn_difference(self.means, self._covariance, AT_FIRST, place, surprise, faded, NOISE**2)
        self._last_ms = self._machine.clock_ms


class Correction:
    """The ratio of measured to predicted for a part under some conditions, in logs: that of the machine, which is the same for all
    parts and conditions; what these conditions differ from it; and what numbers of rows differ from that.

    Machines are faster and slower from one minute to the next, whatever is done: that must not make look cheap, or dear, what was
    measured last before. nearest: that of the most similar conditions so far, as which it begins.
    """

    def __init__(self, machine: Machine, rows: RowDifferences, nearest: "Correction | None") -> None:
        self.rows, self.own = rows, Moving(nearest.own.mean if nearest else 0.0, CONDITIONS_MEMORY)
        self._machine = machine

    @property
    def of_all_rows(self) -> float:
        """What holds for all numbers of rows."""
        return self._machine.mean + self.own.mean

    def move(self, num_rows: int, expected_ms: float, ms: float) -> None:
        """Something that the table says takes `expected_ms` took `ms`."""
        place = round(place_of(num_rows))
        believed_ms = expected_ms * math.exp(self.of_all_rows + float(self.rows.means[place]))
        surprise = math.log(min(LARGEST_RATIO, max(1.0 / LARGEST_RATIO, ms / believed_ms)))
        left = self.own.move(self._machine.move(surprise, max(1.0, believed_ms / LONG_MS)))
        self._machine.clock_ms += ms
        self.rows.learn(place, left)
