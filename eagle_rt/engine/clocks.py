"""What steps take, on the host and on the device."""

import time
from collections import defaultdict

import torch


class StepClock:
    """Seconds spent in each named part of the steps so far; elapsed_ms: in all of them, which nobody sets back to 0."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.elapsed_ms = 0.0
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        """Everything since the last mark was `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self.elapsed_ms += 1000 * (now - self._last)
        self._last = now


class DeviceClock:
    """Times what the device does from here on until it is told to stop; on a GPU by events, which hold up nothing."""

    def __init__(self, *, is_gpu: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_gpu else []
        self._seconds = [time.perf_counter()]
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        self._seconds.append(time.perf_counter())
        if self._events:
            self._events[1].record()

    def wait(self) -> float:
        """The milliseconds that it took, when the device has got there."""
        if not self._events:
            return 1000 * (self._seconds[1] - self._seconds[0])
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1])
