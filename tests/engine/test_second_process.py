"""The process that compiles beside the first one at the very first start."""

import subprocess
import sys
from typing import Any

import pytest
from kernels.test_compiled import new_function

from eagle_rt.engine import second_process
from eagle_rt.engine.second_process import compiling_beside


class Recorded(subprocess.Popen):
    """Started as asked for, or with the command that a test gives."""

    started: list["Recorded"]
    command: list[str] | None

    def __init__(self, command: list[str], **options: Any) -> None:
        super().__init__(self.command or command, **options)
        self.started.append(self)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    Recorded.started, Recorded.command = [], None
    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return Recorded


def compile_something() -> None:
    new_function("eagle_rt.kernels")(1)


def test_it_compiles_and_is_waited_for(recorded: type[Recorded]) -> None:
    with compiling_beside():
        compile_something()
        compile_something()
    (process,) = recorded.started
    assert process.returncode == 0


def test_none_is_started_where_all_has_been_kept(recorded: type[Recorded]) -> None:
    with compiling_beside():
        pass
    compile_something()
    assert not recorded.started


def test_one_that_hangs_is_ended(recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.command = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(second_process, "LONGEST_S", 0.2)
    with compiling_beside():
        compile_something()
    (process,) = recorded.started
    assert process.wait(30) < 0


def test_what_fails_does_not_wait(recorded: type[Recorded]) -> None:
    recorded.command = [sys.executable, "-c", "import time; time.sleep(600)"]

    def load() -> None:
        with compiling_beside():
            compile_something()
            raise ValueError("a broken checkpoint")

    with pytest.raises(ValueError, match="a broken checkpoint"):
        load()
    (process,) = recorded.started
    assert process.poll() is None
    process.kill()
    process.wait()
