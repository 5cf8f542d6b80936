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

STOP_SIGNALS = signal.SIGINT, signal.SIGTERM


def serve(config: EngineConfig, options: argparse.Namespace) -> int:
    """Run the server until it is stopped; the exit code of the process.

    options: host, port, api_key, served_model_name, reasoning_parser and log_level.
    """
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        listener = listening_socket(options.host, options.port)
    except OSError as error:
        return fail(f"cannot listen on {options.host}:{options.port}: {error.strerror}; choose another --port")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the server runs, which finishes what it has begun
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
    """What stops a process raises KeyboardInterrupt at the end of this: libraries that are being imported may abort over it."""
    interrupts: list[int] = []
    before = {number: signal.signal(number, lambda number, _: interrupts.append(number)) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
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
