"""One decode step whose trees the host decides on while it runs: ragged, and no larger than they pay.

`step.py` is the same step with fixed shapes, which the host need not look into.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import numpy as np

from eagle_rt.speculate.between_steps import Choosing, Pauses
from eagle_rt.speculate.copies import MOST_AHEAD, Copy, with_copies
from eagle_rt.speculate.copy_policy import Copying
from eagle_rt.speculate.costs import Observation
from eagle_rt.speculate.forest import Floats, Ints
from eagle_rt.speculate.host_drafter import Draft, HostDrafter
from eagle_rt.speculate.host_verifier import Confirmed, Drafted, HostOutcome, HostVerifier
from eagle_rt.speculate.policy import MOST_COLD, MOST_RESTS, RESTING, DraftPlan, Rests, StepRecord, TreePolicy, num_cold
from eagle_rt.speculate.sampler import SamplingBatch
from eagle_rt.speculate.sequences import HostSequence

# Features that wait for the head take no more memory than this. And of one text no more than so many rows wait, beyond which a
# pass of their own costs the head little, and a step with all of them would keep others waiting.
MOST_WAITING_BYTES, MOST_WAITING_ROWS = 256 * 2**20, 2048
# A copy takes the place of a head's draft if so many of its tokens are right: about as many as are accepted of such a draft.
TOKENS_OF_A_COPY = 3


class HostStepper:
    """Everything that such a step is made with.

    copying: what texts have said before is drafted, too, if there is such a thing.
    """

    copying: Copying | None = None

    def __init__(self, verifier: HostVerifier, drafter: HostDrafter, policy: TreePolicy) -> None:
        self.verifier, self.drafter, self.policy = verifier, drafter, policy
        self.feature_size = max(1, len(verifier.feature_layers)) * verifier.target.spec.shape.hidden_size
        # After steps without drafts and after those with some; and which of them the last one was.
        self._pauses, self._has_drafted = (Pauses(), Pauses()), False
        self._rests: deque[tuple[int, float]] = deque(maxlen=MOST_RESTS)  # those of which the policy has not been told
        self._num_warm = MOST_COLD  # steps without drafts since the last one with copies alone
        # Of steps with drafts, without lessons and with them: those are few, but for the first steps and trials, and would make
        # drafts look dearer than they are. Where nothing drafts for long nothing is chosen.
        self._choosing = Choosing(), Choosing()
        self._most_waiting = MOST_WAITING_BYTES // (self.feature_size * verifier.target.embedding.dtype.itemsize)

    def step(self, sequences: list[HostSequence], sampling: SamplingBatch, mark: Callable[[str], None]) -> HostOutcome:
        """Advance every sequence by the tokens that the target confirms, at least one each.

        sampling: the settings of the B sequences. `mark(name)` is called after each part, for timing.
        """
        begin = time.perf_counter()
        self._pauses[self._has_drafted].end(begin)
        copies = self.copying.of(sequences) if self.copying else []
        looked, plan = time.perf_counter(), RESTING
        if not self.policy.rests(len(sequences)) and not (copies and self._leaves_to(copies, sequences)):
            rows = [self.drafter.rows[sequence.id] for sequence in sequences]
            own = [replace(own, bounds=None) if row.is_lost else own for own, row in zip(sequences, rows, strict=True)]
            self.policy.learn_rests(Rests(list(self._rests), self._between_ms(has_drafted=False)))
            self._rests.clear()
            plan = self.policy.begin(own, [row.num_waiting for row in rows])
        asked = time.perf_counter()
        alone = None
        if self.copying and copies and not plan.drafters and not self.policy.is_measuring:
            alone = self.copying.alone(sequences, copies, self._between_ms(has_drafted=False))
        decided = time.perf_counter()
        had_drafted, self._has_drafted = self._has_drafted, bool(plan.drafters or alone)
        if plan.drafters:
            outcome = self._draft(sequences, sampling, plan, copies, looked, mark)
        elif alone:
            outcome = self._copy(sequences, sampling, alone, mark, is_warm=had_drafted)
        else:
            outcome = self._rest(sequences, sampling, mark)
        end = time.perf_counter()
        if self.copying:
            looking, is_used = looked - begin + decided - asked, outcome.drafted and outcome.drafted.is_copied.any()
            # Beside a head's drafts nobody knows: it is enough for being looked for again.
            saved = self.copying.saved(outcome, end - begin - asked + looked) if alone else MOST_AHEAD if is_used else None
            self.copying.book.pay(looking, end - begin, saved=saved)
        self._pauses[self._has_drafted].begin(end)
        mark("accept")
        return outcome

    def _leaves_to(self, copies: list[Copy], sequences: list[HostSequence]) -> bool:
        """Whether no head need draft beside them."""
        misses = np.ones(len(sequences))
        for copy in copies:
            misses[copy.owner] -= copy.chances[:TOKENS_OF_A_COPY][-1]
        return self.policy.leaves_to_copies(sequences, misses)

    def _copy(
        self,
        sequences: list[HostSequence],
        sampling: SamplingBatch,
        drafted: Drafted,
        mark: Callable[[str], None],
        *,
        is_warm: bool,
    ) -> HostOutcome:
        """A step in which no head drafts, but what the texts themselves have said is verified."""
        if has_read := self.drafter.rows.is_due and self._read_on(sequences):
            mark("extend")
        confirmed = self._verify(sequences, sampling, drafted, mark)
        if self.copying:
            between = self._between_ms(has_drafted=False), self._between_ms(has_drafted=True)
            self.copying.learn(sequences, drafted, confirmed, between, is_warm=is_warm)
        self.policy.add_copied(sequences)
        self._num_warm = 0
        paths, is_broken = confirmed.paths, [False] * len(sequences)
        return HostOutcome(confirmed.tokens, drafted.counts, is_broken, has_read, confirmed.logits, paths, drafted)

    def _rest(self, sequences: list[HostSequence], sampling: SamplingBatch, mark: Callable[[str], None]) -> HostOutcome:
        """A step without drafts."""
        rows, batch_size = self.drafter.rows, len(sequences)
        if has_read := rows.is_due and self._read_on(sequences):
            mark("extend")
        start = time.perf_counter()
        tokens, logits, features = self.verifier.plain_step(sequences, sampling)
        assert features is not None
        rows.add_step([sequence.id for sequence in sequences], [1] * batch_size, features)
        ms = 1000 * (time.perf_counter() - start)
        # Those that follow copies are as those that follow drafts.
        if self._num_warm >= num_cold(ms):
            self._rests.append((batch_size, ms))
        if self.copying:
            self.copying.policy.add_rest(batch_size, ms)
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

        confirmed = self._verify(sequences, sampling, drafted, mark)
        verify_ms = 1000 * (time.perf_counter() - draft.end) + self._choosing[False].ms
        learning_ms = self._learn(plan, draft, kept[~drafted.is_copied], drafted, confirmed.paths, verify_ms)
        self._choosing[plan.teaches].add(asking_ms + learning_ms)
        if self.copying:
            ms = 1000 * (time.perf_counter() - begin) + self._between_ms(has_drafted=True)
            self.copying.policy.add_drafted(sequences, sum(map(len, confirmed.tokens)), ms)
        is_broken, paths = draft.is_broken.tolist(), confirmed.paths
        return HostOutcome(confirmed.tokens, drafted.counts, is_broken, True, confirmed.logits, paths, drafted)

    def _verify(
        self, sequences: list[HostSequence], sampling: SamplingBatch, drafted: Drafted, mark: Callable[[str], None]
    ) -> Confirmed:
        """And put the features of what is confirmed aside for the head."""
        confirmed = self.verifier.verify(sequences, sampling, drafted.trees, mark)
        assert confirmed.features is not None
        self.drafter.rows.add_step([sequence.id for sequence in sequences], [*map(len, confirmed.paths)], confirmed.features)
        return confirmed

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
        if self.copying:
            self.copying.book.forget(sequence_id)

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
