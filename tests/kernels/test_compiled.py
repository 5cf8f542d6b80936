"""Compiling, and doing without."""

import importlib.util
import sys

import pytest

from eagle_rt.kernels import compiled


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
