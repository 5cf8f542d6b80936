import json
import sys
from pathlib import Path

import pytest

from benchmarks import cpu_attention


def test_all_ways_are_measured_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "TURNS", 2)
    monkeypatch.setattr(sys, "argv", f"cpu_attention.py --batch-size 3 --context 20 --nodes 1 4 --output {tmp_path}".split())
    cpu_attention.main()
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["shape"], row["nodes"], row["side_by_side"]) for row in rows] == [
        (shape, nodes, is_run) for shape in cpu_attention.SHAPES for nodes in (1, 4) for is_run in (True, False)
    ]
    for row in rows:
        assert min(row[f"{name}_us"] for name in cpu_attention.BACKENDS) > 0
        assert row["error"] < (1e-5 if row["shape"] == "built-in" else 1e-2)
