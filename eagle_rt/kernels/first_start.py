"""Knows when kernels are being compiled, which takes about a minute at the very first start; needs numba."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

NOTICE = "compiling kernels for this processor, which are kept: at the very first start that takes about a minute"


class BeforeCompiling(event.Listener):
    """Acts once, before the first of our functions is compiled; one that was kept from an earlier time is not."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self._has_acted = act, False

    def on_start(self, event: Any) -> None:
        if not self._has_acted and event.data["dispatcher"].py_func.__module__.startswith("eagle_rt."):
            self._has_acted = True
            self._act()

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def before_compiling(act: Callable[[], None]) -> Iterator[None]:
    """Within this `act` is called before the first function is compiled, if one is."""
    with event.install_listener("numba:compile", BeforeCompiling(act)):
        yield


def announce_compiling() -> None:
    """From here on, once: it would look like a standstill."""
    event.register("numba:compile", BeforeCompiling(lambda: print(NOTICE, file=sys.stderr, flush=True)))
