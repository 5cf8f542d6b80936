"""What is compiled of costs, against numpy; and as it is written against as it is compiled."""

from typing import Any

import numpy as np
import pytest

from eagle_rt.speculate import compiled_costs
from eagle_rt.speculate.compiled_costs import NUM_PLACES, NUM_SINGLE_PLACES

MODULE = compiled_costs
NAMES = ["interpolated", "place_of", "learn_difference", "part_ms"]


def test_everything_is_compiled() -> None:
    pytest.importorskip("numba")
    own = [name for name, value in vars(compiled_costs).items() if hasattr(value, "py_func")]
    assert own == NAMES


def test_what_parts_take(functions: Any) -> None:
    """Against numpy: rows filled up, a curve, its slope beyond the last knot, and a correction by rows."""
    knots, values, differences = np.array([1.0, 2.0, 8.0]), np.array([3.0, 3.5, 9.5]), np.linspace(-0.2, 0.3, NUM_PLACES) ** 2
    rows, sequences = np.array([0.5, 1.0, 1.4, 5.0, 8.0, 20.0, 300.0]), np.arange(7.0)
    places = [functions.place_of(number) for number in range(1, 401)]
    tables = np.zeros(0), np.maximum(2.0 * np.ceil(np.arange(400) / 2), 4.0)
    for table in tables:
        filled = table[np.ceil(rows).astype(int)] if len(table) else rows
        ms = sequences * 0.7 + np.interp(filled, knots, values) + np.maximum(0.0, filled - 8.0)
        ms *= np.exp(0.1 + np.interp(np.interp(filled, np.arange(1, 401), places), np.arange(NUM_PLACES), differences))
        found = functions.part_ms(sequences, rows, table, knots, values, 0.7, 0.1, differences)
        assert found == pytest.approx(ms)
        of_all = functions.part_ms(sequences[4:5], rows, table, knots, values, 0.7, 0.1, differences)
        assert of_all[4] == pytest.approx(ms[4])
    one = functions.part_ms(np.ones(1), rows, tables[0], knots[:1], values[:1], 0.5, 0.0, np.zeros(NUM_PLACES))
    assert one.tolist() == [3.5] * 7


def test_places_of_numbers_of_rows(functions: Any) -> None:
    """All that a small tree can have are told apart, and what differs by a fourth among larger ones."""
    singles = [functions.place_of(num_rows) for num_rows in range(1, NUM_SINGLE_PLACES + 1)]
    assert singles == [*range(NUM_SINGLE_PLACES)]
    assert functions.place_of(0.0) == functions.place_of(0.5) == 0.0
    assert functions.place_of(1.5) == 0.5
    assert functions.place_of(32.0) == functions.place_of(16.0) + 2.0
    assert functions.place_of(1e9) == NUM_PLACES - 1


def test_what_differs_is_learned_as_by_a_kalman_filter(functions: Any) -> None:
    """As its textbook equations have it, in matrices; and after many measurements of one place, at once, as by a mean."""
    rng = np.random.default_rng(4)
    square = rng.standard_normal((NUM_PLACES, NUM_PLACES))
    at_first = square @ square.T / NUM_PLACES
    means, covariance, noise = np.zeros(NUM_PLACES), at_first.copy(), 0.1
    expected, variances, identity = means.copy(), at_first.copy(), np.eye(NUM_PLACES)
    for place, surprise, faded in ((3, 0.4, 0.0), (20, -0.3, 0.2), (3, 0.1, 0.5)):
        functions.learn_difference(means, covariance, at_first, place, surprise, faded, noise)
        variances = (1 - faded) * variances + faded * at_first
        gain = variances @ identity[place] / (variances[place, place] + noise)
        expected = expected + gain * surprise
        variances = (identity - np.outer(gain, identity[place])) @ variances
        assert np.allclose(means, expected)
        assert np.allclose(covariance, variances)
    means, covariance = np.zeros(NUM_PLACES), at_first.copy()
    for _ in range(100):
        functions.learn_difference(means, covariance, at_first, 5, 0.7 - means[5], 0.0, noise)
    held_by = noise / at_first[5, 5]
    assert means[5] == pytest.approx(0.7 * 100 / (100 + held_by))
