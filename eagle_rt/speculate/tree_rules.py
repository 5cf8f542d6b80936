"""Trees by a rule of one's own: drawn in a file, or grown by a class that somebody has written.

Whatever a rule does changes what is accepted, never the text.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from eagle_rt.speculate.forest import Candidates, Ints
from eagle_rt.speculate.plug_ins import Trust, made_of
from eagle_rt.speculate.policy import DraftPlan, FixedPlan, FixedPolicy, StepRecord, best_of_each, can_grow
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree.paths import RankPath, read_paths, shape_of, within
from eagle_rt.tree_shape import TreeShape

NOTHING: Ints = np.zeros(0, dtype=np.int64)


class TreeRule(Protocol):
    """How the trees of a batch grow, and which of their nodes the target verifies; one rule serves all steps.

    What goes beyond the bounds of a sequence (`sequences[owner].bounds`) is left out, the lowest scores first. A rule may also have
    `learn(record: StepRecord)`, which is told what came of each step in which it was asked.
    """

    def expand(self, level: Candidates, sequences: Sequence[HostSequence]) -> Ints:
        """Of the M nodes that the head has scored last the places, ascending, under which it drafts another level; none ends the
        draft. The children of a node stand together, the likeliest first.

        level.values: [M] for the rule alone to write to; they hold what it wrote to those of the parents, and 1 under roots.
        """
        ...

    def keep(self, candidates: Candidates, sequences: Sequence[HostSequence]) -> Ints:
        """Of all nodes the numbers, ascending, of those that the target verifies; with each its parent."""
        ...


class StaticTree:
    """The same tree in every step, its nodes named by the ranks that lead to them. The value of a candidate is the number of the
    node that it is, the root's being 1, and 0 if it is none."""

    def __init__(self, paths: list[RankPath]) -> None:
        self.paths = paths
        numbers = {path: number for number, path in enumerate([(), *paths], start=1)}
        self._top_k = shape_of(paths).top_k
        self._children = np.zeros((len(numbers) + 1, self._top_k + 1), dtype=np.int64)  # the last column is for all higher ranks
        for path in paths:
            self._children[numbers[path[:-1]], path[-1]] = numbers[path]
        self._is_inner = np.array([row.any() for row in self._children])

    def expand(self, level: Candidates, sequences: Sequence[HostSequence]) -> Ints:
        ranks = np.minimum(ranks_of_siblings(level), self._top_k)
        numbers = self._children[level.values.astype(np.int64), ranks]
        level.values[:] = numbers
        return np.flatnonzero(self._is_inner[numbers])

    def keep(self, candidates: Candidates, sequences: Sequence[HostSequence]) -> Ints:
        return np.flatnonzero(candidates.values)


def ranks_of_siblings(level: Candidates) -> Ints:
    """[M] the place of each node of a level among the children of its parent, from 0 on."""
    is_first = np.ones(len(level), dtype=np.bool_)
    is_first[1:] = (level.owners[1:] != level.owners[:-1]) | (level.parents[1:] != level.parents[:-1])
    places = np.arange(len(level))
    return places - np.maximum.accumulate(np.where(is_first, places, 0))


class RuledPolicy(FixedPolicy):
    """Asks a rule. One that fails is told of and not asked again: EAGLE-2's own, by the numbers of the tree, is in its place."""

    def __init__(self, rule: TreeRule, max_batch_size: int | None) -> None:
        super().__init__(max_batch_size)
        self.rule, self.trust = rule, Trust(rule, "the rule that trees grow by has failed, and EAGLE-2's takes its place")

    @property
    def failure(self) -> str:
        return self.trust.failure

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        return FixedPlan(sequences) if self.failure else RuledPlan(sequences, self)


class RuledPlan(FixedPlan):
    def __init__(self, sequences: Sequence[HostSequence], policy: RuledPolicy) -> None:
        super().__init__(sequences)
        self._sequences, self._policy = sequences, policy
        # Of each sequence so many nodes may be expanded yet, since the head's cache has rows for them.
        self._num_left = np.array([own.bounds.num_scratch_rows if own.bounds else 0 for own in sequences])

    def expand(self, newest: Candidates) -> Ints:
        places = NOTHING
        with self._policy.trust.asking("expand"):
            places = checked(self._policy.rule.expand(newest, self._sequences), len(newest))
        places = np.intersect1d(places, can_grow(newest, self._bounds), assume_unique=True)
        places = best_of_each(replace(newest, values=newest.scores), places, self._num_left)
        self._num_left = self._num_left - np.bincount(newest.owners[places], minlength=len(self._num_left))
        return places

    def keep(self, candidates: Candidates) -> Ints:
        if self._policy.failure:
            return NOTHING
        numbers = NOTHING
        with self._policy.trust.asking("keep"):
            numbers = with_parents(checked(self._policy.rule.keep(candidates, self._sequences), len(candidates)), candidates)
        return best_of_each(replace(candidates, values=candidates.scores), numbers, self._bounds.most_drafts)

    def learn(self, record: StepRecord) -> None:
        if (learn := getattr(self._policy.rule, "learn", None)) and not self._policy.failure:
            with self._policy.trust.asking("learn"):
                learn(record)


def checked(places: Ints, count: int) -> Ints:
    """Raises ValueError if these are not places among so many, ascending."""
    places = np.asarray(places)
    if places.ndim != 1 or not (np.issubdtype(places.dtype, np.integer) or not len(places)):
        raise ValueError(f"it gave {places!r}, but must give an array of whole numbers")
    if len(places) and (places[0] < 0 or places[-1] >= count or (places[1:] <= places[:-1]).any()):
        raise ValueError(f"it gave {places}, but must give numbers from 0 to {count - 1}, ascending")
    return places.astype(np.int64)


def with_parents(numbers: Ints, candidates: Candidates) -> Ints:
    """Raises ValueError if the parent of one of them is not among them."""
    if len(orphans := numbers[~np.isin(candidates.parents[numbers], [-1, *numbers])]):
        raise ValueError(f"node {orphans[0]} is kept, but not its parent {candidates.parents[orphans[0]]}")
    return numbers


def load_rule(name: str, shape: TreeShape) -> TreeRule:
    """name: as `--speculative-tree` takes it; shape: what a tree that is drawn is cut to.

    Raises:
        ValueError: there is no such tree or class, or it is no rule.
    """
    if name.endswith(".json"):
        return StaticTree(within(read_paths(name), shape))
    return made_of("--speculative-tree", name, ("expand", "keep"))
