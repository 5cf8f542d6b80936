"""What steps that the host decides on are said to take, besides their parts."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from engines import make_core, random_prompts, run

from eagle_rt.engine.params import SamplingParams
from eagle_rt.speculate import host_step
from eagle_rt.speculate.policy import DraftPlan, FixedPlan, FixedPolicy, StepRecord
from eagle_rt.speculate.sequences import HostSequence

LESSON_SECONDS = 0.01


class Lesson(FixedPlan):
    """Learning from one in two takes long. records: of whether it did, and what was said of that step."""

    def __init__(self, sequences: Sequence[HostSequence], records: list[tuple[bool, StepRecord]]) -> None:
        super().__init__(sequences)
        self.records, self.teaches = records, len(records) % 2 == 0

    def learn(self, record: StepRecord) -> None:
        self.records.append((self.teaches, record))
        if self.teaches:
            time.sleep(LESSON_SECONDS)


class Lessons(FixedPolicy):
    def __init__(self) -> None:
        super().__init__(None)
        self.records: list[tuple[bool, StepRecord]] = []

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        return Lesson(sequences, self.records)


def test_what_lessons_take_is_told_but_is_no_part_of_a_step(target_dir: Path, head_dir: Path) -> None:
    """Else drafts would look dear to who hardly drafts."""
    core, policy = make_core(target_dir, head_dir, (2, 2, 4)), Lessons()
    assert core.runner.host_stepper
    core.runner.host_stepper.policy = policy
    run(core, random_prompts(1, seed=4), [SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True)])
    records = [record for _, record in policy.records]
    assert len(records) > 4
    assert records[0].teaching_ms == 0.0, "not known yet"
    assert min(record.teaching_ms for record in records[2:]) > 0.5 * 1000 * LESSON_SECONDS
    assert core.runner.host_stepper._choosing[False].ms < 0.5 * 1000 * LESSON_SECONDS


def test_a_pause_between_steps_is_what_a_short_one_takes() -> None:
    """In others nothing was asked for; and those in which prompts are read do not count."""
    now, pauses = 100.0, host_step.Pauses()
    pauses.end(now)
    assert pauses.ms == 0.0, "none was before the first step"
    for number in range(40):
        pauses.begin(now)
        now += 0.004 if number < 20 else 0.002 if number % 2 else 1.0
        pauses.end(now)
        assert pauses.ms == pytest.approx(4.0 if number < 29 else 2.0)
        pauses.begin(now)
        now += 0.5
        pauses.skip()
        pauses.end(now)


def test_what_choosing_takes_is_a_mean_of_many_steps() -> None:
    """Some ask and learn much, most do not."""
    choosing = host_step.Choosing()
    assert choosing.ms == 0.0
    choosing.add(0.3)
    choosing.add(0.1)
    assert choosing.ms == pytest.approx(0.2)
    for number in range(600):
        choosing.add(0.0 if number % 6 else 0.6)
    assert choosing.ms == pytest.approx(0.1, rel=0.1)
