"""The engine in a process of its own, so that HTTP and text never hold up its loop."""

import logging
import multiprocessing
import os
import signal
import threading
import traceback

import zmq

from eagle_rt.config import EngineConfig
from eagle_rt.engine.messages import Command, Failed, Report, Started, decode, encode
from eagle_rt.leave import leave


def run_worker(config: EngineConfig, commands_address: str, reports_address: str, log_level: str) -> None:
    """Load the models, then serve commands until told to stop. Ends with its parent process, whatever it is at."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the server decides what it means
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    context = zmq.Context()
    commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(commands_address)
    reports.connect(reports_address)

    def receive(wait: bool) -> list[Command]:
        received = []
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


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)  # nobody is left who could be told anything
