"""The engine's process, as whoever starts it sees it."""

import multiprocessing
import tempfile
from pathlib import Path

import zmq
import zmq.asyncio

from eagle_rt.config import EngineConfig
from eagle_rt.server.worker import run_worker


class EngineDiedError(Exception):
    """The engine process is gone; the message is what it said last."""


class EngineProcess:
    """Runs from the start on. commands, reports: sockets to and from it, for one asyncio loop."""

    def __init__(self, config: EngineConfig, log_level: str) -> None:
        self._socket_dir = tempfile.TemporaryDirectory(prefix="eagle_rt-")
        self._context = zmq.asyncio.Context()
        self.commands, self.reports = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        commands_address, reports_address = (f"ipc://{Path(self._socket_dir.name) / name}" for name in ("commands", "reports"))
        self.commands.bind(commands_address)
        self.reports.bind(reports_address)
        spawn = multiprocessing.get_context("spawn")
        arguments = config, commands_address, reports_address, log_level
        self._process = spawn.Process(target=run_worker, args=arguments, name="eagle_rt engine")
        self._process.start()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def join(self, seconds: float) -> None:
        self._process.join(seconds)

    def end(self) -> None:
        """At once, if it is still there."""
        if self.is_alive:
            self._process.kill()
            self._process.join()
        self._context.destroy(linger=0)
        self._socket_dir.cleanup()
