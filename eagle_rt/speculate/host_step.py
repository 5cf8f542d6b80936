"""One decode step whose trees the host decides on while it runs: ragged, and no larger than they pay.

`step.py` is the same step with fixed shapes, which the host need not look into.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.batch import slots_at
from eagle_rt.cache.pool import KVPool
from eagle_rt.models.decoder import Decoder
from eagle_rt.speculate.between_steps import Choosing, Pauses
from eagle_rt.speculate.copies import NO_CANDIDATES, NOTHING, Copy, CopyBook, with_copies
from eagle_rt.speculate.costs import Observation
from eagle_rt.speculate.forest import Bools, Candidates, Choose, Floats, Ints, PackedTrees, pack
from eagle_rt.speculate.host_drafter import Draft, HostDrafter
from eagle_rt.speculate.policy import MOST_COLD, RESTING, DraftPlan, Rests, StepRecord, TreePolicy, num_cold
from eagle_rt.speculate.sampler import SamplingBatch, target_choice
from eagle_rt.speculate.sequences import HostSequence, packed_scratch_batch
from eagle_rt.speculate.simulate import simulated_paths

# Features that wait for the head take no more memory than this. And of one text no more than so many rows wait, beyond which a
# pass of their own costs the head little, and a step with all of them would keep others waiting.
MOST_WAITING_BYTES, MOST_WAITING_ROWS = 256 * 2**20, 2048
# How many steps in a row without drafts the policy is told of at most, the latest.
MOST_RESTS = 1024
# A copy takes the place of a head's draft if so many of its tokens are right: about as many as are accepted of such a draft.
TOKENS_OF_A_COPY = 3


@dataclass(frozen=True)
class Drafted:
    """What was verified: the trees, and the candidates that they were made of. is_copied: which of these no head has drafted;
    has_chances: whether their values say how likely each is to be accepted."""

    trees: PackedTrees
    nodes: Candidates
    is_copied: Bools
    has_chances: bool

    @classmethod
    def of(cls, sequences: Sequence[HostSequence], nodes: Candidates, kept: Ints, first_copy: int, has_chances: bool) -> "Drafted":
        """Those of the nodes that have the numbers `kept`; from first_copy on they are copies."""
        roots, chosen = np.array([sequence.text[-1] for sequence in sequences]), nodes[kept]
        return cls(pack(roots, chosen, kept), chosen, kept >= first_copy, has_chances)

    @property
    def counts(self) -> list[int]:
        """[B] how many drafts were verified of each sequence."""
        return [stop - first - 1 for first, stop in pairwise(self.trees.starts)]


@dataclass(frozen=True)
class HostOutcome:
    """For each sequence the tokens that it gains, how many drafts were verified, and whether the head gave no numbers; whether
    heads have read anything; the target's logits [T, V], and for each token in the rows of which of them it was chosen; what was
    drafted, None where nothing was."""

    tokens: list[list[int]]
    num_drafted: list[int]
    is_broken: list[bool]
    has_read: bool
    logits: Tensor
    rows: list[list[int]]
    drafted: Drafted | None = None


def plain_step(
    target: Decoder,
    pool: KVPool,
    backend: AttentionBackend,
    sequences: list[HostSequence],
    sampling: SamplingBatch,
    feature_layers: tuple[int, ...] = (),
) -> tuple[list[int], Tensor, Tensor | None]:
    """The next token of each of B sequences, none of which drafts, the logits [B, V] that it was chosen by, and features [B, F] if
    any are asked for. sampling: their settings."""
    roots, counts = np.array([sequence.text[-1] for sequence in sequences]), [1] * len(sequences)
    zeros = np.zeros_like(roots)
    batch = packed_scratch_batch(sequences, counts, counts, roots, zeros, zeros, None, pool.storage.device)
    output = target.forward(batch, pool, backend, feature_layers)
    logits = target.logits(output.hidden)
    choice = target_choice(sampling.judged(logits)[:, None], batch.positions[:, None], sampling)
    return choice[:, 0].tolist(), logits, output.features


class HostStepper:
    """Everything that such a step is made with.

    simulated_length: make up what is accepted, so many tokens a step; for benchmarks only. copies: what texts have said before is
    drafted, too, if there is such a book.
    """

    copies: CopyBook | None = None

    def __init__(
        self,
        target: Decoder,
        pool: KVPool,
        backend: AttentionBackend,
        drafter: HostDrafter,
        policy: TreePolicy,
        simulated_length: float | None = None,
    ) -> None:
        self.target, self.pool, self.drafter, self.policy = target, pool, drafter, policy
        self.feature_layers = drafter.head.feature_layers
        self._backend, self._simulated_length = backend, simulated_length
        self.feature_size = max(1, len(self.feature_layers)) * target.spec.shape.hidden_size
        # After steps without drafts and after those with some; and which of them the last one was.
        self._pauses, self._has_drafted = (Pauses(), Pauses()), False
        self._rests: deque[tuple[int, float]] = deque(maxlen=MOST_RESTS)  # those of which the policy has not been told
        self._num_warm = MOST_COLD  # steps without drafts since the last one with copies alone
        # Of steps with drafts, without lessons and with them: those are few, but for the first steps and trials, and would make
        # drafts look dearer than they are. Where nothing drafts for long nothing is chosen.
        self._choosing = Choosing(), Choosing()
        self._most_waiting = MOST_WAITING_BYTES // (self.feature_size * target.embedding.dtype.itemsize)

    def step(self, sequences: list[HostSequence], sampling: SamplingBatch, mark: Callable[[str], None]) -> HostOutcome:
        """Advance every sequence by the tokens that the target confirms, at least one each.

        sampling: the settings of the B sequences. `mark(name)` is called after each part, for timing.
        """
        begin = time.perf_counter()
        self._pauses[self._has_drafted].end(begin)
        copies = self.copies.of(sequences, self.policy.least_chance) if self.copies else []
        looked, plan = time.perf_counter(), RESTING
        if not self.policy.rests(len(sequences)) and not (copies and self._leaves_to(copies, sequences)):
            rows = [self.drafter.rows[sequence.id] for sequence in sequences]
            own = [replace(own, bounds=None) if row.is_lost else own for own, row in zip(sequences, rows, strict=True)]
            self.policy.learn_rests(Rests(list(self._rests), self._between_ms(has_drafted=False)))
            self._rests.clear()
            plan = self.policy.begin(own, [row.num_waiting for row in rows])
        asked = time.perf_counter()
        may_copy = bool(copies) and not plan.drafters and not self.policy.is_measuring
        alone = self._copies_alone(sequences, copies) if may_copy else None
        decided = time.perf_counter()
        self._has_drafted = bool(plan.drafters or alone)
        if plan.drafters:
            outcome = self._draft(sequences, sampling, plan, copies, looked, mark)
        elif alone:
            outcome = self._copy(sequences, sampling, alone, mark)
        else:
            outcome = self._rest(sequences, sampling, mark)
        end = time.perf_counter()
        if self.copies:
            is_used = outcome.drafted is not None and bool(outcome.drafted.is_copied.any())
            self.copies.pay(looked - begin + decided - asked, end - begin, is_used=is_used)
        self._pauses[self._has_drafted].begin(end)
        mark("accept")
        return outcome

    def _leaves_to(self, copies: list[Copy], sequences: list[HostSequence]) -> bool:
        """Whether no head need draft beside them."""
        misses = np.ones(len(sequences))
        for copy in copies:
            misses[copy.owner] -= copy.chances[:TOKENS_OF_A_COPY][-1]
        return self.policy.leaves_to_copies(sequences, misses)

    def _copies_alone(self, sequences: list[HostSequence], copies: list[Copy]) -> Drafted | None:
        """What is worth verifying where no head drafts; None if nothing is."""
        owners = np.array([copy.owner for copy in copies]).repeat([len(copy.tokens) for copy in copies])
        kept = self.policy.keep_copies(sequences, np.concatenate([copy.chances for copy in copies]), owners, NOTHING)
        if not len(kept):
            return None
        return Drafted.of(sequences, with_copies(NO_CANDIDATES, NOTHING, copies), kept, 0, self.policy.has_chances)

    def _copy(
        self, sequences: list[HostSequence], sampling: SamplingBatch, drafted: Drafted, mark: Callable[[str], None]
    ) -> HostOutcome:
        """A step in which no head drafts, but what the texts themselves have said is verified."""
        if has_read := self.drafter.rows.is_due and self._read_on(sequences):
            mark("extend")
        paths, tokens, logits = self._verify_and_keep(sequences, sampling, drafted.trees, mark)
        self.policy.add_copied(sequences)
        self._num_warm = 0
        return HostOutcome(tokens, drafted.counts, [False] * len(sequences), has_read, logits, paths, drafted)

    def _rest(self, sequences: list[HostSequence], sampling: SamplingBatch, mark: Callable[[str], None]) -> HostOutcome:
        """A step without drafts."""
        rows, batch_size = self.drafter.rows, len(sequences)
        if has_read := rows.is_due and self._read_on(sequences):
            mark("extend")
        start = time.perf_counter()
        tokens, logits, features = plain_step(self.target, self.pool, self._backend, sequences, sampling, self.feature_layers)
        assert features is not None
        rows.add_step([sequence.id for sequence in sequences], [1] * batch_size, features)
        ms = 1000 * (time.perf_counter() - start)
        # Those that follow copies are as those that follow drafts.
        if self._num_warm >= num_cold(ms):
            self._rests.append((batch_size, ms))
        self._num_warm += 1
        mark("verify")
        ones = [[row] for row in range(batch_size)]
        return HostOutcome([[token] for token in tokens], [0] * batch_size, [False] * batch_size, has_read, logits, ones)

    def _draft(
        self,
        sequences: list[HostSequence],
        sampling: SamplingBatch,
        plan: DraftPlan,
        copies: list[Copy],
        begin: float,
        mark: Callable[[str], None],
    ) -> HostOutcome:
        """As the plan wants, and with what else the texts themselves have said. begin: of asking who drafts, in seconds of the
        clock."""
        start = time.perf_counter()
        asking_ms = 1000 * (start - begin)
        draft = self.drafter.draft(sequences, sampling, plan, start, mark)
        nodes, kept, num_own = draft.candidates, plan.keep(draft.candidates), len(draft.candidates)
        if copies:
            nodes = with_copies(nodes, kept, copies)
            copied = nodes[num_own:]
            more = self.policy.keep_copies(sequences, copied.values, copied.owners, nodes.owners[kept])
            kept = np.concatenate((kept, num_own + more))
        drafted = Drafted.of(sequences, nodes, kept, num_own, self.policy.has_chances)
        mark("draft")

        paths, tokens, logits = self._verify_and_keep(sequences, sampling, drafted.trees, mark)
        verify_ms = 1000 * (time.perf_counter() - draft.end) + self._choosing[False].ms
        learning_ms = self._learn(plan, draft, kept[~drafted.is_copied], drafted, paths, verify_ms)
        self._choosing[plan.teaches].add(asking_ms + learning_ms)
        return HostOutcome(tokens, drafted.counts, draft.is_broken.tolist(), True, logits, paths, drafted)

    def _verify_and_keep(
        self, sequences: list[HostSequence], sampling: SamplingBatch, trees: PackedTrees, mark: Callable[[str], None]
    ) -> tuple[list[list[int]], list[list[int]], Tensor]:
        """The rows of what is accepted of each tree, the tokens that it gains, and the logits [T, V] of all rows."""
        choose, logits, features = self._verify(sequences, sampling, trees)
        length = self._simulated_length
        paths, tokens = trees.walk(choose) if length is None else simulated_paths(trees, choose, length)
        mark("verify")
        self._keep(sequences, trees, paths, features)
        return paths, tokens, logits

    def must_read(self, sequence_id: str) -> bool:
        """Whether too much waits for the head, so that it has to read this text though nothing drafts."""
        rows = self.drafter.rows
        own = rows[sequence_id].num_waiting
        return own > MOST_WAITING_ROWS or (own > 0 and rows.num_waiting > self._most_waiting)

    def _read_on(self, sequences: list[HostSequence]) -> bool:
        """Sort what waits for the head, and let it read what it must. Whether there was any of that."""
        self.drafter.rows.sort()
        behind = [sequence for sequence in sequences if self.must_read(sequence.id)]
        if behind:
            self.drafter.catch_up(behind)
        return bool(behind)

    def skip_pause(self) -> None:
        """What has passed since the last step was not what passes between steps."""
        self._pauses[self._has_drafted].skip()

    def forget(self, sequence_id: str) -> None:
        """A sequence has left."""
        self.drafter.rows.forget(sequence_id)
        self.policy.forget(sequence_id)
        if self.copies:
            self.copies.forget(sequence_id)

    def _verify(
        self, sequences: list[HostSequence], sampling: SamplingBatch, trees: PackedTrees
    ) -> tuple[Choose, Tensor, Tensor | None]:
        """What the target chooses after nodes, and the nodes' logits [T, V] and features [T, F]."""
        counts = [stop - start for start, stop in zip(trees.starts, trees.starts[1:], strict=False)]
        visible = None if trees.is_plain else trees.visible
        batch = packed_scratch_batch(sequences, counts, counts, trees.tokens, trees.depths, trees.places, visible, self._device)
        output = self.target.forward(batch, self.pool, self._backend, self.feature_layers)
        logits = self.target.logits(output.hidden)
        paths = trees.paths if sampling.changes_logits else None

        def chosen_after(rows: slice | list[int]) -> list[int]:
            owners, own = self._tensor(trees.owners[rows]), rows if isinstance(rows, slice) else self._tensor(rows)
            judged = logits[own] if paths is None else sampling.judged(logits[own], owners, self._tensor(paths[rows]))
            settings = sampling if trees.is_plain else sampling.rows(owners)
            return target_choice(judged[:, None], batch.positions[own, None], settings)[:, 0].tolist()

        # To draw, or to see what a grammar rules out, for rows that nobody asks for takes longer than to be asked several times.
        if not (trees.is_plain or logits.is_cuda) and (len(sampling.sampled) or sampling.grammars):
            return chosen_after, logits, output.features
        choice = chosen_after(slice(None))
        return lambda rows: [choice[row] for row in rows], logits, output.features

    def _keep(self, sequences: list[HostSequence], trees: PackedTrees, paths: list[list[int]], features: Tensor | None) -> None:
        """Move the cache rows of the accepted nodes to where the text goes on, and put their features aside for the head."""
        assert features is not None
        rows = list(chain.from_iterable(paths))
        accepted = features if len(rows) == len(features) else features[self._tensor(rows)]
        self.drafter.rows.add_step([sequence.id for sequence in sequences], [len(path) for path in paths], accepted)
        if trees.is_plain:
            return
        if self.pool.memories:
            most = max(map(len, paths))
            self.pool.memories.keep(self._tensor([path + [-1] * (most - len(path)) for path in paths]))
        sources, targets = [], []
        for sequence, start, path in zip(sequences, trees.starts, paths, strict=False):
            moved = [(row - start, place) for place, row in enumerate(path) if row - start != place]
            if moved:
                places = np.array(moved) + sequence.num_cached
                sources.append(slots_at(sequence.slots, places[:, 0]))
                targets.append(slots_at(sequence.slots, places[:, 1]))
        if sources:
            self.pool.move(self._tensor(np.concatenate(sources)), self._tensor(np.concatenate(targets)))

    def _learn(
        self, plan: DraftPlan, draft: Draft, kept: Ints, drafted: Drafted, paths: list[list[int]], verify_ms: float
    ) -> float:
        """From what the head has drafted, of which `kept` was verified, and what that alone would have gained. The milliseconds
        that it takes."""
        start, trees = time.perf_counter(), drafted.trees
        parts = [*draft.observations, Observation("verify", len(paths), len(trees.owners), verify_ms)]
        copied = set(trees.rows_of_chosen[drafted.is_copied].tolist())
        num_gained = sum(next((count for count, row in enumerate(path) if row in copied), len(path)) for path in paths)

        def labels() -> Floats:
            is_accepted = np.zeros(len(trees.owners))
            is_accepted[list(chain.from_iterable(paths))] = 1.0
            return is_accepted[trees.rows_of_chosen[~drafted.is_copied]]

        between_ms = self._between_ms(has_drafted=True)
        teaching_ms = max(0.0, self._choosing[True].ms - self._choosing[False].ms)
        plan.learn(StepRecord(draft.candidates, kept, labels, num_gained, parts, between_ms, teaching_ms, len(copied)))
        return 1000 * (time.perf_counter() - start)

    def _between_ms(self, *, has_drafted: bool) -> float:
        """What passes after a step with drafts, or without any; as after the others where none was made yet."""
        return self._pauses[has_drafted].ms or self._pauses[not has_drafted].ms

    def _tensor(self, values: Ints | Sequence) -> Tensor:
        return torch.as_tensor(values, device=self._device)

    @property
    def _device(self) -> torch.device:
        return self.pool.storage.device
