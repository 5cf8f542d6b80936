"""The estimator against the truth that made its observations up."""

import numpy as np

from eagle_rt.speculate.acceptance import FIT_EVERY, AcceptanceEstimator, Calibration


def observations(count: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Nodes that are accepted more rarely than the head says, the more so the deeper."""
    log_probs = np.log(rng.uniform(0.02, 0.98, count))
    depths = rng.integers(1, 5, count)
    parent_scores = -rng.uniform(0, 3, count)
    logits = 0.6 * (log_probs - np.log1p(-np.exp(log_probs))) - 0.3 * depths + 0.2 * parent_scores
    truth = 1 / (1 + np.exp(-logits))
    return log_probs, parent_scores, depths, np.zeros(count), truth, (rng.uniform(size=count) < truth).astype(float)


def test_it_learns_what_nodes_are_worth() -> None:
    rng = np.random.default_rng(0)
    estimator = AcceptanceEstimator(max_depth=4)
    for _ in range(20):
        log_probs, parent_scores, depths, temperatures, _, labels = observations(FIT_EVERY, rng)
        estimator.observe(estimator.inputs(log_probs, parent_scores, depths, temperatures), labels)
    log_probs, parent_scores, depths, temperatures, truth, labels = observations(5000, rng)
    inputs = estimator.inputs(log_probs, parent_scores, depths, temperatures)
    learned = estimator.probabilities(inputs, np.zeros(len(labels)))
    assert np.abs(learned - truth).mean() < 0.03
    assert ((learned - labels) ** 2).mean() < 0.95 * ((np.exp(log_probs) - labels) ** 2).mean()


def test_it_begins_where_it_is_told_to() -> None:
    log_probs = np.log(np.array([0.01, 0.5, 0.97]))
    inputs_of = (np.zeros(3), np.array([1, 2, 3]), np.zeros(3))
    cold = AcceptanceEstimator(3, [1.0, 0.0, 0.0, 0.0, 0.0])
    assert np.allclose(cold.probabilities(cold.inputs(log_probs, *inputs_of), np.zeros(3)), np.exp(log_probs))
    # A profile may have been made with shallower trees, or with deeper ones.
    for weights in ([0.5, 0.4, 0.0, 0.1, 0.2, 0.0, -1.0], [0.5, 0.4, 0.0, 0.1, 0.2, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0]):
        warm = AcceptanceEstimator(3, weights)
        assert warm.weights.tolist() == [0.5, 0.4, 0.0, 0.1, 0.2, 0.0, -1.0, -1.0, -1.0]
        chances = warm.probabilities(warm.inputs(log_probs, *inputs_of), np.zeros(3))
        assert np.allclose(chances, 1 / (1 + np.exp(-(0.5 * (log_probs - np.log1p(-np.exp(log_probs))) - 1))))


def test_nodes_of_a_level_are_what_their_inputs_say() -> None:
    rng = np.random.default_rng(1)
    estimator = AcceptanceEstimator(3, rng.standard_normal(9).tolist())
    log_probs, parent_scores = np.append(-rng.exponential(2, 9), -1e9), np.append(-rng.exponential(9, 9), -np.inf)
    owners, temperatures = rng.integers(0, 4, 10), np.array([0.0, 0.4, 1.0, 100.0])
    slopes, offsets = estimator.lines(temperatures)
    for depth in (1, 2, 3, 4):
        inputs = estimator.inputs(log_probs, parent_scores, np.full(10, depth), temperatures[owners])
        fast = estimator.of_level(depth, log_probs, parent_scores, slopes[owners], offsets[owners] + 0.3)
        assert np.allclose(fast, estimator.probabilities(inputs, np.full(10, 0.3)))


def test_odd_inputs_stay_finite() -> None:
    estimator = AcceptanceEstimator(max_depth=2)
    inputs = estimator.inputs(
        np.array([0.0, -1e9, -np.inf]), np.array([0.0, -np.inf, 0.0]), np.array([1, 2, 9]), np.array([0, 100.0, 1e-6])
    )
    assert np.isfinite(inputs).all()
    for label in (1.0, 0.0):
        for _ in range(3):
            estimator.observe(np.repeat(inputs, 200, axis=0), np.full(600, label))
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
