"""The GPU benchmark runs through, and goes on where it was cut."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_part_runs_and_none_runs_twice(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "gpu.json"
    command = "gpu.py --device cpu --shape builtin --dtype float32 --quick --attention-backend torch --max-total-tokens 8192"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--output", str(output)])
    bench.main()
    results = json.loads(output.read_text())
    assert set(results) == set(bench.PARTS)
    assert all(row.get("graph_equals_eager", True) for row in results["exactness"]["rows"])
    assert not any(row["gaps_where_different"] for row in results["exactness"]["rows"])
    assert results["attention"]["rows"][0]["triton_error"] < 1e-5
    assert {(row["kind"], row["steps"]) for row in results["sweep"]["rows"]} == {("none", 0), ("fixed", 3), ("adaptive", 5)}

    del results["kernels"]
    output.write_text(json.dumps(results))
    for name in bench.PARTS:
        if name != "kernels":
            monkeypatch.setitem(bench.PARTS, name, lambda bench: pytest.fail("it was done already"))
    bench.main()
    assert set(json.loads(output.read_text())) == set(bench.PARTS)
    assert "== kernels" in capsys.readouterr().out


def test_the_byte_floor_counts_every_weight_that_a_step_reads(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "gpu.py --device cpu --shape builtin --dtype float32 --quick --attention-backend torch --max-total-tokens 512"
    measured = bench.Bench(bench.make_parser().parse_args(command.split()[1:]))
    models = measured.models
    plain = bench.step_bytes(measured, bench.NO_SPECULATION, context=0)
    target = sum(file.stat().st_size for file in (bench.model_info(measured.base).directory).glob("*.safetensors"))
    # The checkpoint is in half precision, and no step reads all of the embeddings; norms are not counted.
    embeddings = models.target.embedding.nbytes
    is_tied = models.spec.tie_word_embeddings
    assert plain == pytest.approx(2 * target - (0 if is_tied else embeddings), rel=0.02)
    tree = bench.step_bytes(measured, bench.TreeShape(3, 2, 8), context=0)
    deeper = bench.step_bytes(measured, bench.TreeShape(4, 2, 8), context=0)
    deepest = bench.step_bytes(measured, bench.TreeShape(5, 2, 8), context=0)
    assert plain < tree < deeper
    assert deepest - deeper == deeper - tree
