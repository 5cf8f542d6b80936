"""One decode step without a head: what texts repeat is verified, or every sequence gains its next token."""

import time
from collections import deque
from collections.abc import Callable

from eagle_rt.speculate.between_steps import Pauses
from eagle_rt.speculate.copies import Copy, CopyBook, candidates_of, owners_and_chances
from eagle_rt.speculate.copy_policy import CopyPolicy
from eagle_rt.speculate.host_verifier import Drafted, HostOutcome, HostVerifier
from eagle_rt.speculate.policy import MOST_RESTS, Rests
from eagle_rt.speculate.sampler import SamplingBatch
from eagle_rt.speculate.sequences import HostSequence


class HeadlessStepper:
    """policy: which copies are verified; without one nothing is drafted."""

    def __init__(self, verifier: HostVerifier, policy: CopyPolicy | None = None) -> None:
        self.verifier, self.policy = verifier, policy
        self._copies = CopyBook() if policy else None
        # After steps without copies and after those with some; and which of them the last one was.
        self._pauses, self._has_copied = (Pauses(), Pauses()), False
        self._rests: deque[tuple[int, float]] = deque(maxlen=MOST_RESTS)  # those of which the policy has not been told

    def step(self, sequences: list[HostSequence], sampling: SamplingBatch, mark: Callable[[str], None]) -> HostOutcome:
        """Advance every sequence by the tokens that the target confirms, at least one each.

        sampling: the settings of the B sequences. `mark(name)` is called after each part, for timing.
        """
        begin = time.perf_counter()
        self._pauses[self._has_copied].end(begin)
        drafted = None
        if self._copies and self.policy:
            copies = self._copies.of(sequences, self.policy.least_chance)
            drafted = self._worth_verifying(copies, sequences, self.policy) if copies else None
        start = time.perf_counter()
        outcome = self._copy(sequences, sampling, drafted, mark) if drafted else self._rest(sequences, sampling)
        end = time.perf_counter()
        if self._copies:
            self._copies.pay(start - begin, end - begin, is_used=drafted is not None)
        self._has_copied = drafted is not None
        self._pauses[self._has_copied].begin(end)
        mark("accept" if drafted else "verify")
        return outcome

    def skip_pause(self) -> None:
        """What has passed since the last step was not what passes between steps."""
        self._pauses[self._has_copied].skip()

    def forget(self, sequence_id: str) -> None:
        """A sequence has left."""
        if self._copies:
            self._copies.forget(sequence_id)

    def _worth_verifying(self, copies: list[Copy], sequences: list[HostSequence], policy: CopyPolicy) -> Drafted | None:
        """None if nothing is."""
        owners, chances = owners_and_chances(copies)
        kept = policy.keep(sequences, chances, owners, Rests(list(self._rests), self._pauses[False].ms))
        self._rests.clear()
        return Drafted.of(sequences, candidates_of(copies), kept, 0, has_chances=True) if len(kept) else None

    def _copy(
        self, sequences: list[HostSequence], sampling: SamplingBatch, drafted: Drafted, mark: Callable[[str], None]
    ) -> HostOutcome:
        start = time.perf_counter()
        confirmed = self.verifier.verify(sequences, sampling, drafted.trees, mark)
        ms, tokens, is_broken = 1000 * (time.perf_counter() - start), confirmed.tokens, [False] * len(sequences)
        if self.policy:
            self.policy.learn(sequences, sum(map(len, tokens)), len(drafted.trees.owners), ms, self._pauses[True].ms)
        return HostOutcome(tokens, drafted.counts, is_broken, False, confirmed.logits, confirmed.paths, drafted)

    def _rest(self, sequences: list[HostSequence], sampling: SamplingBatch) -> HostOutcome:
        start, count = time.perf_counter(), len(sequences)
        tokens, logits, _ = self.verifier.plain_step(sequences, sampling)
        self._rests.append((count, 1000 * (time.perf_counter() - start)))
        rows = [[row] for row in range(count)]
        return HostOutcome([[token] for token in tokens], [0] * count, [False] * count, False, logits, rows)
