"""What a reply becomes in OpenAI's two formats, whole or part by part."""

from typing import Any, Protocol

from eagle_rt.engine.text import Reply, TextDelta
from eagle_rt.server.reasoning import ReasoningReader
from eagle_rt.server.tools import CallReader


class Choice(Protocol):
    """Of one reply, of which it is told either all at once or every part."""

    def whole(self, reply: Reply) -> dict[str, Any]: ...

    def part(self, delta: TextDelta) -> dict[str, Any]: ...


class CompletionChoice:
    def whole(self, reply: Reply) -> dict[str, Any]:
        return {"text": reply.text, "finish_reason": finish_name(reply.finish_reason)}

    def part(self, delta: TextDelta) -> dict[str, Any]:
        return {"text": delta.text, "finish_reason": finish_name(delta.finish_reason)}


class ChatChoice:
    """thoughts: finds what the model thinks before it answers; reader: finds the calls in its answer. None: there are none."""

    def __init__(self, reader: CallReader | None, thoughts: ReasoningReader | None = None) -> None:
        self._reader, self._thoughts = reader, thoughts

    def whole(self, reply: Reply) -> dict[str, Any]:
        content, message = reply.text, dict[str, Any](role="assistant")
        if self._thoughts:
            reasoning, content = self._thoughts.read(content, is_last=True)
            message["reasoning_content"] = reasoning or None
        message["content"] = content
        if self._reader:
            content, calls = self._reader.read(content, is_last=True)
            if calls:
                message |= {"content": content.strip() or None, "tool_calls": [call.described() for call in calls]}
        return {"message": message, "finish_reason": self._finish_name(reply.finish_reason)}

    def part(self, delta: TextDelta) -> dict[str, Any]:
        """A call comes in one piece."""
        content, told, is_last = delta.text, {}, delta.finish_reason is not None
        if self._thoughts:
            reasoning, content = self._thoughts.read(content, is_last=is_last)
            if reasoning:
                told["reasoning_content"] = reasoning
        if self._reader:
            first = self._reader.num_calls
            content, calls = self._reader.read(content, is_last=is_last)
            if calls:
                told["tool_calls"] = [{"index": first + number, **call.described()} for number, call in enumerate(calls)]
        if content:
            told["content"] = content
        return {"delta": told, "finish_reason": self._finish_name(delta.finish_reason)}

    def _finish_name(self, finish_reason: dict[str, Any] | None) -> str | None:
        name = finish_name(finish_reason)
        return "tool_calls" if name == "stop" and self._reader and self._reader.num_calls else name


def finish_name(finish_reason: dict[str, Any] | None) -> str | None:
    """OpenAI's word for why a reply ended."""
    if finish_reason is None:
        return None
    return "length" if finish_reason["type"] == "length" else "stop"
