"""What parts of a step with some numbers of rows take, and learning it, compiled."""

import numpy as np

from eagle_rt.kernels.compiled import compiled
from eagle_rt.speculate.forest import Floats

# Numbers of rows that have a place of their own, and all places.
NUM_SINGLE_PLACES, NUM_PLACES = 16, 36


@compiled
def interpolated(x: float, xs: Floats, ys: Floats) -> float:
    """Linear between the points, and as at the first and last one beyond."""
    right = np.searchsorted(xs, x)
    if right == 0:
        return ys[0]
    if right == len(xs):
        return ys[-1]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


@compiled
def place_of(num_rows: float) -> float:
    """Where costs of so many rows are found: 1, 2, 3, ... rows have places of their own, and then half powers of two; others lie
    between them, and what is beyond them is at the last one."""
    if num_rows <= NUM_SINGLE_PLACES:
        return max(0.0, num_rows - 1.0)
    return min(NUM_PLACES - 1.0, NUM_SINGLE_PLACES - 1.0 + 2.0 * np.log2(num_rows / NUM_SINGLE_PLACES))


@compiled
def learn_difference(
    means: Floats, covariance: Floats, at_first: Floats, place: int, surprise: float, faded: float, noise: float
) -> None:
    """A step of a Kalman filter: at one place [P] were so much more than its mean, give or take a variance of `noise`. Before that
    the covariance [P, P] goes back to what it was at first by a share that has faded."""
    covariance += faded * (at_first - covariance)
    gains = covariance[place] / (covariance[place, place] + noise)
    means += surprise * gains
    row = covariance[place].copy()
    for other in range(len(gains)):
        covariance[other] -= gains[other] * row


@compiled
def part_ms(
    num_sequences: Floats,
    num_rows: Floats,
    filled_up: Floats,
    knots: Floats,
    values: Floats,
    per_sequence: float,
    correction: float,
    differences: Floats,
) -> Floats:
    """[N] milliseconds of [N] numbers of sequences, or [1] of all, and [N] of rows: see `costs.PartCost`.

    filled_up: as how many rows 0, 1, ... count; correction, differences: what measurements differ by, a logarithm, and by how much
    more at each of NUM_PLACES.
    """
    slope = max(0.0, (values[-1] - values[-2]) / (knots[-1] - knots[-2])) if len(knots) > 1 else 0.0
    ms = np.empty(len(num_rows))
    for index in range(len(num_rows)):
        rows = num_rows[index]
        if len(filled_up):
            rows = filled_up[min(int(np.ceil(rows)), len(filled_up) - 1)]
        by_rows = interpolated(rows, knots, values) + slope * max(0.0, rows - knots[-1])
        ms[index] = num_sequences[min(index, len(num_sequences) - 1)] * per_sequence + by_rows
        place = place_of(rows)
        left = min(int(place), NUM_PLACES - 2)
        ms[index] *= np.exp(correction + differences[left] + (place - left) * (differences[left + 1] - differences[left]))
    return ms


def compile_costs() -> None:
    """See `compiled.compile_all`."""
    two, places, square = np.array([0.5, 0.5]), np.zeros(NUM_PLACES), np.eye(NUM_PLACES)
    part_ms(two, two, np.zeros(2), np.arange(2.0), two, 0.0, 0.0, places)
    place_of(1)
    learn_difference(places, square, square, 0, 0.0, 0.0, 1.0)
