"""Costs for tests of decisions."""

from eagle_rt.speculate.costs import PartCost, StepCosts


def costs(start: float, level: float, node: float) -> StepCosts:
    """Milliseconds of a first level, of a further one and of each verified node; a plain step takes 10."""
    parts = {name: PartCost([1.0, 2.0], [ms, ms + 1e-6], 0.0) for name, ms in (("start", start), ("level", level))}
    return StepCosts({**parts, "verify": PartCost([1.0, 101.0], [10.0, 10.0 + 100 * node], 0.0)})
