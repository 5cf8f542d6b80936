"""Our kernels as they are compiled for processors that have AVX2 and not AVX-512."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_rt.kernels.cpu.instructions import has_instructions

FEATURES = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2"


def test_compiled_for_avx2_they_equal_their_twins_too(tmp_path: Path) -> None:
    if not has_instructions("avx512f"):
        pytest.skip("they are compiled so here anyway")
    own = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": FEATURES, "NUMBA_CACHE_DIR": str(tmp_path)}
    path = "from eagle_rt.kernels.cpu.product import HAS_FAST_PAIRS, MOST_ROWS; assert (HAS_FAST_PAIRS, MOST_ROWS) == (False, 6)"
    for arguments in (["-c", path], ["-m", "pytest", str(Path(__file__).with_name("test_cpu_kernels.py"))]):
        done = subprocess.run([sys.executable, *arguments], env={**os.environ, **own}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
