"""How far a reply has come in the grammar that it must match, and which tokens may follow it. No torch here."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from xgrammar import GrammarMatcher

# Ambiguous expressions take ever longer to follow as the text grows, and everyone waits meanwhile: so many calls of the matcher may
# take as long as that. Of others they take microseconds.
MOST_SLOW, SLOW_SECONDS = 5, 0.02


class GrammarMatch:
    """Follows one reply, which is whole where `matcher` takes one of its end tokens.

    special_token_ids: those that are no text. failure: why the reply cannot go on, None while it can.
    """

    def __init__(self, matcher: "GrammarMatcher", vocab_size: int, special_token_ids: frozenset[int]) -> None:
        self.failure: str | None = None
        self._matcher, self._vocab_size, self._special = matcher, vocab_size, special_token_ids
        self._words = np.empty((1, -(-vocab_size // 32)), dtype=np.int32)
        self._only_end = np.zeros(vocab_size, dtype=np.bool_)
        self._only_end[matcher.stop_token_ids] = True
        self._num_followed = self._num_slow = 0
        self._known: dict[tuple[int, ...], NDArray[np.bool_]] = {}  # what may follow these tokens after the reply

    def follow(self, tokens: Iterable[int]) -> None:
        """The reply has gone on with these tokens."""
        self._known.clear()
        for token in tokens:
            if self.failure is None and not self._accepts(token):
                self.failure = f"the reply does not match its grammar any more after {self._num_followed} tokens"
            self._num_followed += 1

    def allowed(self, path: tuple[int, ...]) -> NDArray[np.bool_]:
        """[V] which tokens may follow the reply and these; any, where these may not, or where nothing follows the end.

        Where none may, because the grammar leads nowhere, a token that ends the reply.
        """
        if path not in self._known:
            self._known[path] = self._after(path)
        return self._known[path]

    def _after(self, path: tuple[int, ...]) -> NDArray[np.bool_]:
        if self.failure:
            return self._only_end
        num_accepted = 0
        while num_accepted < len(path) and self._accepts(path[num_accepted]):
            num_accepted += 1
        start = time.thread_time()
        if num_accepted < len(path) or self._matcher.is_terminated():
            tokens = np.ones(self._vocab_size, dtype=np.bool_)
        else:
            self._matcher.fill_next_token_bitmask(self._words)
            tokens = np.unpackbits(self._words.view(np.uint8)[0], count=self._vocab_size, bitorder="little").view(np.bool_)
        self._matcher.rollback(num_accepted)
        self._limit(start)
        return tokens if tokens.any() else self._only_end

    def _accepts(self, token: int) -> bool:
        if token in self._special or self._matcher.is_terminated():
            return False
        start = time.thread_time()
        accepts = self._matcher.accept_token(token)
        self._limit(start)
        return accepts

    def _limit(self, start: float) -> None:
        """start: of what has just been done, in seconds of this thread's time."""
        self._num_slow += time.thread_time() - start > SLOW_SECONDS
        if self._num_slow > MOST_SLOW:
            self.failure = (
                f"following the grammar takes too long after {self._num_followed} tokens: it is ambiguous, make it simpler"
            )
