"""Servers in tests: the launch script in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import requests

ROOT = Path(__file__).parents[1]
START_SECONDS = 120
MESSAGES = [{"role": "user", "content": "hello"}]


class Server:
    def __init__(self, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "launch_server.py", "--port", str(self.port), *flags],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output: list[str] = []
        self.draining = threading.Thread(target=self._drain, daemon=True)
        self.draining.start()

    def _drain(self) -> None:
        assert self.process.stdout is not None
        self.output.extend(self.process.stdout)

    def wait_until_up(self) -> "Server":
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "".join(self.output)
            try:
                if requests.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return self
            except requests.RequestException:
                pass
            time.sleep(0.2)
        raise AssertionError("the server did not start: " + "".join(self.output))

    def post(self, path: str, body: object, **options: object) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=60, **options)

    def metric(self, name: str) -> float:
        for line in requests.get(f"{self.url}/metrics", timeout=5).text.splitlines():
            if line.startswith(f"eagle_rt:{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def text(self) -> str:
        return "".join(self.output)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
