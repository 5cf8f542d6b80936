"""The engine's main loop: take commands, step, report."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.grammars import Grammars
from eagle_rt.engine.messages import Abort, Command, Rejected, Report, Shutdown, Submit
from eagle_rt.engine.metrics import EngineMetrics
from eagle_rt.engine.request import RequestStats, TokenEvent

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

LOG_INTERVAL = 5.0
METRICS_INTERVAL = 0.5
# How long nothing but a grammar is waited for, before the next look at what has come.
POLL_SECONDS = 0.01

logger = logging.getLogger(__name__)


def run_loop(core: EngineCore, receive: Callable[[bool], list[Command]], report: Callable[[Report], None]) -> None:
    """Serve until told to shut down.

    receive(wait): the commands that have come since, waiting for one (for a second at most) if `wait`. Every request is answered
    by token events up to one with a finish reason, or by `Rejected`.
    """
    log = ProgressLog(core.current_metrics())
    metrics_due = 0.0
    with closing(core), closing(Compiling(core.grammars)) as compiling:
        while True:
            for command in receive(not (core.has_work or compiling)):
                if isinstance(command, Shutdown):
                    return
                obey(core, compiling, command, report)
            compiling.submit_ready(core, report)
            for event in core.step():
                report(Rejected(event.request_id, event.failure) if event.failure else event)
            now = time.monotonic()
            if now >= metrics_due:
                report(core.current_metrics())
                metrics_due = now + METRICS_INTERVAL
            log.write_if_due(core)


def obey(core: EngineCore, compiling: "Compiling", command: Submit | Abort, report: Callable[[Report], None]) -> None:
    if isinstance(command, Abort):
        event = compiling.abort(command.request_id) or core.abort(command.request_id, is_complete=command.is_complete)
        if event:
            report(event)
        return
    try:
        if command.sampling.grammar:
            compiling.add(command)
        else:
            core.submit(command.request_id, command.prompt, command.sampling)
    except ValueError as error:
        report(Rejected(command.request_id, str(error)))


class Compiling:
    """Requests that wait for their grammars."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._waiting: dict[str, tuple[Submit, Future[CompiledGrammar]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, command: Submit) -> None:
        """Raises ValueError if nothing can be compiled."""
        grammar = command.sampling.grammar
        assert self._grammars is not None
        assert grammar is not None
        self._waiting[command.request_id] = command, self._grammars.compile(grammar)

    def abort(self, request_id: str) -> TokenEvent | None:
        """None if this is not waiting here."""
        if self._waiting.pop(request_id, None) is None:
            return None
        return TokenEvent(request_id, [], RequestStats(), {"type": "abort"})

    def submit_ready(self, core: EngineCore, report: Callable[[Report], None]) -> None:
        """Those whose grammars are there, or can't be; waiting for one, but not long, where there is nothing else to do."""
        if not self._waiting:
            return
        if not core.has_work:
            wait([future for _, future in self._waiting.values()], POLL_SECONDS, FIRST_COMPLETED)
        for request_id, (command, future) in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request_id]
            assert self._grammars
            try:
                core.submit(request_id, command.prompt, command.sampling, self._grammars.match(future.result()))
            except Exception as error:  # whatever was wrong with this grammar, the others go on
                report(Rejected(request_id, str(error)))

    def close(self) -> None:
        if self._grammars:
            self._grammars.close()


class ProgressLog:
    """A line every few seconds while there is work."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._last = replace(metrics)
        self._last_time = time.monotonic()

    def write_if_due(self, core: EngineCore) -> None:
        seconds = time.monotonic() - self._last_time
        if seconds < LOG_INTERVAL:
            return
        now, last = core.current_metrics(), self._last
        num_tokens = now.num_generated_tokens - last.num_generated_tokens
        if num_tokens:
            num_drafts = now.num_drafts - last.num_drafts
            num_accepted = now.num_accepted_tokens - last.num_accepted_tokens
            per_step = 1 + num_accepted / num_drafts if num_drafts else 1.0
            logger.info(
                "running %d, queued %d, %.0f tokens/s, %.2f accepted tokens per step, cache %.0f%% in use",
                now.num_running,
                now.num_waiting,
                num_tokens / seconds,
                per_step,
                100 * now.cache_use,
            )
        self._last = replace(now)
        self._last_time = time.monotonic()
