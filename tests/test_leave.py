"""How processes end."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [("return 3", 3, ""), ("raise KeyboardInterrupt", 130, "stopped\n")],
)
def test_they_say_why_and_do_what_was_asked_for_at_the_end(ending: str, status: int, said: str) -> None:
    program = f"""
import atexit
from eagle_rt.leave import run

def main():
    atexit.register(print, "at the end")
    print("begun", end=", ")
    {ending}

run(main)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (status, "begun, at the end\n", said)
