import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import bench_speculative
from eagle_rt.bench import sweep
from eagle_rt.bench.report import best_per_batch_size, flags
from eagle_rt.bench.sweep import STOPPED, Setting, grid, measure_once
from eagle_rt.leave import INTERRUPTED
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape


def test_the_grid_skips_what_cannot_be_drafted() -> None:
    settings = grid([1, 4], [1, 3], [1, 2], [4, 8])
    trees = [setting.tree for setting in settings if setting.batch_size == 4]
    assert trees == [NO_SPECULATION, TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(3, 2, 4), TreeShape(3, 2, 8)]
    assert settings[0] == Setting(1, NO_SPECULATION)


def test_a_small_sweep(target_dir: Path, head_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = bench_speculative.main(
        f"--model-path {target_dir} --speculative-draft-model-path {head_dir} --device cpu --steps 1 3 --topk 1 2 "
        f"--num-draft-tokens 4 --batch-size 1 2 --num-prompts 3 --max-new-tokens 6 --repeats 2 --max-total-tokens 2048 "
        f"--output {tmp_path / 'rows.jsonl'} --plot {tmp_path / 'plots'}".split()
    )
    assert status == 0
    lines = capsys.readouterr().out.strip().splitlines()
    document = json.loads(lines[-1])
    rows = document["rows"]
    assert len(rows) == 2 * 4
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert row["num_tokens"] <= 3 * 6
        assert row["repeats"] == 2
        assert row["step_ms"] == pytest.approx(row["draft_ms"] + row["verify_ms"] + row["other_ms"], abs=0.01)
        if row["steps"] == 0:
            assert (row["speedup"], row["mean_accepted_tokens"], row["acceptance_by_depth"]) == (1.0, 1.0, [])
    assert [entry["batch_size"] for entry in document["recommended"]] == [1, 2]
    assert (document["environment"]["algorithm"], document["environment"]["head"]) == ("EAGLE3", str(head_dir))
    assert "recommended at batch 2" in lines[-2]
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["tokens_per_second"] for row in written] == [row["tokens_per_second"] for row in rows]
    assert len(list((tmp_path / "plots").glob("*.png"))) == 7


def test_another_algorithm_is_the_one_that_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    """However slow its trees are."""
    arguments = "--device cpu --num-prompts 1 --max-new-tokens 8 --repeats 1 --steps 1 --topk 1 --speculative-algorithm EAGLE"
    with patch.object(bench_speculative, "best_per_batch_size", lambda rows: rows[1:]):
        assert bench_speculative.main(arguments.split()) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert document["recommended"][0]["flags"].startswith("--speculative-algorithm EAGLE --speculative-tree fixed")
    assert document["environment"]["algorithm"] == "EAGLE"


def test_trees_by_a_rule_beside_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\nclass Roots:\n    def expand(self, level, sequences):\n        return []\n\n"
        "    def keep(self, candidates, sequences):\n        return np.arange(len(candidates))\n"
    )
    arguments = (
        f"--device cpu --num-prompts 1 --max-new-tokens 8 --repeats 2 --steps 3 --topk 3 --num-draft-tokens 8 --plot {tmp_path}"
    )
    for name, shape, mean_size in ((tmp_path / "tree.json", (2, 2, 4), 4.0), (f"{tmp_path / 'mine.py'}:Roots", (3, 3, 8), 4.0)):
        with patch.object(bench_speculative, "best_per_batch_size", lambda rows: rows[2:]):
            assert bench_speculative.main([*arguments.split(), "--speculative-tree", str(name)]) == 0
        document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert [row["kind"] for row in document["rows"]] == ["none", "fixed", str(name)]
        row = document["rows"][-1]
        assert (row["steps"], row["topk"], row["num_draft_tokens"]) == shape
        assert row["mean_tree_size"] == mean_size
        assert f"--speculative-tree {name} --speculative-num-steps {shape[0]} " in document["recommended"][0]["flags"]
    assert bench_speculative.main(["--device", "cpu", "--tune", "--speculative-tree", "a:B"]) == 1
    assert "--speculative-tree is a:B, but must be left out for --tune" in capsys.readouterr().err


def test_a_class_that_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def draft(self, sequences):\n        return [([5, 6, 7, 8], [-1, 0, 1, -1])] * len(sequences)\n"
    )
    arguments = "--device cpu --num-prompts 1 --max-new-tokens 8 --repeats 1 --num-draft-tokens 3 9 --speculative-algorithm"
    assert bench_speculative.main([*arguments.split(), f"{tmp_path / 'mine.py'}:Mine"]) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [(row["kind"], row["mean_tree_size"]) for row in document["rows"]] == [("none", 1.0), ("fixed", 3.0), ("fixed", 5.0)]
    assert document["environment"]["head"] is None


def test_copies_of_every_length(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no head drafts a tree is a chain, whatever depths and widths are asked for."""
    arguments = "--device cpu --num-prompts 1 --max-new-tokens 8 --repeats 1 --num-draft-tokens 4 9 --speculative-algorithm NGRAM"
    assert bench_speculative.main([*arguments.split(), "--adaptive"]) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    trees = [(row["kind"], row["steps"], row["topk"], row["num_draft_tokens"]) for row in document["rows"]]
    assert trees == [("none", 0, 0, 1), ("fixed", 3, 1, 4), ("fixed", 8, 1, 9), ("adaptive", 8, 1, 9)]
    assert document["environment"]["head"] is None
    assert bench_speculative.main([*arguments.split(), "--tune"]) == 1
    assert "--speculative-algorithm is NGRAM, but must be one with a head" in capsys.readouterr().err


def test_what_does_not_fit_takes_nothing_from_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a prompt of forty tokens and the nodes of a tree."""
    small = "--device cpu --num-prompts 1 --max-new-tokens 4 --repeats 2 --max-total-tokens 110"
    arguments = f"{small} --steps 5 --topk 4 --num-draft-tokens 4 60"
    assert bench_speculative.main(arguments.split()) == 0
    output = capsys.readouterr()
    document = json.loads(output.out.strip().splitlines()[-1])
    assert [(row["num_draft_tokens"], row["repeats"]) for row in document["rows"]] == [(1, 2), (4, 2)]
    (incomplete,) = document["incomplete"]
    assert incomplete["tree"] == {"num_steps": 5, "top_k": 4, "num_draft_tokens": 60}
    assert "measured 0 of 2 times: batch 1, fixed (5, 4, 60): the prompt has" in output.err
    assert bench_speculative.main(f"{small} --context-length 20".split()) == 1
    assert "error: the prompt has" in capsys.readouterr().err


def test_nothing_is_told_of_what_has_nothing_to_be_compared_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_trees(*arguments: Any) -> None:
        setting = arguments[2].setting
        if (setting.batch_size, setting.tree) == (2, NO_SPECULATION):
            raise torch.OutOfMemoryError("no memory")
        measure_once(*arguments)

    monkeypatch.setattr(sweep, "measure_once", measure_trees)
    arguments = "--device cpu --batch-size 1 2 --num-prompts 1 --max-new-tokens 4 --repeats 1 --steps 1 --topk 1"
    assert bench_speculative.main(arguments.split()) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [row["batch_size"] for row in document["rows"]] == [1, 1]
    assert [own["problem"] for own in document["incomplete"]] == ["no memory"]


def test_what_was_measured_before_a_stop_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured = []

    def measure_thrice_and_stop(*arguments: Any) -> None:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(measure_once(*arguments))

    monkeypatch.setattr(sweep, "measure_once", measure_thrice_and_stop)
    arguments = "--device cpu --num-prompts 1 --max-new-tokens 4 --repeats 2 --steps 1 --topk 1"
    assert bench_speculative.main(arguments.split()) == INTERRUPTED
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [(row["steps"], row["repeats"]) for row in document["rows"]] == [(0, 2), (1, 1)]
    assert [own["problem"] for own in document["incomplete"]] == [STOPPED]
    measured[:] = [None] * 3
    with pytest.raises(KeyboardInterrupt):  # nothing was
        bench_speculative.main(arguments.split())


def test_recommended_flags_are_those_of_the_fastest() -> None:
    rows = [
        {"batch_size": 1, "kind": "none", "steps": 0, "topk": 0, "num_draft_tokens": 1, "tokens_per_second": 50.0},
        {"batch_size": 1, "kind": "fixed", "steps": 3, "topk": 2, "num_draft_tokens": 6, "tokens_per_second": 80.0},
    ]
    (best,) = best_per_batch_size(rows)
    wanted = "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 6"
    assert flags(best, "EAGLE") == f"--speculative-algorithm EAGLE --speculative-tree fixed {wanted}"
    assert "no tree was faster" in flags(rows[0], "EAGLE")


def test_unknown_prompts_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_speculative.main(["--dataset", "nothing"]) == 1
    assert "no prompts found for --dataset nothing" in capsys.readouterr().err
