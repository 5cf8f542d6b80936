"""The HTTP routes."""

import asyncio
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from eagle_rt.engine.engine import reply_dict
from eagle_rt.engine.params import sampling_params
from eagle_rt.engine.request import check_prompt_length
from eagle_rt.engine.text import TextDelta
from eagle_rt.models.tokenizer import chat_tokens, encode_prompts, is_single, prompt_texts, writes_harmony
from eagle_rt.server.choices import ChatChoice, Choice, CompletionChoice
from eagle_rt.server.errors import ApiError, add_error_handlers
from eagle_rt.server.harmony import harmony_message
from eagle_rt.server.logprobs import Format, ToldLogprobs, chat_logprobs, completion_logprobs
from eagle_rt.server.prometheus import EngineCollector
from eagle_rt.server.protocol import ChatRequest, CompletionRequest, GenerateRequest, OpenAIRequest
from eagle_rt.server.reasoning import reply_form
from eagle_rt.server.replies import ReplyReader
from eagle_rt.server.response_items import ResponseWriter, usage_of
from eagle_rt.server.responses import ResponsesRequest
from eagle_rt.server.service import Deltas, EngineService, Generation
from eagle_rt.server.stream import native_events, openai_events, response_events
from eagle_rt.server.tools import template_message, tools_of

DISCONNECT_POLL_SECONDS = 0.2

T = TypeVar("T")


def create_app(service: EngineService, model_name: str, api_key: str | None, reasoning_parser: str = "auto") -> FastAPI:
    """All routes over one engine. reasoning_parser: one of `config.REASONING_PARSERS`."""
    app = FastAPI(title="eagle_rt")
    add_error_handlers(app)
    started = int(time.time())
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: service.metrics))

    async def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key is not None and not secrets.compare_digest(given.encode(), api_key.encode()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def check_model(body: OpenAIRequest) -> None:
        if body.model is not None and body.model != model_name:
            raise ApiError(
                404, f"the model {body.model!r} is not served here, {model_name!r} is", param="model", code="model_not_found"
            )

    def begin_chat(body: ChatRequest) -> tuple[Generation, Callable[[], ReplyReader]]:
        """Its replies, and what reads one."""
        check_model(body)
        tokenizer, tools = service.info.tokenizer, tools_of(body, service.info.tokenizer)
        messages = [template_message(message) for message in body.messages]
        messages = [harmony_message(message) for message in messages] if writes_harmony(tokenizer) else messages
        prompt = chat_tokens(tokenizer, messages, tools and tools.described, options=body.template_options)
        form = reply_form(tokenizer, prompt, reasoning_parser)
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        tag = tools and tools.structural_tag
        params = body.sampling(service.info.sampling_defaults, max_tokens, body.num_logprobs, tag)
        params = form.before(params, is_call=tag is not None)
        generation = service.generate([prompt], params, keeps_special_tokens=form.keeps_special_tokens)
        return generation, partial(form.reader, tools, tells_reasoning=body.separate_reasoning)

    @app.post("/v1/chat/completions", dependencies=[Depends(check_key)])
    async def chat(body: ChatRequest, request: Request) -> Response:
        generation, reader = begin_chat(body)
        return await openai_response(
            body,
            request,
            generation,
            name="chat.completion",
            choices=[ChatChoice(reader()) for _ in generation.replies],
            tell=chat_logprobs,
            opening=[
                {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                for index in range(len(generation.replies))
            ],
        )

    @app.post("/v1/responses", dependencies=[Depends(check_key)])
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        generation, reader = begin_chat(body.as_chat())
        writer = ResponseWriter(body.described(), model_name, reader())

        def usage() -> dict[str, Any]:
            return usage_of(generation.usage(), len(service.info.tokenizer.encode(writer.reasoning, add_special_tokens=False)))

        if body.stream:
            events = response_events(await begun(service, generation, request), writer, usage)
            return StreamingResponse(events, media_type="text/event-stream")
        (reply,) = await unless_left(generation.finish(), request)
        assert reply.finish_reason
        writer.more(reply.text, is_last=True)
        writer.end(reply.finish_reason, usage())
        return JSONResponse(writer.response)

    @app.post("/v1/completions", dependencies=[Depends(check_key)])
    async def complete(body: CompletionRequest, request: Request) -> Response:
        check_model(body)
        params = body.sampling(service.info.sampling_defaults, body.max_tokens, body.logprobs)
        prompts = encode_prompts(service.info.tokenizer, body.prompt)
        if body.echo:
            params = replace(params, prompt_logprobs=body.logprobs)
        echoes = prompt_texts(service.info.tokenizer, body.prompt) if body.echo else [""] * len(prompts)
        generation = service.generate(prompts, params)
        return await openai_response(
            body,
            request,
            generation,
            name="text_completion",
            choices=[CompletionChoice(echo) for echo in echoes for _ in range(params.n)],
            tell=completion_logprobs,
            opening=[],
        )

    async def openai_response(
        body: OpenAIRequest,
        request: Request,
        generation: Generation,
        *,
        name: str,
        choices: list[Choice],
        tell: Format,
        opening: list[dict[str, Any]],
    ) -> Response:
        """The replies in one piece or as events; `choices` shape them, `tell` their log-probabilities."""
        told = [ToldLogprobs(reply, service.info.tokenizer, tell) for reply in generation.replies]
        header = {"id": f"{name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model_name}
        if body.stream:
            kind = f"{name}.chunk" if name == "chat.completion" else name

            def envelope(parts: list[dict[str, Any]]) -> dict[str, Any]:
                return {**header, "object": kind, "choices": parts}

            def choice(index: int, delta: TextDelta) -> dict[str, Any]:
                logprobs, traces = told[index].more(), generation.replies[index].traces_by_name()
                more = {**({} if logprobs is None else {"logprobs": logprobs}), **traces}
                return {"index": index, **choices[index].part(delta), **more}

            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            deltas = await begun(service, generation, request)
            events = openai_events(generation, deltas, envelope, choice, opening, include_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        replies = await unless_left(generation.finish(), request)
        wholes = [
            {"index": index, **choices[index].whole(reply), "logprobs": told[index].more(), **reply.traces_by_name()}
            for index, reply in enumerate(replies)
        ]
        return JSONResponse({**header, "object": name, "choices": wholes, "usage": generation.usage()})

    @app.post("/generate", dependencies=[Depends(check_key)])
    async def generate(body: GenerateRequest, request: Request) -> Response:
        prompt = body.text if body.text is not None else body.input_ids
        assert prompt is not None
        kinds = ("logprobs", "prompt_logprobs") if body.logprob_start_len == 0 else ("logprobs",)
        asked = dict.fromkeys(kinds, body.top_logprobs_num) if body.return_logprob else {}
        params = sampling_params({**body.sampling_params, **asked}, service.info.sampling_defaults)
        generation = service.generate(encode_prompts(service.info.tokenizer, prompt), params)
        if body.stream:
            events = native_events(generation, await begun(service, generation, request))
            return StreamingResponse(events, media_type="text/event-stream")
        results = [reply_dict(reply) for reply in await unless_left(generation.finish(), request)]
        return JSONResponse(results[0] if is_single(prompt) and params.n == 1 else results)

    @app.get("/v1/models", dependencies=[Depends(check_key)])
    async def models() -> dict[str, Any]:
        model = {"id": model_name, "object": "model", "created": started, "owned_by": "eagle_rt"}
        return {"object": "list", "data": [{**model, "max_model_len": service.context_length}]}

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=503 if service.death is not None else 200)

    @app.get("/server_info", dependencies=[Depends(check_key)])
    async def server_info() -> dict[str, Any]:
        return {
            "config": asdict(service.config),
            "decided": service.notes,
            "context_length": service.context_length,
            "metrics": {**asdict(service.metrics), "mean_accepted_tokens": service.metrics.mean_accepted_tokens},
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def begun(service: EngineService, generation: Generation, request: Request) -> Deltas:
    """The text as it comes, of which there is some by then: what the engine refuses is better said before a stream begins, with a
    status code."""
    for reply in generation.replies:
        check_prompt_length(len(reply.prompt), service.context_length)
    deltas = generation.deltas()
    first = await unless_left(anext(deltas), request)

    async def from_first() -> Deltas:
        async with aclosing(deltas):
            yield first
            async for delta in deltas:
                yield delta

    return from_first()


async def unless_left(result: Awaitable[T], request: Request) -> T:
    """The result, which is no longer made when the client hangs up before."""
    finishing = asyncio.ensure_future(result)
    leaving = asyncio.ensure_future(disconnected(request.is_disconnected))
    try:
        await asyncio.wait((finishing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not finishing.done():
            raise ApiError(499, "the client closed the connection")
        return finishing.result()
    finally:
        leaving.cancel()
        finishing.cancel()


async def disconnected(is_disconnected: Callable[[], Awaitable[bool]]) -> None:
    while not await is_disconnected():
        await asyncio.sleep(DISCONNECT_POLL_SECONDS)
