"""What the parts of a step cost, in milliseconds: measured, and corrected while running."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from eagle_rt.kernels.packed_linear import NO_TILES, RowTiles
from eagle_rt.speculate.compiled_costs import part_ms
from eagle_rt.speculate.corrections import NO_DIFFERENCES, Correction, Machine, RowDifferences
from eagle_rt.speculate.forest import Floats, Ints

# The parts: `start` catches the head up and drafts the first level, `level` drafts a further one, `verify` is all that follows.
PARTS = ("start", "level", "verify")
# Where copies alone are verified: steps that verify nothing.
PLAIN = "plain"
# Costs of single sizes that are remembered; and measurements that wait until somebody asks what something costs.
MOST_KNOWN, MOST_WAITING = 4096, 1024
# Rows up to so many are filled up.
MOST_FILLED_UP = 16384


@dataclass(frozen=True)
class Observation:
    """One part of one step: its sequences, its rows of all of them together, and its milliseconds."""

    part: str
    batch_size: int
    num_rows: int
    ms: float


@dataclass(frozen=True)
class Conditions:
    """What the cost of a step depends on besides its rows. context: mean cached rows of a sequence; is_sampled: whether tokens are
    drawn for any of them, which takes noise for every token of the vocabulary."""

    batch_size: int
    context: float
    is_sampled: bool

    @cached_property
    def size(self) -> int:
        """About the same for batches of about the same size: powers of two, which most full batches are, lie in the middle."""
        return round(math.log2(self.batch_size))

    @property
    def load(self) -> tuple[int, bool]:
        """Those that differ in their texts only."""
        return self.batch_size, self.is_sampled

    @cached_property
    def kind(self) -> tuple[int, bool]:
        """Those whose steps come to about the same."""
        return self.size, self.is_sampled

    @cached_property
    def bucket(self) -> tuple[int, int, bool]:
        """Those that cost about the same."""
        return self.size, int(self.context).bit_length(), self.is_sampled


@dataclass
class PartCost:
    """ms = batch_size * per_sequence + a function of the rows that is linear between the knots, and past the last two as between
    them; times a correction for the conditions. tiles: with which rows are filled up."""

    knots: list[float]
    values: list[float]
    per_sequence: float
    tiles: RowTiles = NO_TILES
    corrections: dict[tuple[int, int, bool], Correction] = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine, repr=False, compare=False)
    # Of corrections, for each `Conditions.kind`.
    _row_differences: dict[tuple[int, bool], RowDifferences] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Of single sizes: rows filled up, and uncorrected milliseconds.
    _known: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def ms(self, num_sequences: Ints | int, num_rows: Floats | float, conditions: Conditions) -> Floats:
        """Of a part with so many sequences and rows, in a step of these conditions."""
        correction = self.corrections.get(conditions.bucket) or self._nearest(conditions)
        corrected = (correction.of_all_rows, correction.rows.means) if correction else (0.0, NO_DIFFERENCES)
        return self._ms(num_sequences, num_rows, *corrected)

    def _ms(self, num_sequences: Ints | int, num_rows: Floats | float, correction: float, differences: Floats) -> Floats:
        sequences, rows = (np.asarray(numbers, dtype=np.float64) for numbers in (num_sequences, num_rows))
        table, curve = all_filled_up(self.tiles), (np.array(self.knots), np.array(self.values))
        ms = part_ms(sequences.ravel(), rows.ravel(), table, *curve, self.per_sequence, correction, differences)
        return ms.reshape(rows.shape)

    def correct(self, observation: Observation, conditions: Conditions) -> None:
        """Move the ratio for these conditions and rows towards what was measured."""
        correction = self.corrections.get(conditions.bucket)
        if correction is None:
            correction = Correction(self.machine, self._rows_of(conditions), self._nearest(conditions))
            self.corrections[conditions.bucket] = correction
        size = observation.batch_size, observation.num_rows
        if len(self._known) == MOST_KNOWN:
            self._known.clear()
        if size not in self._known:
            expected = float(self._ms(observation.batch_size, observation.num_rows, 0.0, NO_DIFFERENCES))
            self._known[size] = self.tiles.filled_up(observation.num_rows), max(1e-6, expected)
        num_rows, expected = self._known[size]
        correction.move(num_rows, expected, observation.ms)

    def as_measured(self) -> "PartCost":
        """The same without what was learned."""
        return PartCost(list(self.knots), list(self.values), self.per_sequence, self.tiles)

    def _rows_of(self, conditions: Conditions) -> RowDifferences:
        """What numbers of rows differ by there: in batches of another size so many rows are more of a tree, or less. Steps that
        draw tokens begin as greedy ones; what drawing adds says nothing of these."""
        size, is_sampled = conditions.kind
        if conditions.kind not in self._row_differences:
            greedy = self._row_differences.get((size, False)) if is_sampled else None
            self._row_differences[conditions.kind] = RowDifferences(self.machine, greedy)
        return self._row_differences[conditions.kind]

    def _nearest(self, conditions: Conditions) -> Correction | None:
        """That of the most similar conditions that were met. What drawing tokens adds says nothing about greedy steps."""
        wanted = conditions.bucket
        met = [bucket for bucket in self.corrections if conditions.is_sampled or not bucket[2]]

        def distance(other: tuple[int, int, bool]) -> int:
            return 8 * (other[2] != wanted[2]) + 4 * abs(other[0] - wanted[0]) + abs(other[1] - wanted[1])

        return self.corrections[min(met, key=distance)] if met else None


def filled_up(rows: Floats, tiles: RowTiles) -> Floats:
    """As many rows as cost what so many do."""
    table = all_filled_up(tiles)
    return table[np.minimum(np.ceil(rows), len(table) - 1).astype(np.int64)] if len(table) else rows


@cache
def all_filled_up(tiles: RowTiles) -> Floats:
    """0, 1, 2, ... rows; empty where they count as they are."""
    if tiles == NO_TILES:
        return np.zeros(0)
    return np.array([tiles.filled_up(num_rows) for num_rows in range(MOST_FILLED_UP)], dtype=np.float64)


def fitted_cost(observations: Iterable[Observation], tiles: RowTiles = NO_TILES, jump_after: int | None = None) -> PartCost:
    """The least squares fit to measurements of one part, of which at least one is needed; more rows never cost less. jump_after: so
    many rows may cost clearly less than one more, of which each is measured."""
    points = list(observations)
    rows = filled_up(np.array([point.num_rows for point in points], dtype=np.float64), tiles)
    largest = int(rows.max())
    powers: Floats = np.exp2(np.arange(largest.bit_length(), dtype=np.float64))
    knots = sorted({*filled_up(powers, tiles).clip(max=largest).tolist(), float(largest)})
    if jump_after and {jump_after, jump_after + 1} <= set(rows.tolist()):
        knots = sorted({*knots, float(jump_after), jump_after + 1.0})
    batch_sizes = np.array([point.batch_size for point in points], dtype=np.float64)
    hats = np.stack([np.interp(rows, knots, unit) for unit in np.eye(len(knots))], axis=1)
    ms = np.array([point.ms for point in points])
    # Unknown are what the first knot costs, what each further one adds, and what a sequence adds. Relative errors count, so that
    # small steps are met as well as large ones.
    sums = np.tril(np.ones((len(knots), len(knots))))
    design = np.concatenate((hats @ sums, batch_sizes[:, None]), axis=1) / ms[:, None]
    smooth = np.pad(second_differences(knots) @ sums, ((0, 0), (0, 1)))
    system = design.T @ design + smooth.T @ smooth / ms.mean() ** 2 + 1e-9 * np.eye(design.shape[1])
    *steps, per_sequence = solved_without_negatives(system, design.sum(axis=0)).tolist()
    values = np.maximum(np.cumsum(steps), 1e-6)
    return PartCost(knots, values.tolist(), per_sequence, tiles)


def solved_without_negatives(system: Floats, right: Floats) -> Floats:
    """x of system @ x = right, where those unknowns that would be negative are 0, the most negative one first."""
    is_free = np.ones(len(right), dtype=np.bool_)
    while True:
        solution = np.zeros(len(right))
        solution[is_free] = np.linalg.solve(system[np.ix_(is_free, is_free)], right[is_free])
        if (solution >= 0).all():
            return solution
        is_free[solution.argmin()] = False


def second_differences(knots: list[float]) -> Floats:
    """[len(knots) - 2, len(knots)] a weak wish that the slope changes little from knot to knot, which fills in what was not
    measured."""
    rows = np.zeros((max(0, len(knots) - 2), len(knots)))
    for index in range(len(rows)):
        left, right = knots[index + 1] - knots[index], knots[index + 2] - knots[index + 1]
        rows[index, index : index + 3] = 1 / left, -1 / left - 1 / right, 1 / right
    return 0.1 * rows


@dataclass
class StepCosts:
    """The cost of every part, on one machine."""

    parts: dict[str, PartCost]
    _waiting: list[tuple[Observation, Conditions]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        machine = Machine()
        for part in self.parts.values():
            part.machine = machine

    def filled_up(self, num_rows: Floats) -> Floats:
        """As many rows as cost what num_rows do."""
        return filled_up(num_rows, self.parts["verify"].tiles)

    def ms(self, part: str, num_sequences: Ints | int, num_rows: Floats | float, conditions: Conditions) -> Floats:
        for observation, then in self._waiting:
            self.parts[observation.part].correct(observation, then)
        self._waiting.clear()
        return self.parts[part].ms(num_sequences, num_rows, conditions)

    def correct(self, observation: Observation, conditions: Conditions) -> None:
        """Learn from it, but not before it matters: many at once take a fraction of what each takes right after a pass."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append((observation, conditions))

    def of_verifying(self) -> "CopyCosts":
        """Those of verifying as they were measured, for steps in which nothing else takes any time; what is learned of either says
        nothing of the other."""
        return CopyCosts.of(self.parts["verify"].as_measured())

    def to_json(self) -> dict[str, Any]:
        return {
            name: {"knots": part.knots, "values": part.values, "per_sequence": part.per_sequence, "tiles": asdict(part.tiles)}
            for name, part in self.parts.items()
        }


def costs_from_json(document: dict[str, Any]) -> StepCosts:
    """Raises KeyError, TypeError or ValueError where it is not what `to_json` gives."""
    parts = {}
    for name in PARTS:
        part = document[name]
        knots, values = [float(knot) for knot in part["knots"]], [float(value) for value in part["values"]]
        tiles, per_sequence = RowTiles(int(part["tiles"]["size"]), int(part["tiles"]["least"])), float(part["per_sequence"])
        if (
            not knots
            or len(knots) != len(values)
            or sorted(set(knots)) != knots
            or not np.isfinite([*knots, *values, per_sequence]).all()
            or min(values) <= 0
            or per_sequence < 0
            or tiles.size < 1
            or tiles.least < 0
        ):
            raise ValueError(f"the costs of {name} are no table: {part}")
        parts[name] = PartCost(knots, values, per_sequence, tiles)
    return StepCosts(parts)


def fitted_costs(observations: list[Observation], tiles: RowTiles = NO_TILES, jump_after: int | None = None) -> StepCosts:
    by_part = {name: [point for point in observations if point.part == name] for name in PARTS}
    # Of trees of one level nobody asks what further ones cost: it is believed to be what the first one does.
    by_part["level"] = by_part["level"] or by_part["start"]
    return StepCosts({name: fitted_cost(own, tiles, jump_after if name == "verify" else None) for name, own in by_part.items()})


class CopyCosts(StepCosts):
    """Where nothing takes any time but verifying. What plain steps take and what others do is learned apart: what both have in
    common would be that of steps with copies, which are most, and plain ones would look as dear as those are off."""

    @classmethod
    def of(cls, verify: PartCost) -> "CopyCosts":
        nothing = {name: PartCost([1.0], [1e-6], 0.0) for name in PARTS}
        costs = cls({**nothing, "verify": verify, PLAIN: verify.as_measured()})
        costs.parts[PLAIN].machine = Machine()
        return costs

    def ms(self, part: str, num_sequences: Ints | int, num_rows: Floats | float, conditions: Conditions) -> Floats:
        ms = super().ms(part, num_sequences, num_rows, conditions)
        if part != "verify":
            return ms
        return np.where(np.equal(num_rows, num_sequences), super().ms(PLAIN, num_sequences, num_rows, conditions), ms)

    def correct(self, observation: Observation, conditions: Conditions) -> None:
        is_plain = observation.num_rows == observation.batch_size
        super().correct(replace(observation, part=PLAIN) if is_plain else observation, conditions)


def fitted_copy_costs(observations: list[Observation], tiles: RowTiles = NO_TILES, jump_after: int | None = None) -> CopyCosts:
    """Where there is no head."""
    return CopyCosts.of(fitted_cost(observations, tiles, jump_after))
