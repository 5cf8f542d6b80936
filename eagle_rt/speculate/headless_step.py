"""One decode step without a head: what texts repeat is verified, or every sequence gains its next token."""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from eagle_rt.speculate.between_steps import Pauses
from eagle_rt.speculate.copy_policy import Copying
from eagle_rt.speculate.host_verifier import Drafted, HostOutcome, HostVerifier
from eagle_rt.speculate.sampler import SamplingBatch
from eagle_rt.speculate.sequences import HostSequence


class HeadlessStepper:
    """copying: what texts repeat; without it nothing is drafted."""

    def __init__(self, verifier: HostVerifier, copying: Copying | None = None) -> None:
        self.verifier, self.copying = verifier, copying
        # After steps without copies and after those with some; and which of them the last one was.
        self._pauses, self._has_copied = (Pauses(), Pauses()), False

    def step(self, sequences: list[HostSequence], sampling: SamplingBatch, mark: Callable[[str], None]) -> HostOutcome:
        """Advance every sequence by the tokens that the target confirms, at least one each.

        sampling: the settings of the B sequences. `mark(name)` is called after each part, for timing.
        """
        begin = time.perf_counter()
        self._pauses[self._has_copied].end(begin)
        drafted = None
        if self.copying and (copies := self.copying.of(sequences)):
            drafted = self.copying.alone(sequences, copies, self._pauses[False].ms)
        start = time.perf_counter()
        outcome = self._verify(sequences, sampling, drafted, mark) if drafted else self._rest(sequences, sampling)
        end = time.perf_counter()
        if self.copying:
            saved = self.copying.saved(outcome, end - begin) if drafted else None
            self.copying.book.pay(start - begin, end - begin, saved=saved)
        self._has_copied = drafted is not None
        self._pauses[self._has_copied].begin(end)
        mark("accept" if drafted else "verify")
        return outcome

    def skip_pause(self) -> None:
        """What has passed since the last step was not what passes between steps."""
        self._pauses[self._has_copied].skip()

    def read(self, sequence_ids: Sequence[str], starts: Sequence[int], counts: Sequence[int], features: Tensor) -> None:
        """Features [sum of counts, F] of so many further rows of each text, from the row `start` on; without a class that wants
        them there are none."""

    def forget(self, sequence_id: str) -> None:
        """A sequence has left."""
        if self.copying:
            self.copying.book.forget(sequence_id)

    def _verify(
        self, sequences: list[HostSequence], sampling: SamplingBatch, drafted: Drafted, mark: Callable[[str], None]
    ) -> HostOutcome:
        confirmed = self.verifier.verify(sequences, sampling, drafted.trees, mark)
        if self.copying:
            self.copying.learn(sequences, drafted, confirmed, tuple(own.ms for own in self._pauses), is_warm=self._has_copied)
        is_broken, paths = [False] * len(sequences), confirmed.paths
        self._read_on(sequences, [*map(len, paths)], confirmed.features)
        return HostOutcome(confirmed.tokens, drafted.counts, is_broken, False, confirmed.logits, paths, drafted)

    def _rest(self, sequences: list[HostSequence], sampling: SamplingBatch) -> HostOutcome:
        start, count = time.perf_counter(), len(sequences)
        tokens, logits, features = self.verifier.plain_step(sequences, sampling)
        self._read_on(sequences, [1] * count, features)
        if self.copying:
            self.copying.policy.add_rest(count, 1000 * (time.perf_counter() - start))
        rows = [[row] for row in range(count)]
        return HostOutcome([[token] for token in tokens], [0] * count, [False] * count, False, logits, rows)

    def _read_on(self, sequences: list[HostSequence], counts: list[int], features: Tensor | None) -> None:
        if features is not None:
            self.read([sequence.id for sequence in sequences], [sequence.num_cached for sequence in sequences], counts, features)
