"""Replies in the form of OpenAI's Responses API: items, and the events of which they are made."""

import time
import uuid
from typing import Any

import orjson

from eagle_rt.server.calls import Call
from eagle_rt.server.replies import ReplyReader

# Of what an item's text is a part.
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def usage_of(counts: dict[str, Any], num_reasoning_tokens: int) -> dict[str, Any]:
    """A chat's, in this API's names."""
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": counts["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": counts["total_tokens"],
    }


class ResponseWriter:
    """One response as it grows: every method returns the events that tell of it, as they are sent. `response` is all so far."""

    def __init__(self, described: dict[str, Any], model: str, reader: ReplyReader) -> None:
        self.response: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **described,
        }
        self._reader, self._open, self._blank = reader, None, ""
        self._num_events = 0

    @property
    def reasoning(self) -> str:
        """What the model has thought."""
        return "".join(own["content"][0]["text"] for own in self.response["output"] if own["type"] == "reasoning")

    def begin(self) -> list[bytes]:
        return [self._event(f"response.{kind}", response=self.response) for kind in ("created", "in_progress")]

    def more(self, text: str, *, is_last: bool) -> list[bytes]:
        """The reply goes on with this."""
        found, events = self._reader.read(text, is_last=is_last), []
        if found.reasoning:
            events += self._say("reasoning", found.reasoning)
        for own in found.answer:
            events += self._call(own) if isinstance(own, Call) else self._say("message", own)
        return events

    def end(self, finish_reason: dict[str, Any], usage: dict[str, Any]) -> list[bytes]:
        """finish_reason: of the reply; usage: in the API's names."""
        is_whole = finish_reason["type"] != "length"
        events = self._close("completed" if is_whole else "incomplete")
        self.response |= {
            "status": "completed" if is_whole else "incomplete",
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "completed_at": int(time.time()),
            "usage": usage,
        }
        return [*events, self._event(f"response.{self.response['status']}", response=self.response)]

    def fail(self, message: str) -> list[bytes]:
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return [self._event("response.failed", response=self.response)]

    def _say(self, kind: str, text: str) -> list[bytes]:
        events = []
        if not self._open or self._open["type"] != kind:
            # White space before a call is no message.
            self._blank += text
            if not self._blank.strip():
                return []
            text, self._blank = self._blank, ""
            events = [*self._close("completed"), *self._begin(kind)]
        assert self._open
        part = self._open["content"][0]
        part["text"] += text
        return [*events, self._event(f"response.{part['type']}.delta", **self._place, content_index=0, delta=text, logprobs=[])]

    def _begin(self, kind: str) -> list[bytes]:
        item: dict[str, Any] = {"type": kind, "id": new_id("msg" if kind == "message" else "rs"), "status": "in_progress"}
        item |= {"role": "assistant"} if kind == "message" else {"summary": []}
        part: dict[str, Any] = {"type": PARTS[kind], "text": ""}
        part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        item["content"] = []
        added = self._add(item)
        item["content"] = [part]
        return [added, self._event("response.content_part.added", **self._place, content_index=0, part=part)]

    def _call(self, call: Call) -> list[bytes]:
        """It comes in one piece."""
        self._blank, events = "", self._close("completed")
        item = {"type": "function_call", "id": new_id("fc"), "call_id": call.id, "name": call.name}
        item |= {"arguments": "", "status": "in_progress"}
        events.append(self._add(item))
        item |= {"arguments": call.arguments, "status": "completed"}
        place, kind = self._place, "response.function_call_arguments"
        events.append(self._event(f"{kind}.delta", **place, delta=call.arguments))
        events.append(self._event(f"{kind}.done", **place, name=call.name, arguments=call.arguments))
        return [*events, self._done()]

    def _close(self, status: str) -> list[bytes]:
        """The item that grows, if any does."""
        if not self._open:
            return []
        (part,) = self._open["content"]
        self._open["status"] = status
        place = self._place | {"content_index": 0}
        return [
            self._event(f"response.{part['type']}.done", **place, text=part["text"], logprobs=[]),
            self._event("response.content_part.done", **place, part=part),
            self._done(),
        ]

    def _add(self, item: dict[str, Any]) -> bytes:
        self.response["output"].append(item)
        self._open = item
        return self._event("response.output_item.added", output_index=len(self.response["output"]) - 1, item=item)

    def _done(self) -> bytes:
        item, self._open = self._open, None
        return self._event("response.output_item.done", output_index=len(self.response["output"]) - 1, item=item)

    @property
    def _place(self) -> dict[str, Any]:
        """Of the item that grows."""
        assert self._open
        return {"item_id": self._open["id"], "output_index": len(self.response["output"]) - 1}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
