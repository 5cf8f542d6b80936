"""The benchmark of adaptive trees runs through, and compares like with like."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import adaptive
from eagle_rt.bench import lockstep
from eagle_rt.config import EngineConfig
from eagle_rt.engine.core import EngineCore


def run(monkeypatch: pytest.MonkeyPatch, output: Path, command: str) -> dict:
    monkeypatch.setattr(sys, "argv", ["adaptive.py", *command.split(), "--output", str(output)])
    adaptive.main()
    (file,) = output.glob("*.json")
    return json.loads(file.read_text())


def test_points_compare_the_same_texts(target_dir: Path, head_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = f"--device cpu --model-path {target_dir} --speculative-draft-model-path {head_dir} --max-total-tokens 2048"
    settings = "--datasets hostile --batch-size 2 --temperatures 0 1 --trees 2,1,3 --bounds 2,2,5"
    lengths = "--max-new-tokens 8 --repeats 2 --most-stolen 1 --settle-seconds 0"
    progress: list[list[int]] = []
    original = lockstep.full_rates

    def watched(cores: list, prompts: list, sampling: object) -> list[float]:
        counts = [0] * len(cores)
        for index, core in enumerate(cores):

            def step(index: int = index, core: EngineCore = core) -> list:
                events = EngineCore.step(core)
                counts[index] += sum(len(event.tokens) for event in events)
                progress.append(counts.copy())
                return events

            core.step = step
        return original(cores, prompts, sampling)

    monkeypatch.setattr(lockstep, "full_rates", watched)
    monkeypatch.setattr(lockstep, "STEPS_OF_A_TURN", 1)
    document = run(monkeypatch, tmp_path, f"points {pair} {settings} {lengths}")
    assert [row["temperature"] for row in document["rows"]] == [0, 1]
    for row in document["rows"]:
        assert set(row["tokens_per_second"]) == {"none", "fixed (2, 1, 3)", "adaptive (2, 2, 5)"}
        assert min(row["tokens_per_second"].values()) > 0
        assert row["accepted"]["none"] == 1
        assert row["step_ms"]["none"]["verify"] > 0
    # No engine runs ahead of another by more than a step's tokens for two requests.
    assert all(max(counts) - min(counts) <= 2 * 5 + 2 for counts in progress if min(counts) > 0)
    assert {row["setting"] for row in document["mix"]} == set(document["rows"][0]["tokens_per_second"])


def test_settling_serves_other_prompts(target_dir: Path, head_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the point does not have; a data set that has none of those is refused."""
    questions = [f"What is {number} plus {number}?" for number in range(8)]
    (tmp_path / "sums.jsonl").write_text("\n".join(json.dumps({"prompt": question}) for question in questions))
    pair = f"--device cpu --model-path {target_dir} --speculative-draft-model-path {head_dir} --max-total-tokens 2048"
    settings = f"--datasets sums --dataset-dir {tmp_path} --batch-size 2 --temperatures 0 --trees 2,1,3 --bounds 2,2,5"
    lengths = "--max-new-tokens 4 --repeats 1 --most-stolen 1 --settle-seconds 0.001"
    measured, others = [], []
    rates, generate = lockstep.full_rates, adaptive.generate
    monkeypatch.setattr(
        lockstep, "full_rates", lambda cores, prompts, sampling: measured.append(prompts) or rates(cores, prompts, sampling)
    )
    monkeypatch.setattr(
        adaptive, "generate", lambda core, prompts, sampling: others.append(prompts) or generate(core, prompts, sampling)
    )
    command = f"points {pair} {settings} {lengths} --prompts-per-slot 1"
    run(monkeypatch, tmp_path, f"{command} --least-prompts 5")
    assert [len(prompts) for prompts in measured] == [5]
    assert [len(prompts) for prompts in others] == [3, 8], "before all points, and before this one, three again and again"
    assert not any(prompt in measured[0] for prompts in others for prompt in prompts)
    with pytest.raises(ValueError, match="sums has 8 prompts and none after number 8"):
        run(monkeypatch, tmp_path, f"{command} --least-prompts 8")


def test_what_texts_repeat(target_dir: Path, head_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts without copies beside drafts with them."""
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(json.dumps({"prompt": f"What is {n} plus {n}?"}) for n in range(4)))
    pair = f"--device cpu --model-path {target_dir} --speculative-draft-model-path {head_dir} --max-total-tokens 2048"
    settings = f"--datasets gsm8k asked_again --dataset-dir {tmp_path} --batch-size 1 --temperatures 0 --bounds 2,2,5"
    lengths = "--max-new-tokens 24 --least-prompts 2 --repeats 1 --most-stolen 1 --settle-seconds 0"
    given = {name: [] for name in ("off", "auto")}
    original = adaptive.core_for

    def noted(models: object, config: EngineConfig, setting: object) -> EngineCore:
        core = original(models, config, setting)
        if stepper := core.runner.host_stepper:
            given[config.speculative_ngram].append(stepper.copying)
        return core

    monkeypatch.setattr(adaptive, "core_for", noted)
    document = run(monkeypatch, tmp_path / "results", f"ngram {pair} {settings} {lengths}")
    assert [row["dataset"] for row in document["rows"]] == ["gsm8k", "asked_again"]
    assert given["off"] == [None]
    assert given["auto"] != [None]
    for row in document["rows"]:
        assert min(row[name] for name in ("none", "off", "auto")) > 0
        assert row["accepted"][0] == 1
