"""When prompts that could be read at once wait for others, so that one pass reads them all. Plain Python, no torch.

A pass over prompts holds up everyone who is decoding, and one over three of them hardly longer than one over the first, where
reading the weights is what takes the time. But a prompt that waits says nothing meanwhile.
"""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence

from eagle_rt.engine.request import Request

# How fast means follow what is measured, once they are of so many; and how many times as long as that a pass may take at most.
RATE, MOST_SURPRISE = 1 / 16, 3.0
# The least that is worth waiting for, as a share of a pass: how well times are known.
LEAST_SAVED = 0.1
# Over how many of the latest prompts it is counted how often they come.
PROMPTS_REMEMBERED = 8


class Mean:
    """Of the latest values; of all where they are few."""

    def __init__(self) -> None:
        self.value, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._count += 1
        self.value += max(RATE, 1 / self._count) * (value - self.value)


class PassCosts:
    """What passes over prompts take by how many rows they read, as measured: means over rows of like number, and straight lines
    between them. Fewer or more than any pass has had are believed to take as long each: what is not known is not waited for."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[Mean, Mean]] = {}  # of rows and milliseconds, by the power of two that the rows are below

    def learn(self, num_rows: int, ms: float) -> None:
        if self._means:
            ms = min(ms, MOST_SURPRISE * max(self.ms(num_rows), *(own.value for _, own in self._means.values())))
        rows, own = self._means.setdefault(num_rows.bit_length(), (Mean(), Mean()))
        rows.add(num_rows)
        own.add(ms)

    def ms(self, num_rows: float) -> float:
        """0 where nothing is known."""
        points = sorted((rows.value, own.value) for rows, own in self._means.values())
        if not points:
            return 0.0
        index = bisect(points, (num_rows, 0.0))
        if index in (0, len(points)):
            known, own = points[max(0, index - 1)]
            return own * num_rows / known
        (before, least), (after, most) = points[index - 1 : index + 1]
        return least + (most - least) * (num_rows - before) / (after - before)


class Gathering:
    """Lets prompts wait for others where that makes all of them and those who decode wait the least in sum.

    If prompts come every t ms and a pass over k of them holds up those who decode for L(k) ms in sum, groups of k cost
    t (k - 1) / 2 + L(k) / k for each. So the next one is worth waiting for while that falls. How often they come is a guess from
    the latest; as a bound, nobody waits any more once the prompts have waited L in sum, which is never more than twice what the
    best schedule costs (Dooly, Goldman and Scott, "On-line analysis of the TCP acknowledgment delay problem", Journal of the
    ACM 48, 2001, section 3).

    pass_ms: what a pass over so many rows takes; most_rows: that it can have; clock: milliseconds of steps so far.
    """

    def __init__(self, pass_ms: Callable[[float], float], most_rows: int, clock: Callable[[], float]) -> None:
        self._pass_ms, self._most_rows, self._clock = pass_ms, most_rows, clock
        self._came_at: deque[float] = deque(maxlen=PROMPTS_REMEMBERED + 1)
        self._num_waiting, self._waited, self._then = 0, 0.0, 0.0
        self._share_read = Mean()  # of prompts: the rest was cached

    def waits(self, prompts: Sequence[Request], num_decoding: int) -> bool:
        """Whether these, which could be read now, should wait. Asked before every step."""
        now, count = self._clock(), len(prompts)
        self._waited += max(0, self._num_waiting) * (now - self._then)
        self._came_at.extend([now] * (count - self._num_waiting))
        self._num_waiting, self._then = count, now
        if not count or len(self._came_at) <= PROMPTS_REMEMBERED:
            return False
        num_rows = self._share_read.value * sum(len(prompt.tokens) for prompt in prompts)
        with_next = num_rows * (count + 1) / count
        held_up = num_decoding * self._pass_ms(num_rows)
        saved = held_up / count - num_decoding * self._pass_ms(with_next) / (count + 1)
        interval = (now - self._came_at[0]) / PROMPTS_REMEMBERED
        pays = saved > max(interval / 2, LEAST_SAVED * held_up / count)
        return pays and with_next <= self._most_rows and self._waited < held_up

    def let_in(self, prompts: Sequence[Request]) -> None:
        """They are about to be read."""
        self._num_waiting, self._waited = self._num_waiting - len(prompts), 0.0
        for prompt in prompts:
            self._share_read.add((prompt.prefill_end - prompt.num_cached) / prompt.prefill_end)
