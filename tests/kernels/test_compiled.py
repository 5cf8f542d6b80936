"""Compiling, and doing without."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from numba import njit

from eagle_rt.kernels import compiled
from eagle_rt.kernels.first_start import NOTICE, before_compiling


def test_a_missing_numba_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    spec = importlib.util.spec_from_file_location("written", compiled.__file__)
    assert spec
    assert spec.loader
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)

    def double(value: int) -> int:
        return 2 * value

    assert written.compiled(double) is double


def new_function(module: str) -> Callable[[int], int]:
    """Compiled when it is called."""

    def double(value: int) -> int:
        return 2 * value

    double.__module__ = module
    return njit(double)


def test_something_is_done_before_ours_are_compiled() -> None:
    """Once, and not for what others compile."""
    acts: list[str] = []
    with before_compiling(lambda: acts.append("now")):
        new_function("another_package")(1)
        assert not acts
        new_function("eagle_rt.kernels")(1)
        new_function("eagle_rt.kernels")(1)
    with before_compiling(lambda: acts.append("again")):
        pass
    new_function("eagle_rt.kernels")(1)
    assert acts == ["now"]


def test_only_what_is_not_kept_is_compiled_and_said(tmp_path: Path) -> None:
    program = "import numpy; from eagle_rt.speculate.compiled import descending; descending(numpy.ones(2))"
    for num_said in (1, 0):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        assert done.stderr.count(NOTICE) == num_said
