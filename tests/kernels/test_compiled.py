"""Compiling, and doing without."""

import importlib.util
import sys
from collections.abc import Callable

import pytest
from numba import njit
from numba.core import event

from eagle_rt.kernels import compiled
from eagle_rt.kernels.first_start import Notice


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


def test_compiling_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """And only of functions of ours, whoever else compiles some."""

    def function(module: str) -> Callable[[int], int]:
        def double(value: int) -> int:
            return 2 * value

        double.__module__ = module
        return njit(double)

    with event.install_listener("numba:compile", Notice("compiling")):
        function("another_package")(1)
        assert "compiling\n" not in capsys.readouterr().err
        function("eagle_rt.kernels")(1)
        function("eagle_rt.kernels")(1)
    assert capsys.readouterr().err.splitlines().count("compiling") == 1
