"""The draft trees of a step while they grow, for a runtime that decides on the host: flat arrays, no padding.

The twin with fixed shapes, for steps that the host must not look into, is `tree/expand.py` with `tree/rerank.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Choose = Callable[[list[int]], list[int]]


@dataclass(frozen=True)
class Candidates:
    """Nodes scored at one depth, or at all depths so far; every parent comes before its children.

    owners: [M] which sequence each belongs to, ascending where depths are the same; tokens: [M] target ids; parents: [M] numbers of
    candidates, which are counted from the first level on, -1 under the root; depths: [M], from 1; log_probs: [M] of the head, given
    the parent; scores: [M] their sums along the path; values: [M] what the policy that grows the trees says of them,
    and of their parents until it has been asked.
    """

    owners: Ints
    tokens: Ints
    parents: Ints
    depths: Ints
    log_probs: Floats
    scores: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, chosen: Ints | Bools | slice) -> "Candidates":
        return Candidates(*(column[chosen] for column in self.columns))

    @property
    def columns(self) -> tuple[NDArray, ...]:
        return (self.owners, self.tokens, self.parents, self.depths, self.log_probs, self.scores, self.values)


def joined(levels: list[Candidates]) -> Candidates:
    """The candidates of all levels, from the top."""
    return Candidates(*map(np.concatenate, zip(*(level.columns for level in levels), strict=True)))


def ranks_within_owners(owners: Ints, keys: Floats) -> Ints:
    """[M] the place of each entry among those of its owner, by descending key; the earlier goes first where keys are the same."""
    order = np.lexsort((-keys, owners))
    sorted_owners = owners[order]
    starts = np.searchsorted(sorted_owners, sorted_owners)
    ranks = np.empty(len(owners), dtype=np.int64)
    ranks[order] = np.arange(len(owners)) - starts
    return ranks


@dataclass(frozen=True)
class PackedTrees:
    """The trees of B sequences, one after the other, for one pass over all their nodes.

    starts: B + 1 row numbers; sequence b owns the rows starts[b] : starts[b + 1], its root first.
    tokens, depths: [T]; parents: [T] row numbers, -1 for a root; rows_of_chosen: the rows of the candidates that they were made of.
    """

    starts: tuple[int, ...]
    owners: Ints
    tokens: Ints
    parents: Ints
    depths: Ints
    rows_of_chosen: Ints

    @property
    def is_plain(self) -> bool:
        """Roots and nothing else."""
        return len(self.owners) == len(self.starts) - 1

    @cached_property
    def places(self) -> Ints:
        """[T] the number of each node in its own tree."""
        return np.arange(len(self.owners)) - np.asarray(self.starts)[self.owners]

    @cached_property
    def visible(self) -> Bools:
        """[T, largest tree] which nodes of its own tree each one sees: itself and all on the way up to the root."""
        visible = np.zeros((len(self.owners), int(self.places.max()) + 1), dtype=np.bool_)
        visible[np.arange(len(visible)), self.places] = True
        for depth in range(1, int(self.depths.max()) + 1):
            rows = np.flatnonzero(self.depths == depth)
            visible[rows] |= visible[self.parents[rows]]
        return visible

    @property
    def paths(self) -> Ints:
        """[T, D] the tokens on the way from below its root to each node, itself included, -1 past them."""
        paths = np.full((len(self.owners), int(self.depths.max())), -1, dtype=np.int64)
        for depth in range(1, paths.shape[1] + 1):
            rows = np.flatnonzero(self.depths == depth)
            paths[rows] = paths[self.parents[rows]]
            paths[rows, depth - 1] = self.tokens[rows]
        return paths

    def walk(self, choose: Choose) -> tuple[list[list[int]], list[list[int]]]:
        """For each sequence the rows from its root to the last node that the target's choices confirm, and those choices.

        choose: the target's choices after these rows. It is asked for one depth after the other, and only after accepted nodes,
        since drawing from a large vocabulary takes its time.
        """
        if self.is_plain:
            rows = list(range(len(self.owners)))
            return [[row] for row in rows], [[token] for token in choose(rows)]
        edges = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        children = {edge: row for row, edge in enumerate(edges)}
        paths: list[list[int]] = [[] for _ in self.starts[:-1]]
        choices: list[list[int]] = [[] for _ in paths]
        ends = dict(enumerate(self.starts[:-1]))  # where each sequence is that may go on
        while ends:
            chosen = choose(list(ends.values()))
            following = {}
            for (index, row), token in zip(ends.items(), chosen, strict=True):
                paths[index].append(row)
                choices[index].append(token)
                child = children.get((row, token))
                if child is not None:
                    following[index] = child
            ends = following
        return paths, choices


def pack(root_tokens: Ints, chosen: Candidates, numbers: Ints) -> PackedTrees:
    """Trees of the roots [B] and the chosen candidates.

    numbers: the numbers of the chosen ones among all candidates, ascending; with a node its parent is chosen too.
    """
    batch_size = len(root_tokens)
    counts = 1 + np.bincount(chosen.owners, minlength=batch_size)
    starts = np.concatenate(([0], counts.cumsum()))
    # Roots first and then by number, within each sequence.
    order = np.argsort(np.concatenate((np.arange(batch_size), chosen.owners)), kind="stable")
    row_of = np.empty(len(order), dtype=np.int64)
    row_of[order] = np.arange(len(order))
    parent_entry = np.where(chosen.parents < 0, chosen.owners, batch_size + np.searchsorted(numbers, chosen.parents))
    return PackedTrees(
        starts=tuple(starts.tolist()),
        owners=np.concatenate((np.arange(batch_size), chosen.owners))[order],
        tokens=np.concatenate((root_tokens, chosen.tokens))[order],
        parents=np.concatenate((np.full(batch_size, -1), row_of[parent_entry]))[order],
        depths=np.concatenate((np.zeros_like(root_tokens), chosen.depths))[order],
        rows_of_chosen=row_of[batch_size:],
    )
