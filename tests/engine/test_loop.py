"""The main loop: commands in, reports out."""

import logging
from pathlib import Path

import pytest
from engines import make_core

from eagle_rt.engine import loop
from eagle_rt.engine.loop import run_loop
from eagle_rt.engine.messages import Abort, Command, Rejected, Report, Shutdown, Submit, decode, encode
from eagle_rt.engine.metrics import EngineMetrics
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.request import TokenEvent

SETTING = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


def serve(target_dir: Path, script: list[list[Command]]) -> list[Report]:
    """Feed one list of commands per iteration, then let the work finish and shut down."""
    core = make_core(target_dir)
    reports: list[Report] = []

    def receive(wait: bool) -> list[Command]:
        if script:
            return script.pop(0)
        return [Shutdown()] if wait else []

    run_loop(core, receive, reports.append)
    return reports


def test_every_request_is_answered_to_its_end(target_dir: Path) -> None:
    script: list[list[Command]] = [
        [Submit("good", [5, 6, 7], SETTING), Submit("empty", [], SETTING), Submit("gone", [8, 9], SETTING)],
        [],
        [Abort("gone"), Abort("never there"), Submit("late", [5, 6], SETTING)],
    ]
    reports = serve(target_dir, script)
    tokens = dict.fromkeys(("good", "gone", "late"), 0)
    ends = {}
    for report in reports:
        if isinstance(report, TokenEvent):
            tokens[report.request_id] += len(report.tokens)
            if report.finish_reason:
                ends[report.request_id] = report.finish_reason["type"]
    assert ends == {"good": "length", "gone": "abort", "late": "length"}
    assert tokens["good"] == tokens["late"] == 8
    assert [report for report in reports if isinstance(report, Rejected)] == [Rejected("empty", "the prompt is empty")]


def test_what_has_come_to_a_stop_string_is_finished(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "METRICS_INTERVAL", 0.0)
    started = [Submit(name, [5, 6, 7], SETTING) for name in ("stopped", "given up", "left alone")]
    ended = [decode(encode(Abort("stopped", is_complete=True))), Abort("given up")]
    metrics = [report for report in serve(target_dir, [started, [], ended]) if isinstance(report, EngineMetrics)][-1]
    assert (metrics.num_finished, metrics.num_aborted) == (2, 1)


def test_totals_are_reported_and_logged(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "METRICS_INTERVAL", 0.0)
    monkeypatch.setattr(loop, "LOG_INTERVAL", 0.0)
    with caplog.at_level(logging.INFO, logger="eagle_rt.engine.loop"):
        reports = serve(target_dir, [[Submit("a", [5, 6, 7], SETTING)]])
    assert [report for report in reports if isinstance(report, EngineMetrics)][-1].num_generated_tokens == 8
    assert "running 1, queued 0" in caplog.text
    assert "accepted tokens per step, cache" in caplog.text
