"""The engine for scripts and notebooks: prompts in, replies out, in this process."""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from eagle_rt.config import EngineConfig
from eagle_rt.engine.build import build_core
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.load import model_info
from eagle_rt.engine.loop import run_loop
from eagle_rt.engine.messages import Abort, Command, Failed, Rejected, Report, Shutdown, Submit
from eagle_rt.engine.metrics import EngineMetrics
from eagle_rt.engine.params import SamplingParams, sampling_params
from eagle_rt.engine.request import TokenEvent
from eagle_rt.engine.text import Reply
from eagle_rt.models.tokenizer import encode_prompts, is_single

logger = logging.getLogger(__name__)


class Engine:
    """Loads a model and generates with it on a thread of its own.

    Options are the fields of `EngineConfig`. Use it as a context manager, or call `shutdown`.

    >>> with Engine(speculative_algorithm="EAGLE3") as engine:              # doctest: +SKIP
    ...     engine.generate("Hello", {"temperature": 0})["text"]

    Raises:
        ValueError, FileNotFoundError: the options cannot work, or a checkpoint cannot be loaded; the message says why.
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        self.config = config or EngineConfig(**options)
        self.info = model_info(self.config)
        self.tokenizer = self.info.tokenizer
        self._commands: queue.Queue[Command] = queue.Queue()
        self._listeners: dict[str, Callable[[TokenEvent | Exception], object]] = {}
        self._failure: Exception | None = None
        self._ids = itertools.count()
        started: Future[tuple[EngineCore, list[str]]] = Future()
        self._thread = threading.Thread(target=self._serve, args=(started,), name="eagle_rt engine", daemon=True)
        self._thread.start()
        self._core, self.notes = started.result()
        for note in self.notes:
            logger.info(note)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Stop the engine; requests in flight end with an error."""
        self._commands.put(Shutdown())
        self._thread.join()

    def metrics(self) -> EngineMetrics:
        """Totals since start."""
        return self._core.current_metrics()

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | SamplingParams | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
    ) -> Any:
        """Replies to one prompt (a dictionary) or to several (a list of them, also when `n` > 1).

        Give either texts or token ids. Each reply holds `text`, `output_ids` and `meta_info`.

        Raises:
            ValueError: a sampling parameter or a prompt cannot be served.
        """
        given = prompt if input_ids is None else input_ids
        if (prompt is None) == (input_ids is None):
            raise ValueError("give either prompt or input_ids")
        assert given is not None
        params = self._sampling_params(sampling_params)

        answers: queue.Queue[tuple[str, TokenEvent | Exception]] = queue.Queue()
        replies: dict[str, Reply] = {}
        for tokens in encode_prompts(self.tokenizer, given):
            for index in range(params.n):
                request_id = self._next_id()
                replies[request_id] = Reply(self.tokenizer, params, tokens)
                self._submit(request_id, tokens, nth_params(params, index), lambda event, i=request_id: answers.put((i, event)))
        unfinished = set(replies)
        try:
            while unfinished:
                request_id, event = answers.get()
                if isinstance(event, Exception):
                    raise event
                replies[request_id].push(event)
                if replies[request_id].finish_reason:
                    self._end(request_id, is_complete=True)
                    unfinished.discard(request_id)
        finally:
            for request_id in unfinished:
                self._end(request_id)
        results = [reply_dict(reply) for reply in replies.values()]
        return results[0] if is_single(given) and params.n == 1 else results

    async def stream(
        self,
        prompt: str | None = None,
        sampling_params: dict[str, Any] | SamplingParams | None = None,
        input_ids: list[int] | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """One reply as it grows: every item holds the whole `text` so far and the new `delta`; the last one has meta_info's
        finish_reason set. Leaving the loop early aborts the request."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("give either prompt or input_ids")
        (tokens,) = encode_prompts(self.tokenizer, prompt) if prompt is not None else [list(input_ids or [])]
        params = self._sampling_params(sampling_params)
        reply = Reply(self.tokenizer, params, tokens)
        events: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        request_id = self._next_id()
        self._submit(request_id, tokens, params, lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
        try:
            while not reply.finish_reason:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                delta = reply.push(event)
                yield {**reply_dict(reply), "delta": delta.text}
        finally:
            self._end(request_id, is_complete=bool(reply.finish_reason))

    def _sampling_params(self, given: dict[str, Any] | SamplingParams | None) -> SamplingParams:
        return sampling_params(given, self.info.sampling_defaults)

    def _next_id(self) -> str:
        return f"request-{next(self._ids)}"

    def _submit(
        self, request_id: str, tokens: list[int], params: SamplingParams, listener: Callable[[TokenEvent | Exception], object]
    ) -> None:
        if not self._thread.is_alive():
            raise RuntimeError("the engine has stopped") from self._failure
        self._listeners[request_id] = listener
        self._commands.put(Submit(request_id, tokens, params))

    def _end(self, request_id: str, *, is_complete: bool = False) -> None:
        """Forget a reply; what the engine still does for it, past a stop string or for a reader who left, is stopped."""
        if self._listeners.pop(request_id, None):
            self._commands.put(Abort(request_id, is_complete))

    def _serve(self, started: "Future[tuple[EngineCore, list[str]]]") -> None:
        """Builds the engine on the thread that runs it: OpenMP keeps a team for each thread that has ever called it, and with more
        threads in them than there are processors every parallel loop first has to wake its own, which tripled steps."""
        try:
            core, notes = build_core(self.config, self.info)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result((core, notes))
        try:
            run_loop(core, self._receive, self._report)
            ending: Exception = RuntimeError("the engine was shut down")
        except Exception as error:
            ending = self._failure = error
        for listener in list(self._listeners.values()):
            listener(ending)

    def _receive(self, wait: bool) -> list[Command]:
        commands: list[Command] = []
        try:
            if wait:
                commands.append(self._commands.get(timeout=1.0))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _report(self, report: Report) -> None:
        if isinstance(report, TokenEvent):
            listener = self._listeners.get(report.request_id)
            if listener:
                listener(report)
        elif isinstance(report, Rejected):
            listener = self._listeners.pop(report.request_id, None)
            if listener:
                listener(ValueError(report.reason))
        else:
            assert not isinstance(report, Failed)


def nth_params(params: SamplingParams, index: int) -> SamplingParams:
    """The settings of reply `index` of n: seeded replies differ by their index. After the largest seed comes the smallest."""
    seed = None if params.seed is None else (params.seed + index + 2**63) % 2**64 - 2**63
    return replace(params, seed=seed, n=1)


def reply_dict(reply: Reply) -> dict[str, Any]:
    return {"text": reply.text, "output_ids": list(reply.tokens), "meta_info": reply.meta_info()}
