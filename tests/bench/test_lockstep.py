"""What the steps of engines count as that run side by side."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle_rt.bench import lockstep
from eagle_rt.bench.lockstep import LONGEST_STEP, MOST_ROUNDS, Spent, quiet_rounds, stolen_seconds
from eagle_rt.engine.params import SamplingParams


def test_a_machine_that_stands_still_counts_as_a_long_step() -> None:
    """Prompts of 50 tokens, and one of 400, take two hundredths of a second each ten tokens; steps a tenth."""
    spent = Spent(num_prompts=4)
    steps = [(0.1, 0, 0.0)] * 9 + [(0.1, 50, 0.1)] * 3 + [(0.0, 400, 0.8)]
    for step in steps:
        spent.add(2, *step)
    assert spent.num_tokens == 2 * len(steps)
    total = sum(decoding + reading for decoding, _, reading in steps)
    assert spent.seconds(spent.num_tokens) == pytest.approx(total)
    spent.add(1, 60.0, 0, 0.0)
    spent.add(1, 60.0, 50, 60.0)
    assert spent.seconds(spent.num_tokens) == pytest.approx(total + LONGEST_STEP * (0.1 + 0.1 + 0.1))


def test_engines_are_compared_by_as_many_tokens_after_the_same_prompts() -> None:
    """One of them has said twice as many when the last prompt has been read; either takes a second a token."""
    few, many = Spent(num_prompts=10), Spent(num_prompts=10)
    for spent, num_tokens in ((few, 110), (many, 210)):
        spent.add(10, 0.0, 1000, 50.0)
        for _ in range(num_tokens - 10):
            spent.add(1, 1.0, 0, 0.0)
    assert [spent.seconds(160) for spent in (few, many)] == pytest.approx([200.0, 200.0])
    assert few.num_tokens / few.seconds(few.num_tokens) < 0.9 * many.num_tokens / many.seconds(many.num_tokens)


def test_time_that_others_have_taken(tmp_path: Path) -> None:
    """The mean of two processors; the line of all of them does not count, nor what else the file says."""
    counts = tmp_path / "stat"
    ticks = os.sysconf("SC_CLK_TCK")
    lines = ["cpu  9 9 9 9 9 9 9 99999 0 0", *(f"cpu{n} 9 9 9 9 9 9 9 {n * ticks} 0 0" for n in (1, 2)), "intr 7 7 7 7 7 7 7 7 7 7"]
    counts.write_text("\n".join(lines))
    assert stolen_seconds(counts) == pytest.approx(1.5)
    assert stolen_seconds(tmp_path / "none") == 0.0


@pytest.mark.parametrize(
    ("taken", "expected"),
    [((0.5, 0.0, 0.0), [2, 3]), ((0.0, 0.0), [1, 2]), ((0.5, 0.3, 0.9, 0.4, 0.9, 0.9), [2, 4])],
)
def test_rounds_of_a_disturbed_machine_are_made_again(
    monkeypatch: pytest.MonkeyPatch, taken: tuple[float, ...], expected: list[int]
) -> None:
    """The quietest of six, if none of them is quiet."""
    made: list[int] = []

    def rates(*_: object) -> list[float]:
        made.append(len(made) + 1)
        return [float(made[-1])]

    monkeypatch.setattr(lockstep, "full_rates", rates)
    monkeypatch.setattr(lockstep, "stolen_seconds", lambda: sum(taken[: len(made)]))
    monkeypatch.setattr(lockstep, "time", SimpleNamespace(perf_counter=lambda: float(len(made))))
    rounds = quiet_rounds([], [], SamplingParams(), count=2, most_stolen=0.01)
    assert sorted(own.rates[0] for own in rounds) == expected
    assert len(made) == len(taken) <= 2 * MOST_ROUNDS
