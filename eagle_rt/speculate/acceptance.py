"""How likely a drafted node is to be accepted, learned from what verification shows anyway."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eagle_rt.speculate.compiled import LEAST_LOG_PROB, MIN_SCORE, MOST_LOG_PROB
from eagle_rt.speculate.forest import Bools, Floats, Ints

# Observations before the first fit, and between two, which double up to so many; and how many of the latest a fit looks at.
FIRST_FIT, FIT_EVERY = 32, 256
NUM_REMEMBERED = 4096
# The head's logits are multiplied by this before they become log-probabilities: those say more about what will be accepted
# (see docs/findings.md) than its own ones.
SHARPNESS = 2.0
NUM_NEWTON_STEPS, MOST_HALVINGS = 3, 16
NUM_BINS = 10
MAX_TEMPERATURE = 2.0
# Inputs that all depths share: the logit of the head's probability, the same times the temperature, the path's score, and the
# temperature. A bias for each depth follows.
LOGIT, BY_TEMPERATURE, PATH, AT_TEMPERATURE = range(4)
NUM_SHARED = 4
# How strongly a fit is held to the weights of the cold start: each of these, what all depths are moved by alike, and each of them
# beyond that. Heads differ in how sure they are, and hardly in the rest, of which a few dozen observations would say anything.
SHARED_STRENGTHS, ALIKE_STRENGTH, DEPTH_STRENGTH = [16.0, 64.0, 256.0, 64.0], 2.0, 128.0
# How many steps a drift remembers, what it is held to nothing by, in units of expected variances of nodes, and the most it may be.
DRIFT_MEMORY, DRIFT_HELD_BY, MOST_DRIFT = 1.0 - 1.0 / 64, 8.0, 2.0
# Fitted by benchmarks/estimator.py to 15,300 nodes that the built-in EAGLE-3 head drafted for the built-in prompts at temperatures
# from 0 to 2.
DEFAULT_WEIGHTS = [1.11, -0.27, -0.18, -0.34, 0.31, 0.23, 0.26, 0.14, 0.12]


@dataclass
class Calibration:
    """How good the probabilities were that nodes were given before they were verified: of being on the accepted path.

    counts, predicted, accepted: by predicted probability in tenths, the number of nodes, the sum of their probabilities, and how
    many were accepted. squared_error, raw_squared_error: sums for ours and for the head's sharpened probabilities, which
    foresee the target better than its own ones do (benchmarks/estimator.py).
    """

    counts: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    squared_error: float = 0.0
    raw_squared_error: float = 0.0

    @property
    def brier_score(self) -> float:
        """Mean squared error of ours; 0 is perfect."""
        return self.squared_error / max(1.0, sum(self.counts))

    @property
    def raw_brier_score(self) -> float:
        return self.raw_squared_error / max(1.0, sum(self.counts))

    def add(self, predicted: Floats, raw: Floats, labels: Floats) -> None:
        bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        for sums, weights in ((self.counts, None), (self.predicted, predicted), (self.accepted, labels)):
            for index, value in enumerate(np.bincount(bins, weights, NUM_BINS).tolist()):
                sums[index] += value
        self.squared_error += float(((predicted - labels) ** 2).sum())
        self.raw_squared_error += float(((raw - labels) ** 2).sum())


class VerifiedNodes(NamedTuple):
    """[M] each: of the head, the log-probabilities and the scores of paths; the temperatures of the sequences; the chances that
    were given; labels: 1 for those that were accepted; is_asked: whether the parent was, so that the target chose among it and its
    siblings."""

    log_probs: Floats
    scores: Floats
    depths: Ints
    temperatures: Floats
    chances: Floats
    labels: Floats
    is_asked: Bools


class AcceptanceEstimator:
    """P(the target chooses a node | it chose the node's parent): a logistic function of what the head gave.

    Its inputs are the logit of the head's probability (of the perturbed one, for coupled drafts), the same times the temperature,
    the log-probability of the path above, the temperature (0 for greedy sequences), and a bias for each depth. The weights begin as
    those of a cold start and are fitted to the latest observations by Newton's method, held to where they began by a normal prior.
    A path is accepted with the product of its nodes' probabilities.
    """

    def __init__(self, max_depth: int, weights: list[float] | None = None) -> None:
        self.max_depth = max_depth
        self._calibration = Calibration()
        weights = DEFAULT_WEIGHTS if weights is None else weights
        start = np.full(NUM_SHARED + max_depth, weights[-1])  # deeper than was learned: as the deepest
        start[: len(weights)] = weights[: len(start)]
        self._start, self._precision = start, prior_precision(max_depth)
        self._use(start.copy())
        self._inputs = np.zeros((NUM_REMEMBERED, len(start)))
        self._labels = np.zeros(NUM_REMEMBERED)
        self._num_seen = 0
        self._unread: list[VerifiedNodes] = []
        self._num_unfitted, self._num_due = 0, FIRST_FIT

    @property
    def calibration(self) -> Calibration:
        self._read()
        return self._calibration

    def inputs(self, log_probs: Floats, parent_scores: Floats, depths: Ints, temperatures: Floats) -> Floats:
        """[M, W] of M nodes."""
        logits = logits_of(log_probs)
        temperatures = np.minimum(temperatures, MAX_TEMPERATURE)
        inputs = np.zeros((len(logits), len(self.weights)))
        inputs[:, LOGIT] = logits
        inputs[:, BY_TEMPERATURE] = logits * temperatures
        inputs[:, PATH] = np.maximum(parent_scores, MIN_SCORE)
        inputs[:, AT_TEMPERATURE] = temperatures
        inputs[np.arange(len(logits)), NUM_SHARED - 1 + np.minimum(depths, self.max_depth)] = 1.0
        return inputs

    def probabilities(self, inputs: Floats, corrections: Floats) -> Floats:
        """[M] P(chosen | parent chosen); corrections: [M] added to the logits."""
        return logistic(inputs @ self.weights + corrections)

    def line(self, temperature: float) -> tuple[float, float]:
        """What the logits of the head's probabilities are multiplied by for a sequence of such a temperature, and what is added to
        them."""
        logit, by_temperature, _, at_temperature = self.weights[:NUM_SHARED].tolist()
        temperature = min(temperature, MAX_TEMPERATURE)
        return logit + by_temperature * temperature, at_temperature * temperature

    def _use(self, weights: Floats) -> None:
        """They are never changed, but others take their place. path_and_biases: [1 + max_depth] what the log-probability of the
        path above is multiplied by, and what is added at depths 1, 2, ... and deeper."""
        self.weights = weights
        self.path_and_biases = np.concatenate((weights[PATH : PATH + 1], weights[NUM_SHARED:]))

    def observe(self, nodes: VerifiedNodes) -> None:
        """What a step has verified. Little happens until there is enough for a fit: a step takes a few milliseconds."""
        self._unread.append(nodes)
        self._num_unfitted += int(np.count_nonzero(nodes.is_asked))
        if self._num_unfitted >= self._num_due:
            self._read()
            self._num_unfitted, self._num_due = 0, min(FIT_EVERY, 2 * self._num_due)
            self._fit()

    def _read(self) -> None:
        """Those whose parents were chosen are remembered, all count for the calibration."""
        if not self._unread:
            return
        log_probs, scores, depths, temperatures, chances, labels, is_asked = map(np.concatenate, zip(*self._unread, strict=True))
        self._unread = []
        self._calibration.add(chances, np.exp(scores), labels)
        inputs = self.inputs(log_probs, scores - log_probs, depths, temperatures)[is_asked]
        rows = (self._num_seen + np.arange(len(inputs))) % NUM_REMEMBERED
        self._inputs[rows], self._labels[rows] = inputs, labels[is_asked]
        self._num_seen += len(inputs)

    def _fit(self) -> None:
        """The weights are new ones then."""
        inputs, labels = self._inputs[: self._num_seen], self._labels[: self._num_seen]
        self._use(most_probable(inputs, labels, self.weights, self._start, self._precision))


def most_probable(inputs: Floats, labels: Floats, weights: Floats, start: Floats, precision: Floats) -> Floats:
    """[W] weights of a logistic function that make labels [M] of inputs [M, W] likelier than these ones do, under a normal prior
    around `start` with the inverse covariance `precision`: some of Newton's steps towards the maximum a posteriori."""

    def loss(weights: Floats) -> float:
        logits, difference = inputs @ weights, weights - start
        return float((np.logaddexp(0.0, logits) - labels * logits).sum() + 0.5 * difference @ precision @ difference)

    weights, least = weights.copy(), loss(weights)
    for _ in range(NUM_NEWTON_STEPS):
        p = logistic(inputs @ weights)
        gradient = inputs.T @ (p - labels) + precision @ (weights - start)
        curvature = (inputs * (p * (1 - p))[:, None]).T @ inputs + precision
        step = np.linalg.solve(curvature, gradient)
        # Where a head is sure and wrong there is hardly any curvature: whole steps would go too far, and farther each time.
        shorter = (weights - step / 2**halvings for halvings in range(MOST_HALVINGS))
        weights, least = next(((own, new) for own in shorter if (new := loss(own)) < least), (weights, least))
    return weights


class Drift:
    """By how many logits nodes are accepted more often lately than the estimator says: texts change within a few requests, and
    weights, which say what is true of all texts, follow slowly. Every step with drafts tells."""

    def __init__(self) -> None:
        self.logits, self._information = 0.0, DRIFT_HELD_BY

    def move(self, num_accepted: float, expected: float, variance: float) -> None:
        """So many nodes were accepted where `expected` were, with this variance: a step of Newton's method, held to nothing by a
        normal prior, in which earlier steps fade."""
        earlier = DRIFT_MEMORY * (self._information - DRIFT_HELD_BY)
        self._information = DRIFT_HELD_BY + earlier + variance
        self.logits += (num_accepted - expected - (1.0 - DRIFT_MEMORY) * DRIFT_HELD_BY * self.logits) / self._information
        self.logits = min(MOST_DRIFT, max(-MOST_DRIFT, self.logits))


def prior_precision(max_depth: int) -> Floats:
    """[W, W] the inverse covariance of the weights' prior: biases of depths move together, more than each by itself."""
    precision = np.diag([*SHARED_STRENGTHS, *[0.0] * max_depth])
    covariance = np.full((max_depth, max_depth), 1 / ALIKE_STRENGTH) + np.eye(max_depth) / DEPTH_STRENGTH
    precision[NUM_SHARED:, NUM_SHARED:] = np.linalg.inv(covariance)
    return precision


def logits_of(log_probs: Floats) -> Floats:
    """log(p / (1 - p)) of log(p), no larger than is worth telling apart."""
    log_probs = np.minimum(np.maximum(log_probs, LEAST_LOG_PROB), MOST_LOG_PROB)
    return log_probs - np.log(-np.expm1(log_probs))


def logistic(logits: Floats) -> Floats:
    """1 / (1 + exp(-logits)), which overflows for no logit."""
    return 0.5 + 0.5 * np.tanh(0.5 * logits)
