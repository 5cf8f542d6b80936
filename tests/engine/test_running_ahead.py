"""Captured steps that are launched before the host has read the ones ahead of them, and what may happen meanwhile."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from captured import SETTINGS, make_captured
from engines import make_core, random_prompts, run

from eagle_rt.engine.graphs import GraphResult, StepGraph
from eagle_rt.engine.request import Request
from eagle_rt.engine.runner import Runner


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is launched and read from here on, in order, by the number of the step."""
    log: list[str] = []
    original = StepGraph.launch

    def launch(self: StepGraph, requests: Any, *, follows: bool) -> Callable[[], GraphResult]:
        number = sum(entry.startswith("launch") for entry in log)
        read = original(self, requests, follows=follows)
        log.append(f"launch {number}{' from where the last left off' if follows else ''}")

        def logged() -> GraphResult:
            log.append(f"read {number}")
            return read()

        return logged

    monkeypatch.setattr(StepGraph, "launch", launch)
    return log


def test_a_step_is_launched_before_the_one_ahead_is_read(target_dir: Path, head_dir: Path, launches: list[str]) -> None:
    core = make_captured(target_dir, head_dir, (2, 2, 4), (1,))
    launches.clear()
    run(core, random_prompts(1, seed=3), SETTINGS[:1])
    ahead = " from where the last left off"
    assert launches[:5] == ["launch 0", "launch 1" + ahead, "read 0", "launch 2" + ahead, "read 1"]
    assert sum(entry.startswith("read") for entry in launches) == sum(entry.startswith("launch") for entry in launches)


def test_leaving_and_arriving_while_a_step_runs(target_dir: Path, head_dir: Path) -> None:
    """Requests that are aborted, end or come while the next step is under way: no page is lost, and no one else's text changes."""
    prompts = random_prompts(5, seed=9, longest=12)
    params = [replace(SETTINGS[index % 3], max_new_tokens=[25, 2, 8, 1, 5][index]) for index in range(5)]
    expected = run(make_core(target_dir), prompts, params)

    core = make_captured(target_dir, head_dir, (2, 1, 3), (2, 4), page_size=4)
    texts: dict[str, list[int]] = {str(index): [] for index in range(5)}
    steps: dict[str, int] = {}
    arriving, num_steps = list(range(5)), 0
    while core.has_work or arriving:
        if arriving and num_steps % 3 == 0:
            index = arriving.pop(0)
            core.submit(str(index), prompts[index], params[index])
        if num_steps == 9:
            steps["0"] = core.abort("0").stats.num_steps
        for event in core.step():
            assert not (num_steps >= 9 and event.request_id == "0"), "an aborted request gains nothing"
            texts[event.request_id] += event.tokens
            steps[event.request_id] = event.stats.num_steps
        core.scheduler.check_integrity()
        num_steps += 1
    assert texts["0"] == expected[0][: len(texts["0"])]
    assert len(texts["0"]) < 25
    assert [texts[str(index)] for index in range(1, 5)] == expected[1:]
    metrics = core.current_metrics()
    assert metrics.num_drafts == sum(steps.values()), "a step that a request did not live to see is not counted"
    assert metrics.num_generated_tokens == sum(map(len, texts.values()))
    assert core.scheduler.num_available_pages == core.scheduler.limits.num_pages


@pytest.mark.parametrize(("batch_sizes", "num_beginnings"), [((4,), 1), ((2, 4), 2)])
def test_others_go_on_where_someone_has_left(
    target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch, batch_sizes: tuple[int, ...], num_beginnings: int
) -> None:
    """The next step need not wait to be launched until the host knows who has ended: theirs are then rows of no one, of which
    nothing is learned. But where a smaller graph would do for the others, they begin anew in that."""
    prompts, params = random_prompts(3, seed=9, longest=12), [replace(SETTINGS[0], max_new_tokens=count) for count in (14, 3, 14)]
    expected = run(make_core(target_dir), prompts, params)
    core = make_captured(target_dir, head_dir, (2, 1, 3), batch_sizes, page_size=4)
    launches: list[tuple[int, bool]] = []
    original, learned = StepGraph.launch, []

    def launch(self: StepGraph, requests: tuple[Request, ...], *, follows: bool) -> Callable[[], GraphResult]:
        launches.append((sum(not request.finish_reason for request in requests), follows))
        return original(self, requests, follows=follows)

    monkeypatch.setattr(StepGraph, "launch", launch)
    monkeypatch.setattr(core.runner.choice, "learn", lambda tree, gains, ms, is_sampled: learned.append(len(gains)))
    assert run(core, prompts, params) == expected
    assert sum(not follows for _, follows in launches) == num_beginnings
    assert {count for count, follows in launches if follows} == {3, 2}
    assert learned == [count for count, _ in launches]
    limits = core.scheduler.limits
    inputs = core.runner.graphs.find(3, core.runner.tree_shape)._inputs
    if num_beginnings == 1:
        assert inputs._integers[2].tolist()[1:4:2] == [limits.max_running] * 2, "states that are no one's"
        assert inputs._integers[1].tolist()[1:4:2] == [0, 0], "which do not grow"
    assert core.scheduler.num_available_pages == limits.num_pages


def test_prompts_are_read_while_a_captured_step_runs(
    target_dir: Path, head_dir: Path, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Runner.start_prefill

    def noted_prefill(self: Runner, *args: Any) -> Callable[[], list[int]]:
        launches.append("prefill")
        return prefill(self, *args)

    core = make_captured(target_dir, head_dir, (2, 2, 4), (2,))
    core.submit("first", [1, 2, 3], SETTINGS[0])
    for _ in range(2):
        core.step()
    launches.clear()
    monkeypatch.setattr(Runner, "start_prefill", noted_prefill)
    core.submit("second", [4, 5, 6, 7], SETTINGS[0])
    while "prefill" not in launches:
        core.step()
    assert [entry.split()[0] for entry in launches[-3:]] == ["launch", "prefill", "read"]
