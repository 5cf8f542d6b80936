"""Replies as server-sent events."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson

from eagle_rt.engine.engine import reply_dict
from eagle_rt.engine.text import TextDelta
from eagle_rt.server.errors import error_body
from eagle_rt.server.process import EngineDiedError
from eagle_rt.server.response_items import ResponseWriter
from eagle_rt.server.service import Deltas, Generation

DONE = b"data: [DONE]\n\n"


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def error_event(error: ValueError | EngineDiedError) -> bytes:
    """What went wrong after a stream began, when there is no status code left to say it with."""
    return event(error_body(str(error), "server_error" if isinstance(error, EngineDiedError) else "invalid_request_error"))


async def openai_events(
    generation: Generation,
    deltas: Deltas,
    envelope: Callable[[list[dict[str, Any]]], dict[str, Any]],
    choice: Callable[[int, TextDelta], dict[str, Any]],
    opening: list[dict[str, Any]],
    include_usage: bool,
) -> AsyncIterator[bytes]:
    """One event per piece of text, the usage if asked for, and the closing mark.

    envelope(choices): an event's body; choice(index, delta): one choice in it; opening: choices to begin with.
    """
    try:
        for first in opening:
            yield event(envelope([first]))
        async for index, delta in deltas:
            if delta.text or delta.finish_reason:
                yield event(envelope([choice(index, delta)]))
        if include_usage:
            yield event({**envelope([]), "usage": generation.usage()})
    except (ValueError, EngineDiedError) as error:
        yield error_event(error)
    yield DONE


async def response_events(deltas: Deltas, writer: ResponseWriter, usage: Callable[[], dict[str, Any]]) -> AsyncIterator[bytes]:
    """Those of the Responses API, of the only reply. usage: asked at its end."""
    for told in writer.begin():
        yield told
    try:
        async for _, delta in deltas:
            for told in writer.more(delta.text, is_last=delta.finish_reason is not None):
                yield told
            if delta.finish_reason:
                for told in writer.end(delta.finish_reason, usage()):
                    yield told
    except (ValueError, EngineDiedError) as error:
        for told in writer.fail(str(error)):
            yield told


async def native_events(generation: Generation, deltas: Deltas) -> AsyncIterator[bytes]:
    """SGLang's events: every one holds the whole text so far."""
    try:
        async for index, _ in deltas:
            body = reply_dict(generation.replies[index])
            yield event({**body, "index": index} if len(generation.replies) > 1 else body)
    except (ValueError, EngineDiedError) as error:
        yield error_event(error)
    yield DONE
