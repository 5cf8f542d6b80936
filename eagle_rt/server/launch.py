"""Starting the server. Nothing here imports what takes seconds before the engine's process, which does so too, has been started."""

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from eagle_rt.config import EngineConfig
from eagle_rt.server.process import EngineDiedError, EngineProcess


def serve(config: EngineConfig, options: argparse.Namespace) -> int:
    """Run the server until it is stopped; the exit code of the process.

    options: host, port, api_key, served_model_name, reasoning_parser and log_level.
    """
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        listener = listening_socket(options.host, options.port)
    except OSError as error:
        return fail(f"cannot listen on {options.host}:{options.port}: {error.strerror}; choose another --port")
    process = EngineProcess(config, options.log_level)
    try:
        with interrupts_later():
            from eagle_rt.server.run import run_server  # with torch and transformers

        asyncio.run(run_server(process, config, options, listener))
        return 0
    except (ValueError, FileNotFoundError, EngineDiedError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return fail("stopped before it served")
    finally:
        process.end()
        listener.close()


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Ctrl-C within this raises KeyboardInterrupt at its end: libraries that are being imported may abort the process over it."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    yield
    signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def listening_socket(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    return listener


def fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 1
