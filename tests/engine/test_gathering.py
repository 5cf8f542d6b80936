"""Prompts that wait for each other, with made-up times."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engines import make_core, random_prompts, run

from eagle_rt.engine.gathering import PROMPTS_REMEMBERED, Gathering, PassCosts
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.plan import StepResult
from eagle_rt.engine.request import Request
from eagle_rt.engine.scheduler import Scheduler, SchedulerLimits


def learned(ms: Callable[[int], float], count: int = 200) -> PassCosts:
    costs, rng = PassCosts(), random.Random(0)
    for _ in range(count):
        num_rows = rng.randrange(20, 500)
        costs.learn(num_rows, ms(num_rows))
    return costs


@pytest.mark.parametrize("ms", [lambda rows: 6.5, lambda rows: max(6.5, 0.03 * rows), lambda rows: 25.0 + 8.0 * rows])
@pytest.mark.parametrize("num_rows", [64, 100, 200, 300, 400])
def test_what_a_pass_takes_is_learned(ms: Callable[[int], float], num_rows: int) -> None:
    noise = random.Random(1)
    costs = learned(lambda rows: ms(rows) * noise.uniform(0.9, 1.1))
    assert costs.ms(num_rows) == pytest.approx(ms(num_rows), rel=0.15)


def test_where_nothing_is_known_every_row_takes_as_long() -> None:
    costs = PassCosts()
    assert costs.ms(64) == 0.0
    costs.learn(64, 8.0)
    assert (costs.ms(8), costs.ms(64), costs.ms(640)) == (1.0, 8.0, 80.0)
    costs.learn(512, 16.0)
    assert (costs.ms(8), costs.ms(288), costs.ms(1024)) == (1.0, 12.0, 32.0)


def test_a_standstill_is_not_believed_and_a_change_is() -> None:
    costs = learned(lambda rows: 6.0)
    costs.learn(100, 5000.0)
    assert costs.ms(100) < 7.0
    for _ in range(100):
        costs.learn(100, 30.0)
    assert costs.ms(100) == pytest.approx(30.0, rel=0.1)


@dataclass
class Load:
    """Prompts of 64 tokens that are read in passes of `fixed` ms while `decoding` decode; asked about every millisecond."""

    fixed: float
    decoding: int
    most_rows: int = 4096
    now: float = 0.0
    waiting: list[Request] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gathering = Gathering(lambda rows: self.fixed, self.most_rows, lambda: self.now)

    def ask(self) -> None:
        if self.waiting and not self.gathering.waits(self.waiting, self.decoding):
            self.groups.append(len(self.waiting))
            self.waits += [self.now - came for came in self.came]
            self.gathering.let_in(self.waiting)
            self.waiting, self.came = [], []

    def pass_until(self, then: float) -> None:
        while self.now < then:
            self.now += 1.0
            self.ask()

    def arrive(self, count: int = 1) -> None:
        for _ in range(count):
            request = Request("", [1] * 64, SamplingParams(), seed=0)
            request.prefill_end = 64
            self.waiting.append(request)
            self.came.append(self.now)
        self.ask()


@pytest.mark.parametrize(("fixed", "decoding", "every"), [(6.5, 32, 14), (6.5, 64, 8), (2.0, 16, 50), (6.5, 4, 100), (0.0, 32, 5)])
def test_groups_are_as_large_as_is_best(fixed: float, decoding: int, every: int) -> None:
    load = Load(fixed, decoding)
    for number in range(1, 200):
        load.arrive()
        load.pass_until(number * every)
    best = min(range(1, 40), key=lambda size: every * (size - 1) / 2 + fixed * decoding / size)
    late = load.groups[len(load.groups) // 2 :]
    assert abs(sum(late) / len(late) - best) <= 1.0
    assert (best > 1) == (max(late) > 1)


def test_no_more_wait_than_one_pass_can_read() -> None:
    load = Load(fixed=6.5, decoding=64, most_rows=128)
    for number in range(1, 100):
        load.arrive()
        load.pass_until(8 * number)
    assert set(load.groups[len(load.groups) // 2 :]) == {2}


def test_nobody_waits_for_what_does_not_come() -> None:
    load = Load(fixed=6.5, decoding=32)
    for number in range(1, 50):
        load.arrive()
        load.pass_until(10 * number)
    load.pass_until(load.now + 1000)
    assert max(load.waits) <= 6.5 * 32, "all together never more than a pass costs"
    before = len(load.waits)
    for _ in range(10):
        load.arrive()
        load.pass_until(load.now + 3000)
    assert sum(load.waits[before + 2 :]) == 0.0, "prompts that come rarely are read at once"


def test_a_burst_does_not_make_the_next_one_wait_for_long() -> None:
    load = Load(fixed=6.5, decoding=32)
    load.arrive(32)
    load.pass_until(300)
    before = len(load.waits)
    load.arrive()
    load.pass_until(2000)
    assert 0.0 <= max(load.waits[before:]) <= 6.5 * 32


@dataclass
class Machine:
    """A scheduler on a machine whose steps and passes take made-up times; each step gains 1 to 4 tokens of each request."""

    step_ms: Callable[[int], float]
    pass_ms: Callable[[int], float]
    gathers: bool
    now: float = 0.0

    def __post_init__(self) -> None:
        self.costs, self.rng = PassCosts(), random.Random(0)
        gathering = Gathering(self.costs.ms, 512, lambda: self.now) if self.gathers else None
        limits = SchedulerLimits(page_size=16, num_pages=2000, num_scratch=8, max_running=32, chunk_size=512, context_length=2000)
        self.scheduler = Scheduler(limits, frozenset(), use_prefix_cache=False, gathering=gathering)

    def serve(self, count: int) -> float:
        """Tokens a millisecond while as many requests wait as there is room for, and more."""
        for number in range(count):
            prompt = [1] * self.rng.randrange(30, 150)
            sampling = SamplingParams(max_new_tokens=self.rng.randrange(100, 160))
            self.scheduler.submit(Request(str(number), prompt, sampling, seed=0))
        num_tokens = 0
        while self.scheduler.has_work:
            plan = self.scheduler.plan()
            self.scheduler.check_integrity()
            assert plan, "something is always done"
            if plan.decodes:
                self.now += self.step_ms(len(plan.decodes))
            if rows := sum(chunk.stop - chunk.start for chunk in plan.chunks):
                self.now += self.pass_ms(rows)
                self.costs.learn(rows, self.pass_ms(rows))
            result = StepResult(
                [2 for chunk in plan.chunks if chunk.is_last],
                [[2] * self.rng.randrange(1, 5) for _ in plan.decodes],
                [3] * len(plan.decodes),
                [False] * len(plan.decodes),
            )
            num_tokens += sum(len(event.tokens) for event in self.scheduler.commit(plan, result))
        return num_tokens / self.now


def gain(step_ms: Callable[[int], float], pass_ms: Callable[[int], float]) -> float:
    """Of gathering, as a ratio."""
    with_it, without = (Machine(step_ms, pass_ms, gathers).serve(600) for gathers in (True, False))
    return with_it / without


def test_gathering_pays_where_weights_take_the_time() -> None:
    """A GPU that reads a large model's weights for a pass, however many rows it has."""
    assert gain(lambda batch: 8.5, lambda rows: max(6.5, 0.03 * rows)) > 1.06


@pytest.mark.parametrize(
    ("step_ms", "pass_ms"),
    [
        (lambda batch: 8.0 * batch, lambda rows: 8.0 * rows),
        (lambda batch: 25.0 + 8.0 * max(0, batch - 8), lambda rows: 25.0 + 8.0 * max(0, rows - 8)),
        (lambda batch: 1.0 + 0.2 * batch, lambda rows: 1.0 + 0.2 * rows),
    ],
)
def test_gathering_costs_nothing_where_rows_do(step_ms: Callable[[int], float], pass_ms: Callable[[int], float]) -> None:
    """As on a CPU."""
    assert gain(step_ms, pass_ms) > 0.985


def test_steps_run_ahead_while_prompts_wait() -> None:
    """For a place, or for each other."""
    machine = Machine(lambda batch: 8.5, lambda rows: 6.5, gathers=True)
    scheduler = machine.scheduler
    for number in range(scheduler.limits.max_running + 4):
        scheduler.submit(Request(str(number), [1, 2, 3], SamplingParams(max_new_tokens=None), seed=0))
    scheduler.commit(plan := scheduler.plan(), StepResult([2] * len(plan.chunks), [], [], []))
    decodes = scheduler.plan()
    assert len(scheduler.waiting) == 4
    assert scheduler.plan_ahead(decodes, 4) is decodes, "there is no place for them"

    scheduler.abort(scheduler.running[-1].id)
    assert scheduler.plan_ahead(decodes, 4) is None
    assert len(scheduler.plan().chunks) == 1, "now there is one, and nothing is known of what passes take"


def test_prompts_that_wait_for_each_other_stop_no_steps() -> None:
    machine = Machine(lambda batch: 8.5, lambda rows: 6.5, gathers=True)
    scheduler = machine.scheduler
    for number in range(PROMPTS_REMEMBERED):
        scheduler.submit(Request(str(number), [1, 2, 3], SamplingParams(max_new_tokens=None), seed=0))
    scheduler.commit(plan := scheduler.plan(), StepResult([2] * len(plan.chunks), [], [], []))
    machine.costs.learn(3, 6.5)
    machine.costs.learn(300, 7.0)
    decodes = scheduler.plan()
    machine.now += 8.5
    scheduler.submit(Request("new", [1, 2, 3], SamplingParams(max_new_tokens=None), seed=0))
    assert scheduler.plan_ahead(decodes, 4) is decodes, "others may join it"
    machine.now += 6.5 * PROMPTS_REMEMBERED
    assert scheduler.plan_ahead(decodes, 4) is None, "it has waited for long enough"
    assert [chunk.request.id for chunk in scheduler.plan().chunks] == ["new"]


class SameForAnyRows(PassCosts):
    """Passes that are said to take as long as many steps, whatever they read; counted."""

    num_passes = 0

    def learn(self, num_rows: int, ms: float) -> None:
        self.num_passes += 1

    def ms(self, num_rows: float) -> float:
        return 100.0


@pytest.mark.parametrize("tree", [None, (2, 2, 4)], ids=str)
def test_fewer_passes_and_the_same_texts(target_dir: Path, head_dir: Path, tree: tuple[int, int, int] | None) -> None:
    prompts = random_prompts(24, seed=8, longest=30)
    settings = [SamplingParams(temperature=0, max_new_tokens=5 + index % 7, ignore_eos=True) for index in range(len(prompts))]
    texts, num_passes = [], []
    for delay in ("on", "off"):
        core = make_core(target_dir, head_dir, tree, prefill_delay=delay, max_running_requests=6)
        core.runner.pass_costs = costs = SameForAnyRows()
        texts.append(run(core, prompts, settings))
        num_passes.append(costs.num_passes)
    assert texts[0] == texts[1]
    assert num_passes[0] < num_passes[1]
