"""A process that compiles the kernels and one that finds them kept compute the same, bit by bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle_rt.kernels.dispatch import HAS_NUMBA

NUM_ROWS = 500
READ_A_TEXT = f"""
import sys
from pathlib import Path
import torch
from engines import load_target
from eagle_rt.attention.rows import RowAttention
from eagle_rt.batch import Batch, HostRows

target, rows = load_target(Path(sys.argv[1])), torch.arange({NUM_ROWS})
tokens = torch.randint(3, target.spec.vocab_size, ({NUM_ROWS},), generator=torch.Generator().manual_seed(0))
batch = Batch(tokens, rows, rows, (0, {NUM_ROWS}), HostRows(({NUM_ROWS},), (range({NUM_ROWS}),)), None)
with torch.inference_mode():
    pool = target.make_pool({NUM_ROWS}, 1)
    output = target.forward(batch, pool, RowAttention(torch.float32), tuple(range(target.spec.num_layers)))
torch.save((output.features, output.hidden), sys.argv[2])
"""


@pytest.mark.skipif(not HAS_NUMBA, reason="nothing is compiled")
def test_kernels_that_were_kept_compute_what_fresh_ones_do(built_in: Path, tmp_path: Path) -> None:
    """Of functions that call each other there are many copies, and which of them a process takes differs between the two."""
    paths = os.pathsep.join(str(own) for own in (Path(__file__).parents[1], Path(__file__).parents[2]))
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    outputs = []
    for name in ("first", "second"):
        command = [sys.executable, "-c", READ_A_TEXT, str(built_in / "target"), str(tmp_path / name)]
        made = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr[-4000:]
        outputs.append(torch.load(tmp_path / name))
    assert list((tmp_path / "kept").rglob("*.nbc")), "nothing was kept"
    for first, second in zip(*outputs, strict=True):
        assert torch.equal(first, second)
