"""How a process ends whose work is done."""

import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """At once, without tearing down what libraries hold: torch's take seconds over that, and abort the process now and then if it
    has been of a group."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
