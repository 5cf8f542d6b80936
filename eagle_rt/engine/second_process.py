"""At the very first start on a CPU a second process compiles what does not depend on the models, which is half of it, while the
first one loads them and compiles the rest."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from eagle_rt.kernels.compiled import is_compiled
from eagle_rt.kernels.contenders import compile_now
from eagle_rt.speculate.compiled import compile_all

# The longest that the first process waits for it, before it compiles what is missing itself.
LONGEST_S = 120


def compile_shared() -> None:
    """How tokens are drawn, and how trees are chosen; at once where that has been kept."""
    compile_now()
    compile_all()


@contextmanager
def compiling_beside() -> Iterator[None]:
    """Within this a second process calls `compile_shared` as soon as the first one has to compile anything, and at the end it is
    waited for."""
    if not is_compiled:
        yield
        return
    from eagle_rt.kernels.first_start import before_compiling  # not everywhere is numba installed

    started: list[subprocess.Popen] = []

    def start() -> None:
        command = [sys.executable, "-c", f"from {__name__} import compile_shared; compile_shared()"]
        nowhere = subprocess.DEVNULL
        started.append(subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere))

    with before_compiling(start):
        yield
    for process in started:
        try:
            process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()
