"""Engines that take turns: short steps several at a time, long ones one by one."""

import itertools
from types import SimpleNamespace

import pytest

from eagle_rt.bench import lockstep
from eagle_rt.bench.lockstep import SECONDS_OF_A_TURN, STEPS_OF_A_TURN, full_rates
from eagle_rt.engine.params import SamplingParams


class MadeUpEngine:
    """Of one request, whose every step takes so long on a clock that all share, and gains a token."""

    def __init__(self, name: str, step_seconds: float, num_tokens: int, log: list[str], clock: list[float]) -> None:
        self.name, self.metrics = name, SimpleNamespace(num_prompt_tokens=0)
        self.num_skipped = 0
        own_clock = SimpleNamespace(seconds={"prefill": 0.0})
        self.runner = SimpleNamespace(on_host=SimpleNamespace(skip_pause=self._skip), clock=own_clock)
        self.scheduler = SimpleNamespace(
            waiting={}, running=[name], limits=SimpleNamespace(max_running=1), forget_prefixes=lambda: None
        )
        self._step_seconds, self._left, self._log, self._clock = step_seconds, num_tokens, log, clock

    def _skip(self) -> None:
        self.num_skipped += 1

    def forget_metrics(self) -> None: ...

    def submit(self, *_: object) -> None: ...

    def abort(self, _: str) -> None: ...

    def step(self) -> list[SimpleNamespace]:
        self._clock[0] += self._step_seconds
        self._log.append(self.name)
        self._left -= 1
        if not self._left:
            self.scheduler.running.clear()
        return [SimpleNamespace(tokens=[0])]


@pytest.mark.parametrize(("share", "length"), [(0.001, STEPS_OF_A_TURN), (0.4, 3), (1.5, 1), (10.0, 1)])
def test_a_turn_is_some_steps_but_no_longer_than_it_must_be(monkeypatch: pytest.MonkeyPatch, share: float, length: int) -> None:
    """share: of the longest turn, that a step takes."""
    log, clock = [], [0.0]
    engines = [MadeUpEngine(name, share * SECONDS_OF_A_TURN, 42, log, clock) for name in "ab"]
    monkeypatch.setattr(lockstep, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    rates = full_rates(engines, [[0]], SamplingParams(max_new_tokens=42))
    turns = [len(list(steps)) for _, steps in itertools.groupby(log)]
    assert turns == [length] * (2 * 42 // length)
    assert [engine.num_skipped for engine in engines] == [42 // length] * 2
    assert rates == pytest.approx([1 / (share * SECONDS_OF_A_TURN)] * 2)
