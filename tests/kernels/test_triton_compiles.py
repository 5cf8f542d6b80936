"""Every kernel compiles for GPUs, down to its machine code, on a machine without one: Triton brings its own assembler."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import eagle_rt.kernels.triton

FOLDER = Path(eagle_rt.kernels.triton.__file__).parent
# Bytes of shared memory that a program may have: those of a GPU for games or of an L40S, and of an H100. Compiled for an H100,
# kernels took as much as for any other, or more (of compute capability 8.0, 8.9, 10.0 and 12.0; Triton 3.6 and 3.9).
LISTS = {"others": 99 * 2**10, "attention": 99 * 2**10, "products": 99 * 2**10, "large_products": 227 * 2**10}
# Of each thread. Where sums did not fit into registers it were thousands.
FEW_BYTES = 256


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def kernels_of(name: str) -> list[dict[str, Any]]:
        command = [sys.executable, Path(__file__).parent / "launches.py", name]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stderr[-2000:]
        assert "Warning" not in result.stderr
        return [kernel | {"most": LISTS[name]} for kernel in json.loads(result.stdout)]

    with ThreadPoolExecutor(2) as pool:
        return [kernel for kernels in pool.map(kernels_of, LISTS) for kernel in kernels]


def test_no_kernel_is_missing(compiled: list[dict[str, Any]]) -> None:
    launched = {
        (file.stem, line.split("(")[0].removeprefix("def "))
        for file in FOLDER.glob("*.py")
        for before, line in zip(file.read_text().split("\n"), file.read_text().split("\n")[1:], strict=False)
        if before.startswith("@triton.jit") and f"{line.split('(')[0].removeprefix('def ')}[" in file.read_text()
    }
    assert launched == {(kernel["module"], kernel["kernel"]) for kernel in compiled}


def test_kernels_fit_into_the_memory_that_programs_share(compiled: list[dict[str, Any]]) -> None:
    assert [kernel for kernel in compiled if kernel["shared"] > kernel["most"]] == []


def test_hardly_anything_is_spilled(compiled: list[dict[str, Any]]) -> None:
    assert [kernel for kernel in compiled if kernel["spilled"] > FEW_BYTES] == []
