"""Drafting with a head where the host decides, level by level, what is drafted; and keeping the head's cache for it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

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
from eagle_rt.speculate.guesses import FedLevels, Guesses, Levels, LevelsAhead, PairedLevels, guess_blocks
from eagle_rt.speculate.head_rows import HeadRowsBook
from eagle_rt.speculate.policy import DraftPlan, bounds_of
from eagle_rt.speculate.sampler import SamplingBatch, coupled_logits
from eagle_rt.speculate.sequences import HostSequence
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
            states = self._read_on(behind)[:, 0]
            if len(behind) == len(sequences):
                return states
        return torch.stack([state for sequence in sequences if (state := self.rows[sequence.id].state) is not None])

    def draft(
        self, sequences: list[HostSequence], sampling: SamplingBatch, plan: DraftPlan, start: float, mark: Callable[[str], None]
    ) -> Draft:
        """Grow trees level by level, for as long as the plan wants.

        start: of the step, in seconds of the clock; `mark` is told when the head has caught up.
        """
        batch_size, drafters = len(sequences), np.array(plan.drafters)
        num_missing = sum(self.rows[sequences[index].id].num_waiting for index in plan.drafters)
        widths = bounds_of(tuple(sequence.bounds for sequence in sequences)).top_ks
        wanted = Wanted(sampling, widths, np.array([sequence.num_cached for sequence in sequences]))
        levels = self._levels(sequences, drafters)
        mark("extend")
        newest, above = self._children(wanted, levels.roots(), drafters, np.full(len(drafters), -1), None)
        now = time.perf_counter()
        observations = [Observation("start", len(drafters), num_missing, 1000 * (now - start))]
        is_broken = np.zeros(batch_size, dtype=np.bool_)
        is_broken[drafters] = True
        is_broken[newest.owners] = False

        drafted, num_before = [newest], 0
        while len(places := plan.expand(newest)):
            chosen, numbers = newest[places], num_before + places
            guesses = levels.below(chosen, above[places])
            num_before += len(newest)
            newest, above = self._children(wanted, guesses, chosen.owners, numbers, chosen)
            drafted.append(newest)
            then, now = now, time.perf_counter()
            num_owners = int(np.count_nonzero(np.bincount(chosen.owners)))
            observations.append(Observation("level", num_owners, len(numbers), 1000 * (now - then)))
        return Draft(joined(drafted), observations, now, is_broken)

    def _levels(self, sequences: list[HostSequence], owners: Ints) -> Levels:
        """Of those sequences that draft, after their heads have read on."""
        drafting = [sequences[owner] for owner in owners.tolist()]
        num_steps = max(sequence.bounds.num_steps for sequence in drafting if sequence.bounds)
        if self.head.block:
            self.catch_up(drafting)
            states = guess_blocks(self.head, drafting, num_steps, self.pool, self._backend)
            if not self.head.block.pair_rank:
                return LevelsAhead(self.head, owners, states)
            return PairedLevels(self.head, owners, states, np.array([sequence.text[-1] for sequence in drafting]))
        if self.head.mask_row:
            states = self._read_on(drafting, num_steps - 1) if num_steps > 1 else self.catch_up(drafting)[:, None]
            return LevelsAhead(self.head, owners, states)
        return FedLevels(self.head, sequences, owners, self.catch_up(drafting), self._forward)

    def _forward(self, tokens: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        return self.head.forward(tokens, hidden, batch, self.pool, self._backend)

    def _read_on(self, sequences: Sequence[HostSequence], num_masked: int = 0) -> Tensor:
        """Read what waits for the head, and after that num_masked rows each in place of what is not known yet: the states
        [S, 1 + num_masked, H] from each text's last certain token on."""
        own_rows = [self.rows[sequence.id] for sequence in sequences]
        spans = [(rows.num_made, rows.num_made + rows.num_waiting) for rows in own_rows]
        tokens = [sequence.text[start + 1 : stop + 1] for sequence, (start, stop) in zip(sequences, spans, strict=True)]
        known = self.rows.take([sequence.id for sequence in sequences])
        hidden = self.head.fuse(known) if len(known) else known
        if num_masked and (mask_row := self.head.mask_row):
            masks = mask_row.hidden.expand(num_masked, -1)
            parts = hidden.split([*map(len, tokens)]) if len(known) else [masks[:0]] * len(tokens)
            hidden = torch.cat([part for own in parts for part in (own, masks)])
            tokens = [own + [mask_row.token] * num_masked for own in tokens]
        ends = [stop + num_masked for _, stop in spans]
        positions = [np.arange(start, end) for (start, _), end in zip(spans, ends, strict=True)]
        batch = Batch(
            tokens=self._tensor([*chain.from_iterable(tokens)]),
            positions=self._tensor(np.concatenate(positions)),
            slots=self._tensor(
                np.concatenate([slots_at(own.slots, places) for own, places in zip(sequences, positions, strict=True)])
            ),
            query_starts=tuple(accumulate(map(len, positions), initial=0)),
            rows=HostRows(tuple(ends), tuple(own.slots[:end] for own, end in zip(sequences, ends, strict=True))),
            tree_mask=None,
        )
        states = self._forward(batch.tokens, hidden, batch)
        if num_masked or len(states) > len(sequences):
            lasts = np.array(batch.query_starts[1:]) - num_masked
            states = states[self._tensor(lasts[:, None] + np.arange(-1, num_masked))]
        else:
            states = states[:, None]
        for rows, state, (start, stop) in zip(own_rows, states, spans, strict=True):
            if start == stop and rows.state is not None:
                state[0] = rows.state
            rows.state = state[0]
        return states

    def _children(
        self, wanted: Wanted, guesses: Guesses, owners: Ints, numbers: Ints, parents: Candidates | None
    ) -> tuple[Candidates, Ints]:
        """Of T nodes, or roots, of these owners and numbers: the best children, no more of a sequence's than its top-k, none where
        the head gives no numbers; and which of the T each is below."""
        depth = int(parents.depths[0]) if parents else 0
        widths = wanted.top_ks[owners]
        top_k = int(widths.max())
        logits, rows = self._logits(guesses, wanted.sampling, owners, wanted.num_cached + depth)
        log_probs, draft_tokens = best_children(logits, top_k, self._sharpness)
        above = np.arange(len(owners)).repeat(top_k)
        own = as_numpy(log_probs)[rows].ravel().astype(np.float64)
        tokens = as_numpy(self._target_ids[draft_tokens])[rows].ravel()
        is_child = own > -np.inf
        if widths.min() < top_k:
            is_child &= (np.arange(top_k) < widths[:, None]).ravel()
        if not is_child.all():
            above, own, tokens = above[is_child], own[is_child], tokens[is_child]
        scores = own if parents is None else parents.scores[above] + own
        depths = np.full(len(own), depth + 1)
        values = np.ones_like(own) if parents is None else parents.values[above]
        return Candidates(owners[above], tokens, numbers[above], depths, own, scores, values), above

    def _logits(self, guesses: Guesses, sampling: SamplingBatch, owners: Ints, positions: Ints) -> tuple[Tensor, Ints]:
        """Draft logits [R, W] after T nodes of `owners` where sequences [B] have come to `positions`, and which are each node's: as
        the target will look at its own, judged, and under the noise where that is drawn."""
        logits, rows, row_owners = guesses.logits, guesses.rows, guesses.owners
        if sampling.changes_logits:
            own = self._tensor(owners), self._tensor(guesses.paths), self.head.token_map
            logits, rows, row_owners = sampling.judged(guesses.of_each, *own), np.arange(len(owners)), owners
        if self._couples and len(sampling.sampled):
            settings, places = sampling.rows(self._tensor(row_owners)), self._tensor(positions[row_owners])
            logits = coupled_logits(logits[:, None], places[:, None], settings, self._target_ids)[:, 0]
        return logits, rows

    def _tensor(self, values: Ints | Sequence[int]) -> Tensor:
        return torch.as_tensor(values, device=self.pool.device)


def best_children(logits: Tensor, top_k: int, sharpness: float) -> tuple[Tensor, Tensor]:
    """`tree.expand.top_children` by the kernel that is for this device, if there is one."""
    if kernel := compiled_kernel("top_children", logits, logits.dtype):
        return kernel(logits.contiguous(), top_k, sharpness)
    return top_children(logits, top_k, sharpness)


def as_numpy(tensor: Tensor) -> NDArray:
    return tensor.cpu().numpy()
