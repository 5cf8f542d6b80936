"""Costs for tests of decisions, and a step that has scored no nodes."""

import numpy as np

from eagle_rt.speculate.costs import Observation, PartCost, StepCosts
from eagle_rt.speculate.forest import Candidates
from eagle_rt.speculate.policy import StepRecord


def costs(start: float, level: float, node: float) -> StepCosts:
    """Milliseconds of a first level, of a further one and of each verified node; a plain step takes 10."""
    parts = {name: PartCost([1.0, 2.0], [ms, ms + 1e-6], 0.0) for name, ms in (("start", start), ("level", level))}
    return StepCosts({**parts, "verify": PartCost([1.0, 101.0], [10.0, 10.0 + 100 * node], 0.0)})


def no_candidates() -> Candidates:
    ints, floats = np.zeros(0, dtype=np.int64), np.zeros(0)
    return Candidates(ints, ints, ints, ints, floats, floats, floats)


def without_nodes(num_gained: int, parts: list[Observation], *, between_ms: float = 0.0, teaching_ms: float = 0.0) -> StepRecord:
    """A step that drafted, of whose nodes nothing shall be learned, only of what it gained and took."""
    kept = np.zeros(0, dtype=np.int64)
    return StepRecord(no_candidates(), kept, lambda: np.zeros(0), num_gained, parts, between_ms, teaching_ms)
