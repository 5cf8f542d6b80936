"""Drafting with a head where the host decides, level by level, what is drafted; and keeping the head's cache for it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.batch import Batch, HostRows, slots_at
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels.dispatch import compiled_kernel
from eagle_rt.models.heads.base import DraftHead
from eagle_rt.speculate.costs import Observation
from eagle_rt.speculate.forest import Bools, Candidates, Ints, joined
from eagle_rt.speculate.head_rows import HeadRowsBook
from eagle_rt.speculate.policy import DraftPlan, bounds_of
from eagle_rt.speculate.sampler import SamplingBatch, coupled_logits
from eagle_rt.speculate.sequences import HostSequence, packed_scratch_batch
from eagle_rt.tree.expand import top_children


@dataclass
class Draft:
    """What was drafted in one step. observations: what that took, up to `end`, in seconds of the clock; is_broken: [B] the head
    gave no numbers."""

    candidates: Candidates
    observations: list[Observation]
    end: float
    is_broken: Bools


@dataclass(frozen=True)
class FedRows:
    """What the head has been fed last: T drafted nodes, or texts at first.

    states: [T, H] after them; seen: [T, C] which of its sequence's fed nodes each sees; paths: [T, D] their tokens.
    """

    states: Tensor
    seen: Bools
    paths: Ints


@dataclass(frozen=True)
class Wanted:
    """What a draft is made for. top_ks, num_cached: [B] of the sequences."""

    sampling: SamplingBatch
    top_ks: Ints
    num_cached: Ints


class HostDrafter:
    """The head, its cache, and how far it has read each text.

    sharpness: of the scores of drafts, see `tree.expand.top_children`. couples: guesses for sampled requests are ranked under the
    target's noise.
    """

    def __init__(self, head: DraftHead, pool: KVPool, backend: AttentionBackend, *, sharpness: float, couples: bool) -> None:
        self.head, self.pool, self.rows = head, pool, HeadRowsBook()
        self._backend, self._sharpness, self._couples = backend, sharpness, couples
        self._target_ids = head.token_map.target_ids

    def catch_up(self, sequences: Sequence[HostSequence]) -> Tensor:
        """Let the head read all that waits for it: the states [len(sequences), H] after each text's last certain token."""
        behind = [sequence for sequence in sequences if self.rows[sequence.id].num_waiting]
        if behind:
            states = self._read_on(behind)
            if len(behind) == len(sequences):
                return states
        return torch.stack([state for sequence in sequences if (state := self.rows[sequence.id].state) is not None])

    def draft(
        self, sequences: list[HostSequence], sampling: SamplingBatch, plan: DraftPlan, start: float, mark: Callable[[str], None]
    ) -> Draft:
        """Grow trees level by level, for as long as the plan wants.

        The rows that the head is fed live in a sequence's scratch rows, in the order they were fed; each sees the text and its own
        ancestors. start: of the step, in seconds of the clock; `mark` is told when the head has caught up.
        """
        batch_size, drafters = len(sequences), np.array(plan.drafters)
        own = [sequences[index] for index in plan.drafters]
        num_missing = sum(self.rows[sequence.id].num_waiting for sequence in own)
        widths = bounds_of(tuple(sequence.bounds for sequence in sequences)).top_ks
        wanted = Wanted(sampling, widths, np.array([sequence.num_cached for sequence in sequences]))
        nothing = np.zeros((len(own), 0), dtype=np.int64)
        fed = FedRows(self.catch_up(own), nothing.astype(np.bool_), nothing)
        mark("extend")
        level, above = self._children(wanted, fed, drafters, np.full(len(own), -1), None)
        now = time.perf_counter()
        observations = [Observation("start", len(own), num_missing, 1000 * (now - start))]
        is_broken = np.zeros(batch_size, dtype=np.bool_)
        is_broken[drafters] = True
        is_broken[level.owners] = False

        levels, num_before, num_fed = [level], 0, np.zeros(batch_size, dtype=np.int64)
        while len(places := plan.expand(level)):
            chosen, numbers = level[places], num_before + places
            counts = np.bincount(chosen.owners, minlength=batch_size)
            fed = self._feed(sequences, fed, chosen, above[places], counts, num_fed)
            num_before += len(level)
            level, above = self._children(wanted, fed, chosen.owners, numbers, chosen)
            levels.append(level)
            then, now = now, time.perf_counter()
            observations.append(Observation("level", int(np.count_nonzero(counts)), len(numbers), 1000 * (now - then)))
        return Draft(joined(levels), observations, now, is_broken)

    def _read_on(self, sequences: Sequence[HostSequence]) -> Tensor:
        ids = [sequence.id for sequence in sequences]
        starts = [self.rows[own].num_made for own in ids]
        features = self.rows.take(ids)
        stops = [self.rows[own].num_made for own in ids]
        spans = list(zip(sequences, starts, stops, strict=True))
        positions = [np.arange(start, stop) for _, start, stop in spans]
        batch = Batch(
            tokens=self._tensor([token for own, start, stop in spans for token in own.text[start + 1 : stop + 1]]),
            positions=self._tensor(np.concatenate(positions)),
            slots=self._tensor(
                np.concatenate([slots_at(own.slots, places) for own, places in zip(sequences, positions, strict=True)])
            ),
            query_starts=tuple(accumulate(map(len, positions), initial=0)),
            rows=HostRows(tuple(stops), tuple(own.slots[:stop] for own, _, stop in spans)),
            tree_mask=None,
        )
        states = self.head.forward(batch.tokens, self.head.fuse(features), batch, self.pool, self._backend)
        states = states if len(states) == len(sequences) else states[[stop - 1 for stop in batch.query_starts[1:]]]
        for sequence_id, state in zip(ids, states, strict=True):
            self.rows[sequence_id].state = state
        return states

    def _feed(
        self, sequences: list[HostSequence], fed: FedRows, chosen: Candidates, parent_rows: Ints, counts: Ints, num_fed: Ints
    ) -> FedRows:
        """One pass of the head over the `chosen` nodes, children of those in these rows of the last one, sequence by sequence,
        counts [B] of each, in rows that follow the num_fed [B] ones before."""
        rows = np.arange(len(chosen))
        places = rows + (num_fed - counts.cumsum() + counts)[chosen.owners]
        num_seen = fed.seen.shape[1]
        visible = np.zeros((len(chosen), max(int(places.max()) + 1, num_seen)), dtype=np.bool_)
        visible[:, :num_seen] = fed.seen[parent_rows]
        visible[rows, places] = True
        num_fed += counts
        owners = np.flatnonzero(counts)
        own = [sequences[owner] for owner in owners.tolist()]
        in_use = num_fed[owners].tolist()
        device = self.pool.device
        batch = packed_scratch_batch(
            own, counts[owners].tolist(), in_use, chosen.tokens, chosen.depths - 1, places, visible, device
        )
        states = fed.states[self._tensor(parent_rows)]
        paths = np.concatenate((fed.paths[parent_rows], chosen.tokens[:, None]), axis=1)
        return FedRows(self.head.forward(batch.tokens, states, batch, self.pool, self._backend), visible, paths)

    def _children(
        self, wanted: Wanted, fed: FedRows, owners: Ints, numbers: Ints, parents: Candidates | None
    ) -> tuple[Candidates, Ints]:
        """Of T nodes, or roots, of these owners and numbers: the best children, no more of a sequence's than its top-k, none where
        the head gives no numbers; and which of the T each is below."""
        depth = int(parents.depths[0]) if parents else 0
        widths = wanted.top_ks[owners]
        top_k = int(widths.max())
        logits = self._logits(fed, wanted.sampling, owners, wanted.num_cached[owners] + depth)
        log_probs, draft_tokens = best_children(logits, top_k, self._sharpness)
        above = np.arange(len(owners)).repeat(top_k)
        own, tokens = as_numpy(log_probs).ravel().astype(np.float64), as_numpy(self._target_ids[draft_tokens]).ravel()
        is_child = own > -np.inf
        if widths.min() < top_k:
            is_child &= (np.arange(top_k) < widths[:, None]).ravel()
        if not is_child.all():
            above, own, tokens = above[is_child], own[is_child], tokens[is_child]
        scores = own if parents is None else parents.scores[above] + own
        depths = np.full(len(own), depth + 1)
        values = np.ones_like(own) if parents is None else parents.values[above]
        return Candidates(owners[above], tokens, numbers[above], depths, own, scores, values), above

    def _logits(self, fed: FedRows, sampling: SamplingBatch, owners: Ints, positions: Ints) -> Tensor:
        """[T, W] draft logits after nodes of `owners` that stand at `positions`, as the target will look at its own: judged, and
        under the noise where that is drawn."""
        logits = self.head.logits(fed.states)
        if sampling.changes_logits:
            logits = sampling.judged(logits, self._tensor(owners), self._tensor(fed.paths), self.head.token_map)
        if not self._couples or len(sampling.sampled) == 0:
            return logits
        rows = sampling.rows(self._tensor(owners))
        return coupled_logits(logits[:, None], self._tensor(positions)[:, None], rows, self._target_ids)[:, 0]

    def _tensor(self, values: Ints | Sequence[int]) -> Tensor:
        return torch.as_tensor(values, device=self.pool.device)


def best_children(logits: Tensor, top_k: int, sharpness: float) -> tuple[Tensor, Tensor]:
    """`tree.expand.top_children` by the kernel that is for this device, if there is one."""
    if kernel := compiled_kernel("top_children", logits, logits.dtype):
        return kernel(logits.contiguous(), top_k, sharpness)
    return top_children(logits, top_k, sharpness)


def as_numpy(tensor: Tensor) -> NDArray:
    return tensor.cpu().numpy()
