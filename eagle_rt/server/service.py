"""The server's end of the engine process: submit prompts, follow replies, notice its death."""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import zmq

from eagle_rt.config import EngineConfig
from eagle_rt.engine.engine import nth_params
from eagle_rt.engine.load import ModelInfo
from eagle_rt.engine.messages import Abort, Command, Failed, Rejected, Shutdown, Started, Submit, decode, encode
from eagle_rt.engine.metrics import EngineMetrics
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.request import TokenEvent
from eagle_rt.engine.text import Reply, TextDelta
from eagle_rt.server.process import EngineDiedError, EngineProcess

logger = logging.getLogger(__name__)

# (Number of the reply, its new text), as it comes.
Deltas = AsyncGenerator[tuple[int, TextDelta], None]


class EngineService:
    """Talks to the engine process. Everything here runs on one asyncio loop."""

    def __init__(self, process: EngineProcess, config: EngineConfig, info: ModelInfo) -> None:
        self.config = config
        self.info = info
        self.metrics = EngineMetrics()
        self.notes: list[str] = []
        self.context_length = 0
        self.death: str | None = None
        self.has_died = asyncio.Event()
        self._listeners: dict[str, asyncio.Queue[tuple[str, TokenEvent | Exception]]] = {}
        self._ids = itertools.count()
        self._process = process

    async def start(self) -> None:
        """Wait until the engine can serve.

        Raises:
            EngineDiedError: it cannot, with the reason.
        """
        while True:
            report = await self._next_report()
            if isinstance(report, Started):
                self.notes, self.context_length = report.notes, report.context_length
                self._pump_task = asyncio.create_task(self._pump())
                return
            if isinstance(report, Failed):
                await asyncio.to_thread(self._process.join, 5)  # it puts away what it holds
                raise EngineDiedError(report.reason)

    async def stop(self) -> None:
        """Let the engine process end, and wait for it."""
        if self._process.is_alive:
            # A worker that has failed closes its sockets before it ends: waiting for a reader could take forever.
            with suppress(zmq.Again):
                await self._process.commands.send(encode(Shutdown()), zmq.DONTWAIT)
            await asyncio.to_thread(self._process.join, 10)

    def generate(self, prompts: list[list[int]], params: SamplingParams, *, keeps_special_tokens: bool = False) -> "Generation":
        """keeps_special_tokens: in the replies' texts."""
        return Generation(self, prompts, params, keeps_special_tokens=keeps_special_tokens)

    async def submit(self, tokens: list[int], params: SamplingParams, events: "asyncio.Queue[Any]") -> str:
        if self.death is not None:
            raise EngineDiedError(self.death)
        request_id = f"request-{next(self._ids)}"
        self._listeners[request_id] = events
        await self._send(Submit(request_id, tokens, params))
        return request_id

    def end(self, request_id: str, *, is_complete: bool = False) -> None:
        """No one waits for this reply any more: the engine drops what is left of it."""
        if self._listeners.pop(request_id, None) is not None and self.death is None:
            asyncio.get_running_loop().create_task(self._send(Abort(request_id, is_complete)))

    async def _send(self, command: Command) -> None:
        await self._process.commands.send(encode(command))

    async def _next_report(self) -> Any:
        """The next report, or `Failed` when the process is gone without one."""
        while not await self._process.reports.poll(500):
            if not self._process.is_alive:
                return Failed(f"the engine process ended with exit code {self._process.exit_code}", is_user_error=False)
        return decode(await self._process.reports.recv())

    async def _pump(self) -> None:
        """Hand every report to whom it concerns."""
        while True:
            report = await self._next_report()
            if isinstance(report, EngineMetrics):
                self.metrics = report
            elif isinstance(report, TokenEvent):
                self._tell(report.request_id, report)
            elif isinstance(report, Rejected):
                self._tell(report.request_id, ValueError(report.reason))
            elif isinstance(report, Failed):
                self.death = report.reason
                logger.error("the engine has died: %s", report.reason)
                for request_id in list(self._listeners):
                    self._tell(request_id, EngineDiedError(report.reason))
                self.has_died.set()
                return

    def _tell(self, request_id: str, event: TokenEvent | Exception) -> None:
        listener = self._listeners.get(request_id)
        if listener is not None:
            listener.put_nowait((request_id, event))


class Generation:
    """The replies to one HTTP request: n for every prompt. Iterate over it for the text as it comes, then `close` it."""

    def __init__(
        self, service: EngineService, prompts: list[list[int]], params: SamplingParams, *, keeps_special_tokens: bool
    ) -> None:
        self._service = service
        self._params = params
        self._prompts = prompts
        self._indices: dict[str, int] = {}
        self.replies = [
            Reply(service.info.tokenizer, params, prompt, keeps_special_tokens=keeps_special_tokens)
            for prompt in prompts
            for _ in range(params.n)
        ]

    async def deltas(self) -> Deltas:
        """Until all replies have ended.

        Raises:
            ValueError: the engine cannot serve a prompt. EngineDiedError: there is no engine any more.
        """
        events: asyncio.Queue[tuple[str, TokenEvent | Exception]] = asyncio.Queue()
        try:
            for index in range(len(self.replies)):
                prompt_index, reply_index = divmod(index, self._params.n)
                params = nth_params(self._params, reply_index)
                self._indices[await self._service.submit(self._prompts[prompt_index], params, events)] = index
            while self._indices:
                request_id, event = await events.get()
                if isinstance(event, Exception):
                    raise event
                index = self._indices.get(request_id)
                if index is None:
                    continue
                delta = self.replies[index].push(event)
                if delta.finish_reason:
                    self._service.end(request_id, is_complete=True)
                    del self._indices[request_id]
                yield index, delta
        finally:
            self.close()

    async def finish(self) -> list[Reply]:
        """Wait for all replies."""
        async for _ in self.deltas():
            pass
        return self.replies

    def close(self) -> None:
        """Abort what is still running."""
        for request_id in self._indices:
            self._service.end(request_id)
        self._indices.clear()

    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's names; a prompt counts once, however many replies it got."""
        num_prompt = sum(len(prompt) for prompt in self._prompts)
        num_completion = sum(len(reply.tokens) for reply in self.replies)
        num_cached = sum(reply.stats.num_prompt_tokens_cached for reply in self.replies[:: self._params.n])
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
