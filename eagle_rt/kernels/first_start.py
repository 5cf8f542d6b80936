"""Says that kernels are being compiled, which takes about a minute at the very first start and would look like a standstill."""

import sys
from typing import Any

from numba.core import event

NOTICE = "compiling kernels for this processor, which are kept: at the very first start that takes a minute or two"


class Notice(event.Listener):
    """Prints a line before the first of our functions is compiled; one that was kept from an earlier time is not."""

    def __init__(self, line: str) -> None:
        self._line, self._is_said = line, False

    def on_start(self, event: Any) -> None:
        if not self._is_said and event.data["dispatcher"].py_func.__module__.startswith("eagle_rt."):
            self._is_said = True
            print(self._line, file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        pass


def announce_compiling() -> None:
    """From here on, once."""
    event.register("numba:compile", Notice(NOTICE))
