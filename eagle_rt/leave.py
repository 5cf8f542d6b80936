"""How a process ends whose work is done."""

import atexit
import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """After what wants to be called at the end, but without tearing down what libraries hold: torch's take seconds over that, and
    abort the process now and then if it has been of a group."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
