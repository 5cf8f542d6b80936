"""The estimator against the truth that made its observations up."""

import numpy as np
import pytest

from eagle_rt.speculate.acceptance import FIT_EVERY, MOST_DRIFT, AcceptanceEstimator, Calibration, Drift, VerifiedNodes, logistic
from eagle_rt.speculate.compiled import chances_of_level


def observations(count: int, rng: np.random.Generator) -> tuple[VerifiedNodes, np.ndarray]:
    """Nodes that are accepted more rarely than the head says, the more so the deeper; and how likely each was."""
    log_probs = np.log(rng.uniform(0.02, 0.98, count))
    depths = rng.integers(1, 5, count)
    parent_scores = -rng.uniform(0, 3, count)
    logits = 0.6 * (log_probs - np.log1p(-np.exp(log_probs))) - 0.3 * depths + 0.2 * parent_scores
    truth = 1 / (1 + np.exp(-logits))
    labels = (rng.uniform(size=count) < truth).astype(float)
    is_asked = np.ones(count, dtype=np.bool_)
    return VerifiedNodes(log_probs, parent_scores + log_probs, depths, np.zeros(count), truth, labels, is_asked), truth


def test_it_learns_what_nodes_are_worth() -> None:
    rng = np.random.default_rng(0)
    estimator = AcceptanceEstimator(max_depth=4)
    for _ in range(80):
        estimator.observe(observations(FIT_EVERY // 4, rng)[0])
    nodes, truth = observations(5000, rng)
    inputs = estimator.inputs(nodes.log_probs, nodes.scores - nodes.log_probs, nodes.depths, nodes.temperatures)
    learned = estimator.probabilities(inputs, np.zeros(5000))
    assert np.abs(learned - truth).mean() < 0.03
    assert ((learned - nodes.labels) ** 2).mean() < 0.95 * ((np.exp(nodes.log_probs) - nodes.labels) ** 2).mean()


def test_a_head_that_is_sure_and_wrong_is_believed_no_longer() -> None:
    """There Newton's steps go too far, and farther each time."""
    rng = np.random.default_rng(0)
    estimator = AcceptanceEstimator(max_depth=4)
    for number in range(1, 9):
        nodes, _ = observations(FIT_EVERY, rng)
        log_probs = np.log(rng.choice([0.9999, 0.2, 0.01], FIT_EVERY))
        estimator.observe(nodes._replace(log_probs=log_probs, labels=np.zeros(FIT_EVERY)))
        inputs = estimator.inputs(log_probs, nodes.scores - nodes.log_probs, nodes.depths, nodes.temperatures)
        assert estimator.probabilities(inputs, np.zeros(FIT_EVERY)).mean() < 0.5 / number


def test_nodes_below_rejected_ones_say_nothing_of_themselves() -> None:
    """They count as what they were given, and were not, only in the calibration."""
    rng = np.random.default_rng(0)
    seen, others = AcceptanceEstimator(max_depth=4), AcceptanceEstimator(max_depth=4)
    for _ in range(4):
        nodes, _ = observations(FIT_EVERY, rng)
        below = observations(FIT_EVERY, rng)[0]._replace(labels=np.zeros(FIT_EVERY), is_asked=np.zeros(FIT_EVERY, dtype=np.bool_))
        seen.observe(nodes)
        others.observe(below)
        others.observe(nodes)
    np.testing.assert_array_equal(seen.weights, others.weights)
    assert sum(seen.calibration.counts) == 4 * FIT_EVERY
    assert sum(others.calibration.counts) == 8 * FIT_EVERY


def test_it_begins_where_it_is_told_to() -> None:
    log_probs = np.log(np.array([0.01, 0.5, 0.97]))
    inputs_of = (np.zeros(3), np.array([1, 2, 3]), np.zeros(3))
    cold = AcceptanceEstimator(3, [1.0, 0.0, 0.0, 0.0, 0.0])
    assert np.allclose(cold.probabilities(cold.inputs(log_probs, *inputs_of), np.zeros(3)), np.exp(log_probs))
    # A profile may have been made with shallower trees, or with deeper ones.
    for weights in ([0.5, 0.4, 0.1, 0.2, -1.0], [0.5, 0.4, 0.1, 0.2, -1.0, -1.0, -1.0, -1.0, -1.0]):
        warm = AcceptanceEstimator(3, weights)
        assert warm.weights.tolist() == [0.5, 0.4, 0.1, 0.2, -1.0, -1.0, -1.0]
        chances = warm.probabilities(warm.inputs(log_probs, *inputs_of), np.zeros(3))
        assert np.allclose(chances, 1 / (1 + np.exp(-(0.5 * (log_probs - np.log1p(-np.exp(log_probs))) - 1))))


def test_nodes_of_a_level_are_what_their_inputs_say() -> None:
    rng = np.random.default_rng(1)
    estimator = AcceptanceEstimator(3, rng.standard_normal(7).tolist())
    log_probs, parent_scores = np.append(-rng.exponential(2, 9), -1e9), np.append(-rng.exponential(9, 9), -np.inf)
    owners, temperatures = rng.integers(0, 4, 10), np.array([0.0, 0.4, 1.0, 100.0])
    slopes, offsets = zip(*map(estimator.line, temperatures.tolist()), strict=True)
    lines = np.array([slopes, offsets])
    lines[1] += 0.3
    for depth in (1, 2, 3, 4):
        above = parent_scores if depth > 1 else np.zeros(10)
        inputs = estimator.inputs(log_probs, above, np.full(10, depth), temperatures[owners])
        parent_chances = rng.uniform(size=10)
        path, bias = estimator.path_and_biases[[0, min(depth, 3)]]
        fast = chances_of_level(log_probs, above + log_probs, owners, lines, path, bias, parent_chances)
        expected = estimator.probabilities(inputs, np.full(10, 0.3))
        assert np.allclose(fast, expected * parent_chances)


def test_odd_inputs_stay_finite() -> None:
    estimator = AcceptanceEstimator(max_depth=2)
    odd = np.array([0.0, -1e9, -1e300]), np.array([0.0, -1e300, 0.0]), np.array([1, 2, 9]), np.array([0, 100.0, 1e-6])
    inputs = estimator.inputs(*odd)
    assert np.isfinite(inputs).all()
    log_probs, parent_scores, depths, temperatures = (np.repeat(column, 200) for column in odd)
    for label in (1.0, 0.0):
        labels, is_asked = np.full(600, label), np.ones(600, dtype=np.bool_)
        for _ in range(3):
            scores = parent_scores + log_probs
            estimator.observe(VerifiedNodes(log_probs, scores, depths, temperatures, labels, labels, is_asked))
    assert np.isfinite(estimator.weights).all()
    chances = estimator.probabilities(inputs, np.zeros(3))
    assert ((chances >= 0) & (chances <= 1)).all()


def test_calibration_counts() -> None:
    calibration = Calibration()
    calibration.add(np.array([0.05, 0.95, 0.91, 1.0]), np.array([0.5, 0.5, 0.5, 0.5]), np.array([0.0, 1.0, 0.0, 1.0]))
    assert calibration.counts == [1, 0, 0, 0, 0, 0, 0, 0, 0, 3]
    assert calibration.accepted[9] == 2
    assert np.isclose(calibration.predicted[9], 2.86)
    assert np.isclose(calibration.brier_score, (0.05**2 + 0.05**2 + 0.91**2) / 4)
    assert np.isclose(calibration.raw_brier_score, 0.25)


@pytest.mark.parametrize("truth", [-0.7, 0.0, 0.5])
def test_a_drift_finds_by_how_much_nodes_are_accepted_more_often(truth: float) -> None:
    """Within some tens of steps, of eight nodes each."""
    rng, drift, found = np.random.default_rng(0), Drift(), []
    for number in range(400):
        logits = rng.normal(0.0, 1.5, 8)
        said = logistic(logits + drift.logits)
        drift.move(float((rng.uniform(size=8) < logistic(logits + truth)).sum()), said.sum(), (said * (1 - said)).sum())
        if number >= 60:
            found.append(drift.logits)
    assert abs(np.mean(found) - truth) < 0.12
    assert np.std(found) < 0.25


def test_a_drift_has_its_limits_and_ends_where_nothing_is_expected() -> None:
    drift = Drift()
    for _ in range(2000):
        drift.move(0.0, 6.0, 1.0)
    assert drift.logits == -MOST_DRIFT
    for _ in range(2000):
        drift.move(0.0, 0.0, 0.0)
    assert abs(drift.logits) < 0.01
