"""What a reply becomes in OpenAI's two formats, whole or part by part."""

from typing import Any, Protocol

from eagle_rt.engine.text import Reply, TextDelta
from eagle_rt.server.replies import ReplyReader


class Choice(Protocol):
    """Of one reply, of which it is told either all at once or every part."""

    def whole(self, reply: Reply) -> dict[str, Any]: ...

    def part(self, delta: TextDelta) -> dict[str, Any]: ...


class CompletionChoice:
    """echo: what comes before the reply."""

    def __init__(self, echo: str = "") -> None:
        self._echo = echo

    def whole(self, reply: Reply) -> dict[str, Any]:
        return {"text": self._echo + reply.text, "finish_reason": finish_name(reply.finish_reason)}

    def part(self, delta: TextDelta) -> dict[str, Any]:
        text, self._echo = self._echo + delta.text, ""
        return {"text": text, "finish_reason": finish_name(delta.finish_reason)}


class ChatChoice:
    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader

    def whole(self, reply: Reply) -> dict[str, Any]:
        found, message = self._reader.read(reply.text, is_last=True), dict[str, Any](role="assistant")
        if self._reader.tells_reasoning:
            message["reasoning_content"] = found.reasoning or None
        message["content"] = found.content
        if found.calls:
            message |= {"content": found.content or None, "tool_calls": [call.described() for call in found.calls]}
        return {"message": message, "finish_reason": self._finish_name(reply.finish_reason)}

    def part(self, delta: TextDelta) -> dict[str, Any]:
        """A call comes in one piece."""
        first, told = self._reader.num_calls, dict[str, Any]()
        found = self._reader.read(delta.text, is_last=delta.finish_reason is not None)
        if found.reasoning:
            told["reasoning_content"] = found.reasoning
        if found.calls:
            told["tool_calls"] = [{"index": first + number, **call.described()} for number, call in enumerate(found.calls)]
        if found.content:
            told["content"] = found.content
        return {"delta": told, "finish_reason": self._finish_name(delta.finish_reason)}

    def _finish_name(self, finish_reason: dict[str, Any] | None) -> str | None:
        name = finish_name(finish_reason)
        return "tool_calls" if name == "stop" and self._reader.num_calls else name


def finish_name(finish_reason: dict[str, Any] | None) -> str | None:
    """OpenAI's word for why a reply ended."""
    if finish_reason is None:
        return None
    return "length" if finish_reason["type"] == "length" else "stop"
