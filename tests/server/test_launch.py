"""The server as a process: how it starts, ends, and says what is wrong."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import requests
from servers import ROOT, Server

from eagle_rt.engine.load import BUILT_IN
from eagle_rt.server.launch import STOP_SIGNALS, interrupts_later
from eagle_rt.server.run import how_to_talk


def launched(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "launch_server.py", *flags], cwd=ROOT, capture_output=True, text=True, timeout=120)


def children_of(server: Server) -> list[int]:
    """The processes that are engines."""
    found = subprocess.run(
        ["pgrep", "-P", str(server.process.pid), "-f", "spawn_main"], capture_output=True, text=True, check=False
    )
    return [int(child) for child in found.stdout.split()]


def test_nothing_slow_is_imported_before_the_engine_has_been_started() -> None:
    program = "import sys, launch_server; print(sorted({'torch', 'transformers', 'uvicorn'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).strip() == "[]"


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("has_chats", [False, True])
def test_the_request_that_is_shown(server: Server, has_chats: bool, has_key: bool) -> None:
    shown = how_to_talk("0.0.0.0", server.port, "tiny", has_chats=has_chats, has_key=has_key)
    curl, url, *options = shlex.split(shown.splitlines()[1])
    headers = dict(header.split(": ") for option, header in pairwise(options) if option == "-H")
    assert curl == "curl"
    assert ("Authorization" in headers) == has_key
    reply = requests.post(url, options[-1], headers=headers, timeout=60)
    assert reply.status_code == 200
    assert reply.json()["object"] == ("chat.completion" if has_chats else "text_completion")


def test_the_death_of_the_engine_is_answered_and_ends_the_server(target_dir: Path) -> None:
    server = Server("--model-path", str(target_dir), "--max-total-tokens", "4096", "--device", "cpu", "--api-key", "secret")
    server.wait_until_up()
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 401
    statuses: list[int] = []

    def ask() -> None:
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 32}  # long enough to be there when the engine dies
        statuses.append(server.post("/v1/completions", body, headers={"Authorization": "Bearer secret"}).status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    for child in children_of(server):
        os.kill(child, signal.SIGKILL)
    asking.join(20)
    assert statuses == [503]
    assert server.process.wait(30) == 1
    time.sleep(0.5)
    assert "the engine process ended with exit code -9" in server.text()


def test_ctrl_c_lets_requests_finish(target_dir: Path) -> None:
    server = Server("--model-path", str(target_dir), "--max-total-tokens", "4096", "--device", "cpu").wait_until_up()
    replies: list[requests.Response] = []
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    asking = threading.Thread(target=lambda: replies.append(server.post("/v1/completions", body)))
    asking.start()
    deadline = time.monotonic() + 10
    while not replies and server.metric("requests_running") == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.stop() == 0
    asking.join(20)
    assert replies[0].json()["usage"]["completion_tokens"] == 400
    server.draining.join(10)
    assert "leaked" not in server.text(), "nothing is left that Python would complain of"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_while_it_starts(number: signal.Signals, target_dir: Path, tmp_path: Path) -> None:
    """Nobody waits for models that are being loaded, and nothing is left of the server."""
    server = Server("--model-path", str(target_dir), "--device", "cpu", environment={"TMPDIR": str(tmp_path)})
    while not children_of(server):
        time.sleep(0.05)
    time.sleep(0.5)
    (child,) = children_of(server)
    assert server.stop(number) == 1
    assert "Traceback" not in server.text()
    assert not Path(f"/proc/{child}").exists()
    assert not list(tmp_path.glob("eagle_rt-*"))


def test_an_engine_whose_server_has_gone_ends(target_dir: Path) -> None:
    """Though it was gone before the engine could know of it."""
    server = Server("--model-path", str(target_dir), "--device", "cpu")
    while not (children := children_of(server)):
        time.sleep(0.01)
    server.process.kill()
    server.process.wait()
    wait_for_end(children[0])


def test_it_ends_whatever_it_is_at() -> None:
    """Weights of a large model are read for minutes."""
    server = subprocess.Popen([sys.executable, "-c", BUSY_ENGINE], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout
    engine = int(server.stdout.readline())
    server.kill()
    server.wait()
    wait_for_end(engine)


BUSY_ENGINE = """
import multiprocessing, os, threading, time
from eagle_rt.server.worker import end_with_parent

def engine():
    threading.Thread(target=end_with_parent, daemon=True).start()
    print(os.getpid(), flush=True)
    time.sleep(600)

multiprocessing.get_context("fork").Process(target=engine).start()
"""


def wait_for_end(process: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_interrupts_wait_for_imports() -> None:
    """In the middle of one they may abort the process."""
    steps = []

    def import_something() -> None:
        with interrupts_later():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("imported")
        steps.append("went on")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have switched off
    try:
        with pytest.raises(KeyboardInterrupt):
            import_something()
        assert steps == ["imported"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_port_in_use_is_one_line_and_exit_1() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = launched("--port", str(port))
    assert result.returncode == 1
    assert result.stderr.strip().splitlines() == [
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model-path", "/no/such/model"], "/no/such/model does not exist"),
        (["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "1", "--speculative-eagle-topk", "2",
          "--speculative-num-draft-tokens", "9"], "ask for at most 3"),
        (["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(BUILT_IN / "eagle3")],
         "holds a head of kind EAGLE3: use --speculative-algorithm EAGLE3"),
        (["--page-size", "0"], "--page-size is 0"),
        (["--speculative-algorithm", "EAGLE3", "--speculative-tree", "json:loads"],
         "--speculative-tree json:loads can't be made: TypeError"),
    ],
    ids=["model", "tree", "algorithm", "page", "rule"],
)  # fmt: skip
def test_what_cannot_start_says_why(flags: list[str], message: str) -> None:
    result = launched("--port", "0", *flags)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert "leaked" not in result.stderr  # by an engine that was ended before it could put away what it held
