"""The engine's main loop: take commands, step, report."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.messages import Abort, Command, Rejected, Report, Shutdown, Submit
from eagle_rt.engine.metrics import EngineMetrics

LOG_INTERVAL = 5.0
METRICS_INTERVAL = 0.5

logger = logging.getLogger(__name__)


def run_loop(core: EngineCore, receive: Callable[[bool], list[Command]], report: Callable[[Report], None]) -> None:
    """Serve until told to shut down.

    receive(wait): the commands that have come since, waiting for one (for a second at most) if `wait`. Every request is answered
    by token events up to one with a finish reason, or by `Rejected`.
    """
    log = ProgressLog(core.current_metrics())
    metrics_due = 0.0
    while True:
        for command in receive(not core.has_work):
            if isinstance(command, Shutdown):
                return
            obey(core, command, report)
        for event in core.step():
            report(event)
        now = time.monotonic()
        if now >= metrics_due:
            report(core.current_metrics())
            metrics_due = now + METRICS_INTERVAL
        log.write_if_due(core)


def obey(core: EngineCore, command: Submit | Abort, report: Callable[[Report], None]) -> None:
    if isinstance(command, Abort):
        event = core.abort(command.request_id, is_complete=command.is_complete)
        if event:
            report(event)
        return
    try:
        core.submit(command.request_id, command.prompt, command.sampling)
    except ValueError as error:
        report(Rejected(command.request_id, str(error)))


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
