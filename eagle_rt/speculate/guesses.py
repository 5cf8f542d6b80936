"""What a head guesses after drafted nodes: level by level, as it is fed with them, or for all levels in one pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool
from eagle_rt.models.heads.base import DraftHead
from eagle_rt.speculate.forest import Bools, Candidates, Ints
from eagle_rt.speculate.sequences import HostSequence, packed_scratch_batch


@dataclass(frozen=True)
class Guesses:
    """After T nodes, or roots. logits: [R, W]; owners: [R] whose each of these is; rows: [T] which of them is each node's; paths:
    [T, D] the tokens of the way to each node."""

    logits: Tensor
    owners: Ints
    rows: Ints
    paths: Ints

    @property
    def of_each(self) -> Tensor:
        """[T, W]"""
        return self.logits[torch.as_tensor(self.rows, device=self.logits.device)]


class Levels(Protocol):
    """Made for each draft."""

    def roots(self) -> Guesses: ...

    def below(self, chosen: Candidates, parent_rows: Ints) -> Guesses:
        """Of `chosen` nodes, sequence by sequence, children of those in these rows of the last guesses."""
        ...


class FedLevels:
    """Of a head that is fed with the nodes of one level to guess the next.

    Its rows live in a sequence's scratch rows, in the order they were fed; each sees the text and its own ancestors. owners: [S]
    which of the sequences draft; states: [S, H] after their texts; forward: a pass of the head over tokens and states [T, H].
    """

    def __init__(
        self,
        head: DraftHead,
        sequences: list[HostSequence],
        owners: Ints,
        states: Tensor,
        forward: Callable[[Tensor, Tensor, Batch], Tensor],
    ) -> None:
        self._head, self._sequences, self._forward = head, sequences, forward
        self._owners, self._states = owners, states
        nothing = np.zeros((len(owners), 0), dtype=np.int64)
        # Of what was fed last: [T, C] which of its sequence's rows each sees, and [T, D] the tokens of the way to it.
        self._seen: Bools = nothing.astype(np.bool_)
        self._paths: Ints = nothing
        self._num_fed = np.zeros(len(sequences), dtype=np.int64)

    def roots(self) -> Guesses:
        return self._guesses()

    def below(self, chosen: Candidates, parent_rows: Ints) -> Guesses:
        rows = np.arange(len(chosen))
        counts = np.bincount(chosen.owners, minlength=len(self._sequences))
        places = rows + (self._num_fed - counts.cumsum() + counts)[chosen.owners]
        num_seen = self._seen.shape[1]
        visible = np.zeros((len(chosen), max(int(places.max()) + 1, num_seen)), dtype=np.bool_)
        visible[:, :num_seen] = self._seen[parent_rows]
        visible[rows, places] = True
        self._num_fed += counts
        owners = np.flatnonzero(counts)
        own = [self._sequences[owner] for owner in owners.tolist()]
        in_use, device = self._num_fed[owners].tolist(), self._states.device
        batch = packed_scratch_batch(
            own, counts[owners].tolist(), in_use, chosen.tokens, chosen.depths - 1, places, visible, device
        )
        states = self._states[torch.as_tensor(parent_rows, device=device)]
        self._states, self._seen, self._owners = self._forward(batch.tokens, states, batch), visible, chosen.owners
        self._paths = np.concatenate((self._paths[parent_rows], chosen.tokens[:, None]), axis=1)
        return self._guesses()

    def _guesses(self) -> Guesses:
        return Guesses(self._head.logits(self._states), self._owners, np.arange(len(self._owners)), self._paths)


def guess_blocks(
    head: DraftHead, sequences: Sequence[HostSequence], num_steps: int, pool: KVPool, backend: AttentionBackend
) -> Tensor:
    """The states [S, num_steps, H] of what stands after each text, of a head with blocks that has read it."""
    block, count = head.block, len(sequences)
    assert block
    size = block.num_rows(num_steps)
    tokens = np.full((count, size), block.mask_token)
    tokens[:, 0] = [sequence.text[-1] for sequence in sequences]
    places, visible, counts = np.tile(np.arange(size), count), np.ones((count * size, size), dtype=np.bool_), [size] * count
    batch = packed_scratch_batch(sequences, counts, counts, tokens.ravel(), places, places, visible, pool.device)
    states = head.guess_block(batch.tokens, batch, pool, backend)
    return states.unflatten(0, (count, size))[:, block.first_row :]


class LevelsAhead:
    """Of a head that drafts in parallel: what it guesses of a level is the same under all of a sequence's nodes.

    owners: [S] which sequences draft, ascending; states: [S, D, H] of their D levels.
    """

    def __init__(self, head: DraftHead, owners: Ints, states: Tensor) -> None:
        self._logits, self._owners = head.logits(states.flatten(0, 1)).unflatten(0, states.shape[:2]), owners
        self._paths = np.zeros((len(owners), 0), dtype=np.int64)

    def roots(self) -> Guesses:
        return Guesses(self._logits[:, 0], self._owners, np.arange(len(self._owners)), self._paths)

    def below(self, chosen: Candidates, parent_rows: Ints) -> Guesses:
        self._paths = np.concatenate((self._paths[parent_rows], chosen.tokens[:, None]), axis=1)
        rows = np.searchsorted(self._owners, chosen.owners)
        return Guesses(self._logits[:, self._paths.shape[1]], self._owners, rows, self._paths)


class PairedLevels(LevelsAhead):
    """Of one in which the token before has a say (DSpark): what it guesses differs from node to node, by their tokens alone. roots:
    [S] the last certain tokens."""

    def __init__(self, head: DraftHead, owners: Ints, states: Tensor, roots: Ints) -> None:
        super().__init__(head, owners, states)
        self._head, self._roots = head, roots

    def roots(self) -> Guesses:
        return self._after(self._roots, super().roots(), self._owners)

    def below(self, chosen: Candidates, parent_rows: Ints) -> Guesses:
        return self._after(chosen.tokens, super().below(chosen, parent_rows), chosen.owners)

    def _after(self, tokens: Ints, guesses: Guesses, owners: Ints) -> Guesses:
        logits = self._head.after(torch.as_tensor(tokens, device=guesses.logits.device), guesses.of_each)
        return Guesses(logits, owners, np.arange(len(tokens)), guesses.paths)
