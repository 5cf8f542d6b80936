"""Which trees a step drafts: what the host decides while it runs, and the simplest way to decide it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from eagle_rt.speculate.acceptance import Calibration
from eagle_rt.speculate.costs import Observation
from eagle_rt.speculate.forest import Candidates, Floats, Ints, ranks_within_owners
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

# The first steps without drafts take longer than those that follow, since drafts, or the asking for them, have filled the
# processor's caches: for so many milliseconds, and so many steps at most.
COLD_MS, MOST_COLD = 12.0, 6
# How many steps in a row without drafts a policy is told of at most, the latest.
MOST_RESTS = 1024


@dataclass(frozen=True)
class StepRecord:
    """What a step came to, for a policy to learn from.

    candidates: all nodes that were scored; kept: the numbers of those that were verified; is_accepted: gives [len(kept)] 1 for
    those that were accepted, which not every step is asked for. num_gained tokens, the bonus ones included; num_copied nodes were
    verified beside these, without which so many tokens would have been gained; parts: what each part cost, with those, in their
    order; between_ms: what passes after such a step before the next one; teaching_ms: what asking and learning take
    in steps that teach, beyond what they take in others.
    """

    candidates: Candidates
    kept: Ints
    is_accepted: Callable[[], Floats]
    num_gained: int
    parts: list[Observation]
    between_ms: float = 0.0
    teaching_ms: float = 0.0
    num_copied: int = 0

    @property
    def total_ms(self) -> float:
        return self.between_ms + sum(part.ms for part in self.parts)


@dataclass(frozen=True)
class Rests:
    """Steps in which nothing drafted, since one was decided on. steps: of how many sequences each was and its milliseconds, in
    their order; between_ms: what passes after such a step before the next one."""

    steps: list[tuple[int, float]]
    between_ms: float

    def observations(self, num_sequences: int, step_ms: float) -> list[Observation]:
        """Of what a plain step of so many takes among others, if that is believed to be about step_ms: of the first ones nothing,
        and of short ones the median of some in a row, since one in twenty of these takes a third longer. Steps of other numbers
        are few, while some leave and others come, and with caches full of the prompts that were read."""
        cold = num_cold(step_ms)
        times = [ms for size, ms in self.steps[cold:] if size == num_sequences]
        groups = [sorted(times[start : start + cold + 1]) for start in range(0, len(times), cold + 1)]
        return [Observation("verify", num_sequences, num_sequences, group[(len(group) - 1) // 2]) for group in groups]


def num_cold(step_ms: float) -> int:
    """Of steps without drafts that last so long, the first ones, which say nothing of the others."""
    return min(MOST_COLD, int(COLD_MS / step_ms))


class DraftPlan(Protocol):
    """The decisions of one step."""

    @property
    def drafters(self) -> list[int]:
        """Which sequences draft; the owners of candidates are numbers of sequences."""
        ...

    @property
    def teaches(self) -> bool:
        """Whether more is learned from this step than from most: learning takes longer then."""
        ...

    def expand(self, newest: Candidates) -> Ints:
        """Of the level that was scored last the places, ascending, under which another level is drafted; none ends the draft.

        Its values, those of the parents so far and 1 under roots, become what the nodes are worth: how likely they are to be
        accepted, on any scale that compares nodes; no child has more than its parent.
        """
        ...

    def keep(self, candidates: Candidates) -> Ints:
        """The numbers, ascending, of those that the target verifies; with each its parent."""
        ...

    def learn(self, record: StepRecord) -> None: ...


class TreePolicy(Protocol):
    """has_chances: whether the values of its plans' candidates say how likely each is to be accepted, and not only compare them."""

    has_chances: bool

    @property
    def calibration(self) -> Calibration | None:
        """How good its estimates of acceptance have been, if it makes any."""
        ...

    def rests(self, num_sequences: int) -> bool:
        """Asked before each step: whether one of so many sequences drafts nothing, whichever they are, so that no plan need be
        made."""
        ...

    def learn_rests(self, rests: Rests) -> None:
        """Told before each step that is decided on: all at once, since in each of them even a little would take long, with caches
        full of what the target has read."""
        ...

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        """num_missing: rows of each sequence that the head has to catch up with before it can draft."""
        ...

    def wants_drafts(self, batch_size: int, num_rows: int, is_sampled: bool) -> bool:
        """Whether a new sequence that makes them so many, with a prompt of num_rows, would probably draft, so that what was cached
        without the head's rows is of no use to it. is_sampled: its temperature is above 0."""
        ...

    @property
    def is_measuring(self) -> bool:
        """Whether what was decided on last is a step without any drafts, for what that takes."""
        ...

    def leaves_to_copies(self, sequences: Sequence[HostSequence], misses: Floats) -> bool:
        """Asked before each step with copies: whether no head need draft beside them. misses: [B] how likely one of the first
        tokens of each one's copy is to be wrong, 1 where there is none."""
        ...

    def keep_copies(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, kept: Ints) -> Ints:
        """The places, ascending, of those copied nodes that the target verifies beside what a head has drafted; with each those of
        its sequence that are likelier. kept: the owners of the nodes that are verified in any case."""
        ...

    def add_copied(self, sequences: Sequence[HostSequence]) -> None:
        """Told of each step in which copies alone were verified."""
        ...

    def forget(self, sequence_id: str) -> None:
        """A sequence has left."""
        ...


@dataclass(frozen=True)
class Bounds:
    """The largest trees of B sequences, [B] each; 0 where a sequence may not draft.

    num_steps: levels; top_ks: nodes of a level that are expanded, and children of a node; most_drafts: nodes besides the root that
    are verified.
    """

    num_steps: Ints
    top_ks: Ints
    most_drafts: Ints


@lru_cache(maxsize=256)
def bounds_of(shapes: tuple[TreeShape | None, ...]) -> Bounds:
    """Of sequences with these largest trees, None where one may not draft; made once for every combination."""
    own = [shape or NO_SPECULATION for shape in shapes]
    return Bounds(
        num_steps=np.array([shape.num_steps for shape in own]),
        top_ks=np.array([shape.top_k for shape in own]),
        most_drafts=np.array([shape.num_draft_tokens - 1 for shape in own]),
    )


def can_grow(newest: Candidates, bounds: Bounds) -> Ints:
    """Those of a level under which their sequences allow another one."""
    return (newest.depths < bounds.num_steps[newest.owners]).nonzero()[0]


def best_of_each(candidates: Candidates, numbers: Ints, limits: Ints) -> Ints:
    """Those of `numbers` with the highest values of their sequence, at most limits[owner] each; ascending."""
    if len(numbers) <= limits.min():
        return numbers
    owners = candidates.owners[numbers]
    if (np.bincount(owners, minlength=len(limits)) <= limits).all():
        return numbers
    return numbers[ranks_within_owners(owners, candidates.values[numbers]) < limits[owners]]


class FixedPolicy:
    """Every sequence that may draft drafts the tree that its bounds name, ranked by the head's probabilities alone.

    max_batch_size: larger batches are not drafted for.
    """

    has_chances, calibration, is_measuring = False, None, False

    def __init__(self, max_batch_size: int | None) -> None:
        self._max_batch_size = max_batch_size

    def wants_drafts(self, batch_size: int, num_rows: int, is_sampled: bool) -> bool:
        return self._max_batch_size is None or batch_size <= self._max_batch_size

    def rests(self, num_sequences: int) -> bool:
        return not self.wants_drafts(num_sequences, 0, is_sampled=False)

    def learn_rests(self, rests: Rests) -> None:
        pass

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        return FixedPlan(sequences)

    def leaves_to_copies(self, sequences: Sequence[HostSequence], misses: Floats) -> bool:
        return False

    def keep_copies(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, kept: Ints) -> Ints:
        return owners[:0]

    def add_copied(self, sequences: Sequence[HostSequence]) -> None:
        pass

    def forget(self, sequence_id: str) -> None:
        pass


class FixedPlan:
    teaches = False

    def __init__(self, sequences: Sequence[HostSequence]) -> None:
        shapes = tuple(sequence.bounds for sequence in sequences)
        self._bounds = bounds_of(shapes)
        self.drafters = [index for index, shape in enumerate(shapes) if shape]

    def expand(self, newest: Candidates) -> Ints:
        newest.values[:] = newest.scores
        return best_of_each(newest, can_grow(newest, self._bounds), self._bounds.top_ks)

    def keep(self, candidates: Candidates) -> Ints:
        return best_of_each(candidates, np.arange(len(candidates)), self._bounds.most_drafts)

    def learn(self, record: StepRecord) -> None:
        pass


# Of a step without drafts.
RESTING = FixedPlan(())
