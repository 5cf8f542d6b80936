"""How a process ends whose work is done, or is not wanted any more."""

import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn

# As shells say it of processes that Ctrl-C has ended.
INTERRUPTED = 130


def run(main: Callable[[], int]) -> NoReturn:
    """And leave with the status that it returns, or with a word after Ctrl-C."""
    try:
        status = main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = INTERRUPTED
    leave(status)


def leave(status: int) -> NoReturn:
    """After what wants to be called at the end, but without tearing down what libraries hold: torch's take seconds over that, and
    abort the process now and then if it has been of a group."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
