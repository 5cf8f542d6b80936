"""Replies in gpt-oss' format: messages of their own for thoughts, calls and the answer (OpenAI, "harmony response format", 2025).

A message is a header, a mark and a text: `<|start|>assistant<|channel|>analysis<|message|>We need to ...<|end|>`. The channel
`analysis` is for thoughts, `final` for the answer, `commentary` for what is said before calls and, with a recipient
(`to=functions.look_up`), for calls. The prompt has opened the first message. OpenAI's own package would fetch a vocabulary when it
is loaded, and reads tokens of that alone.
"""

import re
from dataclasses import dataclass
from typing import Any

from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.tokenizer import HARMONY_MARKS
from eagle_rt.server.calls import Call, Functions
from eagle_rt.server.matching import behind, matched_format
from eagle_rt.server.replies import ReplyPart, ReplyReader
from eagle_rt.server.text import length_of_begun
from eagle_rt.server.tools import Tools
from eagle_rt.server.values import decoded

START, END, MESSAGE, CHANNEL, _ = HARMONY_MARKS
# What a message ends with: the last ones end a reply too.
ENDS = (END, START, "<|return|>", "<|call|>", "<|endoftext|>")
FUNCTIONS = "functions."


@dataclass(frozen=True)
class Header:
    channel: str
    recipient: str | None

    @classmethod
    def of(cls, text: str) -> "Header":
        """The recipient may stand before the channel or behind it."""
        channel, recipient = re.search(r"<\|channel\|>\s*(\w+)", text), re.search(r"\bto=([^\s<]+)", text)
        return cls(channel[1] if channel else "final", recipient[1] if recipient else None)


class HarmonyReader:
    """functions: that may be called; of others, and where the arguments are no JSON object, a call stays text."""

    def __init__(self, functions: Functions, *, tells_reasoning: bool) -> None:
        self.tells_reasoning, self.num_calls = tells_reasoning, 0
        self._functions, self._held = functions, ""
        self._header: Header | None = None  # of the message that is being read
        self._is_first = True
        self._arguments = ""
        self._kinds_told: set[str] = set()  # in messages before

    def read(self, text: str, *, is_last: bool) -> ReplyPart:
        self._held += text
        part = ReplyPart()
        while self._header or self._has_begun(is_last):
            found = [(place, mark) for mark in ENDS if (place := self._held.find(mark)) >= 0]
            if not found:
                cut = len(self._held) if is_last else len(self._held) - max(length_of_begun(self._held, mark) for mark in ENDS)
                body, self._held = self._held[:cut], self._held[cut:]
                self._tell(body, part, is_whole=is_last)
                return part
            place, mark = min(found)
            body, self._held = self._held[:place], self._held[place + len(mark) :]
            self._tell(body, part, is_whole=True)
            self._header = None
        return part

    def _has_begun(self, is_last: bool) -> bool:
        """Whether a message's text has; what opens it is then behind. A reply that opens none is an answer."""
        text = self._held.lstrip()
        if self._is_first and text and not any(mark.startswith(text[: len(mark)]) for mark in (*HARMONY_MARKS, "to=")):
            self._header = Header("final", None)
        elif MESSAGE in text:
            header, _, self._held = text.partition(MESSAGE)
            self._header = Header.of(header)
        elif is_last and self._is_first and CHANNEL not in text:
            self._header = Header("final", None)
        self._is_first = self._is_first and not self._header
        return self._header is not None

    def _tell(self, text: str, part: ReplyPart, *, is_whole: bool) -> None:
        """text: more of the message's, the last of it if that is whole then."""
        header = self._header
        assert header
        name = (header.recipient or "").removeprefix(FUNCTIONS)
        kind = "reasoning" if header.channel == "analysis" and self.tells_reasoning else "content"
        if name in self._functions:
            self._arguments += text
            if not is_whole:
                return
            text, self._arguments = self._arguments, ""
            if isinstance(decoded(text), dict):
                part.answer.append(Call(name, text.strip()))
                self.num_calls += 1
                return
        # One behind the other, in lines of their own.
        if text and kind in self._kinds_told:
            text = f"\n{text}"
            self._kinds_told.discard(kind)
        if kind == "reasoning":
            part.reasoning += text
        elif text:
            part.answer.append(text)
        if is_whole:
            self._kinds_told.add(kind)


@dataclass(frozen=True)
class Harmony:
    """tells_reasoning: unless a request wants it otherwise."""

    tells_reasoning: bool = True
    keeps_special_tokens = True

    def reader(self, tools: Tools | None, *, tells_reasoning: bool) -> ReplyReader:
        return HarmonyReader(tools.functions if tools else {}, tells_reasoning=tells_reasoning and self.tells_reasoning)

    def before(self, params: SamplingParams, *, is_call: bool) -> SamplingParams:
        """A call is a message; anything else stands in one of the final channel. Both behind one of thoughts, or none."""
        answer = params.grammar and matched_format(params.grammar)
        if not answer:
            return params
        thoughts = [
            {"type": "tag", "begin": f"{CHANNEL}analysis{MESSAGE}", "content": {"type": "any_text"}, "end": END},
            {"type": "const_string", "value": f"{START}assistant"},
        ]
        elements: list[dict[str, Any]] = [{"type": "optional", "content": {"type": "sequence", "elements": thoughts}}]
        if not is_call:
            elements.append({"type": "const_string", "value": f"{CHANNEL}final{MESSAGE}"})
        return behind(params, elements, answer)


def harmony_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a dialogue as gpt-oss' template takes it: beside calls it wants either thoughts or other words, and shows both
    as thoughts."""
    thoughts = message.get("reasoning_content")
    if thoughts is None:
        return message
    if not message.get("tool_calls"):
        return {**message, "thinking": thoughts}
    said = "\n".join(text for text in (thoughts, message["content"]) if text)
    return {**message, "thinking": said, "content": ""}
