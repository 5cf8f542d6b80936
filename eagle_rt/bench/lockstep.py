"""Engines that go through the same texts side by side, a few steps at a time, so that whatever the machine does hits all alike."""

import os
import re
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.metrics import EngineMetrics
from eagle_rt.engine.params import SamplingParams

# Replies are as long as is asked for, more or less by up to a half, and hardly two alike: else plain decoding would end several in
# the same step, and read the prompts of those that follow in one pass, as no load does by itself.
SHORTEST, GOLDEN_RATIO = 0.5, 0.618034
LONGEST_STEP = 5.0
# The first step after another engine's finds cold caches, as none does where one engine serves alone. So short steps have turns of
# several; but a turn is no longer than it must be, since memory is faster in one second than in the next.
STEPS_OF_A_TURN, SECONDS_OF_A_TURN = 7, 0.06
# The place in its line of what /proc/stat says of a processor.
STOLEN_TICKS = 8
# Rounds in which the machine was taken away for too long are made again, until there are so many times as many as are asked for.
MOST_ROUNDS = 3


def full_rates(cores: list[EngineCore], prompts: list[list[int]], sampling: SamplingParams) -> list[float]:
    """Tokens per second of each engine over the same prompts, until not every slot of its batch has a request any more: what the
    last ones do alone says nothing about the batch. By then all have read the same prompts but have not said equally much of the
    replies; so it is said what as many tokens would have taken each as they have said in the mean.

    The next steps are always those of the engine that is furthest behind, so that all are at the same place of the same texts at
    any time, and a slow second of the machine hits all of them alike.
    """
    assert sampling.max_new_tokens is not None
    for core in cores:
        core.forget_metrics()
        core.scheduler.forget_prefixes()
        for number, prompt in enumerate(prompts):
            core.submit(str(number), prompt, replace(sampling, max_new_tokens=reply_length(sampling.max_new_tokens, number)))
    spent = {core: Spent(len(prompts)) for core in cores}
    while behind := [core for core in cores if is_busy(core)]:
        core = min(behind, key=lambda own: spent[own].num_tokens)
        began = time.perf_counter()
        if stepper := core.runner.on_host:
            stepper.skip_pause()  # others had the time since its last step
        for _ in range(STEPS_OF_A_TURN):
            num_read, read_for, start = core.metrics.num_prompt_tokens, core.runner.clock.seconds["prefill"], time.perf_counter()
            num_tokens = sum(len(event.tokens) for event in core.step())
            end, reading = time.perf_counter(), core.runner.clock.seconds["prefill"] - read_for
            spent[core].add(num_tokens, end - start - reading, core.metrics.num_prompt_tokens - num_read, reading)
            if end - began > SECONDS_OF_A_TURN or not is_busy(core):
                break
    for core in cores:
        for number in range(len(prompts)):
            core.abort(str(number))
    num_tokens = statistics.mean(own.num_tokens for own in spent.values())
    return [num_tokens / own.seconds(num_tokens) for own in spent.values()]


@dataclass(frozen=True)
class Round:
    """Tokens per second and totals of each engine, and which share of the time others had the processors."""

    rates: list[float]
    metrics: list[EngineMetrics]
    stolen: float


def quiet_rounds(
    cores: list[EngineCore], prompts: list[list[int]], sampling: SamplingParams, count: int, most_stolen: float
) -> list[Round]:
    """Of `full_rates` as many as are asked for: those of all that were made in which others had the least of the time."""
    rounds: list[Round] = []
    while len(rounds) < MOST_ROUNDS * count:
        start, before = time.perf_counter(), stolen_seconds()
        rates = full_rates(cores, prompts, sampling)
        stolen = (stolen_seconds() - before) / (time.perf_counter() - start)
        rounds.append(Round(rates, [core.current_metrics() for core in cores], stolen))
        rounds.sort(key=lambda own: own.stolen)
        if len(rounds) >= count and rounds[count - 1].stolen <= most_stolen:
            break
    return rounds[:count]


class Spent:
    """What an engine has said after so many prompts, and what its steps took. The machine stands still for seconds now and then: no
    step decodes for longer than LONGEST_STEP times what the median one does, and none reads prompts for longer, token by token."""

    def __init__(self, num_prompts: int) -> None:
        self.num_tokens = 0
        self._num_prompts = num_prompts
        self._steps: list[tuple[float, int, float]] = []

    def add(self, num_tokens: int, decoding: float, num_read: int, reading: float) -> None:
        """A step has said so many tokens and read so many of prompts, and how many seconds it took for either."""
        self.num_tokens += num_tokens
        self._steps.append((decoding, num_read, reading))

    def seconds(self, num_tokens: float) -> float:
        """That the same prompts and so many tokens would have taken, of which the first of each comes with the reading."""
        longest = LONGEST_STEP * statistics.median(decoding for decoding, *_ in self._steps)
        longest_token = LONGEST_STEP * statistics.median([own / num_read for _, num_read, own in self._steps if num_read] or [0.0])
        decoding = sum(min(longest, own) for own, *_ in self._steps)
        reading = sum(min(num_read * longest_token, own) for _, num_read, own in self._steps)
        return reading + decoding * (num_tokens - self._num_prompts) / max(1, self.num_tokens - self._num_prompts)


def stolen_seconds(counts: Path = Path("/proc/stat")) -> float:
    """For how long others have had this virtual machine's processors, the mean of them, since it began; 0 where nobody counts."""
    if not counts.exists():
        return 0.0
    ticks = [int(line.split()[STOLEN_TICKS]) for line in counts.read_text().splitlines() if re.match(r"cpu\d", line)]
    return statistics.mean(ticks) / os.sysconf("SC_CLK_TCK")


def is_busy(core: EngineCore) -> bool:
    """Whether every slot of its batch has a request, or will have one."""
    return bool(core.scheduler.waiting) or len(core.scheduler.running) == core.scheduler.limits.max_running


def reply_length(num_tokens: int, number: int) -> int:
    """Of the reply to prompt `number` where replies shall have about so many tokens."""
    return round(num_tokens * (SHORTEST + number * GOLDEN_RATIO % 1.0))


def longest_reply(num_tokens: int) -> int:
    return round(num_tokens * (SHORTEST + 1.0))
