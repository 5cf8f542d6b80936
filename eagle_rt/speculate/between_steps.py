"""What passes between two steps, and what choosing takes: both belong to what a step costs."""

from collections import deque

# Of how many of the latest pauses between steps the lower quartile counts; and over how many steps what choosing takes is a mean.
NUM_PAUSES, STEPS_OF_CHOOSING = 16, 50.0


class Pauses:
    """What passes between two steps: all that is done with what the last one gained, and the preparing of the next. Pauses in
    which prompts are read do not count, and few are long because nothing was asked for."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=NUM_PAUSES)
        self._began = 0.0

    def begin(self, now: float) -> None:
        """now: in seconds of the clock."""
        self._began = now

    def end(self, now: float) -> None:
        if self._began:
            self._latest.append(1000 * (now - self._began))

    def skip(self) -> None:
        """This one does not count."""
        self._began = 0.0

    @property
    def ms(self) -> float:
        return sorted(self._latest)[len(self._latest) // 4] if self._latest else 0.0


class Choosing:
    """What is done in steps with drafts that is no part of them: asking who drafts and learning, which takes much in a few steps
    and little in most. A moving mean."""

    def __init__(self) -> None:
        self.ms, self._num_steps = 0.0, 0.0

    def add(self, ms: float) -> None:
        self._num_steps = min(STEPS_OF_CHOOSING, self._num_steps + 1.0)
        self.ms += (ms - self.ms) / self._num_steps
