"""The engine in a process of its own, so that HTTP and text never hold up its loop."""

import logging
import multiprocessing
import os
import signal
import traceback

import zmq

from eagle_rt.config import EngineConfig
from eagle_rt.engine.messages import Command, Failed, Report, Shutdown, Started, decode, encode
from eagle_rt.leave import leave


def run_worker(config: EngineConfig, commands_address: str, reports_address: str, log_level: str) -> None:
    """Load the models, then serve commands until told to stop or until the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the server decides what it means
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    context = zmq.Context()
    commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(commands_address)
    reports.connect(reports_address)
    parent = multiprocessing.parent_process()  # which may be gone by now
    assert parent

    def receive(wait: bool) -> list[Command]:
        received = []
        if os.getppid() != parent.pid:
            return [Shutdown()]
        if wait and not commands.poll(1000):
            return []
        while commands.poll(0):
            received.append(decode(commands.recv()))
        return received

    def report(message: Report) -> None:
        reports.send(encode(message))

    try:
        # Whoever names this function, to start the process, has not imported torch yet.
        from eagle_rt.engine.build import build_core
        from eagle_rt.engine.load import model_info
        from eagle_rt.engine.loop import run_loop

        core, notes = build_core(config, model_info(config))
        report(Started(notes, core.scheduler.limits.context_length))
        run_loop(core, receive, report)
    except (ValueError, FileNotFoundError) as error:
        report(Failed(str(error), is_user_error=True))
    except Exception:
        report(Failed(traceback.format_exc(), is_user_error=False))
    finally:
        context.destroy(linger=1000)
    leave(0)
