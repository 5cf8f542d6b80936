"""What the parts of a step cost, in milliseconds: measured, and corrected while running."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle_rt.speculate.forest import Floats

# The parts: `start` catches the head up and drafts the first level, `level` drafts a further one, `verify` is all that follows.
PARTS = ("start", "level", "verify")
CORRECTION_RATE = 0.1
LARGEST_CORRECTION = 4.0


@dataclass(frozen=True)
class Observation:
    """One part of one step: its sequences, its rows of all of them together, and its milliseconds."""

    part: str
    batch_size: int
    num_rows: int
    ms: float


@dataclass
class PartCost:
    """ms = batch_size * per_sequence + a function of the rows that is linear between the knots, and past the last two as between
    them.

    `corrections` holds the moving ratio of measured to predicted by (batch size, mean context), both as powers of two.
    """

    knots: list[float]
    values: list[float]
    per_sequence: float
    corrections: dict[tuple[int, int], float] = field(default_factory=dict)

    def ms(self, batch_size: int, num_rows: Floats | float, context: float) -> Floats:
        knots, values = self.knots, self.values
        rows = np.asarray(num_rows, dtype=np.float64)
        by_rows = np.interp(rows, knots, values)
        if len(knots) > 1:
            slope = max(0.0, (values[-1] - values[-2]) / (knots[-1] - knots[-2]))
            by_rows = by_rows + slope * np.maximum(0.0, rows - knots[-1])
        return (batch_size * self.per_sequence + by_rows) * self.corrections.get(
            bucket(batch_size, context), self._nearest(batch_size)
        )

    def correct(self, observation: Observation, context: float) -> None:
        """Move the ratio of this batch size and context towards what was measured."""
        key = bucket(observation.batch_size, context)
        current = self.corrections.get(key, self._nearest(observation.batch_size))
        predicted = float(self.ms(observation.batch_size, observation.num_rows, context)) / current
        ratio = min(LARGEST_CORRECTION, max(1 / LARGEST_CORRECTION, observation.ms / max(predicted, 1e-6)))
        self.corrections[key] = current + CORRECTION_RATE * (ratio - current)

    def _nearest(self, batch_size: int) -> float:
        """The correction of the nearest batch size that has one; contexts do not matter for want of better."""
        wanted = batch_size.bit_length()
        return min(self.corrections.items(), key=lambda item: abs(item[0][0] - wanted), default=((0, 0), 1.0))[1]


def bucket(batch_size: int, context: float) -> tuple[int, int]:
    return batch_size.bit_length(), int(context).bit_length()


def fitted_cost(observations: Iterable[Observation]) -> PartCost:
    """The least squares fit to measurements of one part, of which at least one is needed; more rows never cost less."""
    points = list(observations)
    largest = max(point.num_rows for point in points)
    knots = [2.0**power for power in range(largest.bit_length()) if 2**power < largest] + [float(largest)]
    rows = np.array([point.num_rows for point in points], dtype=np.float64)
    batch_sizes = np.array([point.batch_size for point in points], dtype=np.float64)
    hats = np.stack([np.interp(rows, knots, unit) for unit in np.eye(len(knots))], axis=1)
    ms = np.array([point.ms for point in points])
    # A little weight keeps batch and rows apart where they were never measured apart.
    # Relative errors count, so that small steps are met as well as large ones.
    design = np.concatenate((hats, batch_sizes[:, None]), axis=1) / ms[:, None]
    smooth = second_differences(knots, design.shape[1])
    system = design.T @ design + smooth.T @ smooth / ms.mean() ** 2 + 1e-9 * np.eye(design.shape[1])
    solution = np.linalg.solve(system, design.sum(axis=0))
    per_sequence = max(0.0, float(solution[-1]))
    values = np.maximum.accumulate(np.maximum(solution[:-1], 1e-6))
    return PartCost(knots, values.tolist(), per_sequence)


def second_differences(knots: list[float], width: int) -> Floats:
    """[len(knots) - 2, width] a weak wish that the slope changes little from knot to knot, which fills in what was not measured."""
    rows = np.zeros((max(0, len(knots) - 2), width))
    for index in range(len(rows)):
        left, right = knots[index + 1] - knots[index], knots[index + 2] - knots[index + 1]
        rows[index, index : index + 3] = 1 / left, -1 / left - 1 / right, 1 / right
    return 0.1 * rows


@dataclass
class StepCosts:
    """The cost of every part."""

    parts: dict[str, PartCost]

    def ms(self, part: str, batch_size: int, num_rows: Floats | float, context: float) -> Floats:
        return self.parts[part].ms(batch_size, num_rows, context)

    def correct(self, observation: Observation, context: float) -> None:
        self.parts[observation.part].correct(observation, context)

    def to_json(self) -> dict[str, Any]:
        return {
            name: {"knots": part.knots, "values": part.values, "per_sequence": part.per_sequence}
            for name, part in self.parts.items()
        }


def costs_from_json(document: dict[str, Any]) -> StepCosts:
    """Raises KeyError, TypeError or ValueError where it is not what `to_json` gives."""
    parts = {}
    for name in PARTS:
        part = document[name]
        knots, values = [float(knot) for knot in part["knots"]], [float(value) for value in part["values"]]
        if (
            not knots
            or len(knots) != len(values)
            or sorted(set(knots)) != knots
            or not np.isfinite(values).all()
            or min(values) <= 0
        ):
            raise ValueError(f"the costs of {name} are no table: {part}")
        parts[name] = PartCost(knots, values, float(part["per_sequence"]))
    return StepCosts(parts)


def fitted_costs(observations: list[Observation]) -> StepCosts:
    return StepCosts({name: fitted_cost(point for point in observations if point.part == name) for name in PARTS})
