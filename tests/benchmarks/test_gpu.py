"""The GPU benchmark runs through, goes on where it was cut, and notes what fails."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_parts
from eagle_rt.engine.load import model_info
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

COMMAND = "gpu.py --device cpu --shape builtin --dtype float32 --quick --attention-backend torch --max-total-tokens 8192"


def test_every_job_runs_and_none_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", [*COMMAND.split(), "--output", str(output)])
    assert gpu.main() == 0
    results = json.loads(output.read_text())
    assert set(results) == set(gpu.PARTS)
    exact = [outcome["rows"][0] for outcome in results["exactness"].values()]
    assert all(row.get("graph_equals_eager", True) and not row["gaps_where_different"] for row in exact)
    attended = [outcome["rows"][0] for part in ("attention", "latents") for outcome in results[part].values()]
    assert all(row["triton_error"] < 1e-5 for row in attended)
    loads = [outcome["rows"][0] for outcome in results["load"].values()]
    assert all(row["requests"] > 8 and row["ends"]["length"] and row["ends"]["abort"] for row in loads)
    assert not any(row["unanswered"] or row["missing_pages"] for row in loads)
    swept = [row for outcome in results["sweep"].values() for row in outcome["rows"]]
    assert {(row["batch_size"], row["kind"]) for row in swept} == {
        (batch_size, kind) for batch_size in (1, 2) for kind in ("none", "fixed", "adaptive")
    }

    del results["kernels"], results["sweep"]["batch 2"]
    output.write_text(json.dumps(results))
    started = []
    monkeypatch.setattr(gpu, "outcome_of", lambda job: started.append(job) or {"rows": [{}], "seconds": 0.0})
    monkeypatch.setattr(gpu, "show", lambda part, name, outcome: None)
    assert gpu.main() == 0
    assert len(started) == 1 + len(results["attention"])


def test_a_job_that_fails_is_noted_and_run_again_only_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fails = [True]

    def first() -> gpu.Rows:
        if fails:
            raise ValueError("no such kernel")
        return [{"us": 1}]

    monkeypatch.setattr(gpu, "PARTS", {"kernels": lambda bench: {"first": first, "second": lambda: [{"us": 2}]}})
    output = tmp_path / "gpu.json"
    command = [*COMMAND.split(), "--parts", "kernels", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu.main() == 1
    found = json.loads(output.read_text())["kernels"]
    assert (found["first"]["error"], found["second"]["rows"]) == ("ValueError: no such kernel", [{"us": 2}])
    assert "no such kernel" in capsys.readouterr().out

    fails.clear()
    assert gpu.main() == 1
    monkeypatch.setattr(sys, "argv", [*command, "--retry"])
    assert gpu.main() == 0
    assert json.loads(output.read_text())["kernels"]["first"]["rows"] == [{"us": 1}]

    alone = tmp_path / "alone.json"
    monkeypatch.setattr(sys, "argv", [*COMMAND.split(), "--parts", "kernels", "--jobs", "sec", "--output", str(alone)])
    assert gpu.main() == 0
    assert set(json.loads(alone.read_text())["kernels"]) == {"second"}


def test_the_byte_floor_counts_every_weight_that_a_step_reads() -> None:
    measured = gpu.Bench(gpu.make_parser().parse_args(COMMAND.split()[1:]))
    models = measured.models
    plain = gpu_parts.step_bytes(measured, NO_SPECULATION, context=0)
    target = sum(file.stat().st_size for file in model_info(measured.base).directory.glob("*.safetensors"))
    # The checkpoint is in half precision, and no step reads all of the embeddings; norms are not counted.
    embeddings = models.target.embedding.nbytes
    is_tied = models.spec.tie_word_embeddings
    assert plain == pytest.approx(2 * target - (0 if is_tied else embeddings), rel=0.02)
    tree, deeper, deepest = (gpu_parts.step_bytes(measured, TreeShape(steps, 2, 8), context=0) for steps in (3, 4, 5))
    assert plain < tree < deeper
    assert deepest - deeper == deeper - tree
