"""Functions that a model may call: how it is told of them, how it is made to call them, and how its calls are found in its text."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle_rt.models.tokenizer import writes_harmony
from eagle_rt.server.protocol import ChatMessage, ChatRequest, NamedFunction, Tool
from eagle_rt.server.text import length_of_begun


@dataclass(frozen=True)
class CallFormat:
    """How a model writes a call: begin, the function's name, middle, its arguments as a JSON object, end.

    opens: the first part of `begin`, by which a call is recognised; closes: the last part of `end`, empty where calls are the whole
    reply. The JSON object between them has the arguments under this key.
    """

    begin: str
    middle: str
    end: str
    opens: str
    closes: str
    key: str


# Hermes', which Qwen 2.5 and 3 and MiMo have learned, and Llama 3's.
TAGGED = CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "<tool_call>", "</tool_call>", "arguments")
BARE = CallFormat('{"name": "', '", "parameters": ', "}", "{", "", "parameters")

# gpt-oss', whose calls are messages of their own, see `harmony`; such a message ends a reply.
MESSAGES = CallFormat(
    "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", "<|channel|>commentary to=functions.", "", ""
)


def call_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat:
    """By what the chat template tells the model.

    Raises:
        ValueError: it tells nothing of calls, or of none that are known here.
    """
    template = str(tokenizer.chat_template)
    if writes_harmony(tokenizer) and "functions" in template:
        return MESSAGES
    if "<tool_call>" in template and "arguments" in template and "<function=" not in template:
        return TAGGED
    if '"parameters"' in template and "tools" in template:
        return BARE
    raise ValueError("tools is not possible with this model: its chat template tells of none, or not in a way that is known here")


@dataclass(frozen=True)
class Call:
    """arguments: JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def described(self) -> dict[str, Any]:
        """In OpenAI's names."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Finds the calls in a reply while it comes. Text that may become part of one is held back until that is decided; what looks
    like a call and is none, or of a function that was not given, stays text."""

    def __init__(self, form: CallFormat, names: frozenset[str]) -> None:
        self.num_calls = 0
        self._form, self._names = form, names
        self._held = ""  # since the last that was decided
        self._has_text = False

    def read(self, text: str, *, is_last: bool) -> tuple[str, list[Call]]:
        """The reply goes on with this, and ends if it is the last: the text of it that is no call, and the calls."""
        self._held += text
        read = self._read_tagged if self._form.closes else self._read_bare
        content, calls = read(is_last)
        self._has_text |= bool(content.strip())
        self.num_calls += len(calls)
        return content, calls

    def _read_tagged(self, is_last: bool) -> tuple[str, list[Call]]:
        opens, closes = self._form.opens, self._form.closes
        content, calls = "", []
        while True:
            before, tag, rest = self._held.partition(opens)
            if not tag:
                cut = len(before) if is_last else len(before) - length_of_begun(before, opens)
                self._held = before[cut:]
                return content + before[:cut], calls
            inside, end, after = rest.partition(closes)
            if not end and not is_last:
                self._held = tag + rest
                return content + before, calls
            call = self._call(decoded(inside))
            content += before if call else before + tag + inside + end
            calls += [call] if call else []
            self._held = after

    def _read_bare(self, is_last: bool) -> tuple[str, list[Call]]:
        """Calls are all of a reply, one behind the other, perhaps with semicolons between them."""
        text = self._held.lstrip()
        may_be_call = not self._has_text and (not text or text.startswith(self._form.opens))
        if may_be_call and not is_last:
            return "", []
        content, self._held = self._held, ""
        calls = []
        while may_be_call and text:
            try:
                found, end = json.JSONDecoder().raw_decode(text)
            except ValueError:
                return content, []
            call = self._call(found)
            if not call:
                return content, []
            calls.append(call)
            text = text[end:].lstrip("; \n")
        return ("" if calls else content), calls

    def _call(self, found: Any) -> Call | None:
        """None if what is written there is none."""
        if not isinstance(found, dict) or found.get("name") not in self._names:
            return None
        arguments = found.get(self._form.key, {})
        return Call(found["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def decoded(text: str) -> Any:
    """What the JSON says; None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Tools:
    """Those of one request. structural_tag: what the reply must match; None: the model may call them or not, as it likes."""

    tools: Sequence[Tool]
    form: CallFormat
    structural_tag: dict[str, Any] | None

    @property
    def described(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)

    def reader(self) -> CallReader:
        return CallReader(self.form, self.names)


def tools_of(body: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> Tools | None:
    """None where nothing may be called.

    Raises:
        ValueError: the model knows no tools, or a function that must be called is not among them.
    """
    choice, tools = body.tool_choice, body.tools
    if choice == "none" or not tools:
        if choice not in ("none", "auto", None):
            raise ValueError("tool_choice is given, but tools is not")
        return None
    form = call_format(tokenizer)
    wanted = tools
    if isinstance(choice, NamedFunction):
        wanted = [tool for tool in tools if tool.function.name == choice.function.name]
        if not wanted:
            raise ValueError(f"tool_choice is {choice.function.name!r}, which is not among the tools")
    several = body.parallel_tool_calls is not False and form.closes and not isinstance(choice, NamedFunction)
    if choice in (None, "auto"):
        is_strict = any(tool.function.strict for tool in tools)
        matched = {"type": "triggered_tags", "triggers": [form.opens], "stop_after_first": not several} if is_strict else None
    else:
        matched = {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, "stop_after_first": not several}
    tags = [call_tag(form, tool) for tool in wanted]
    return Tools(tools, form, matched and {"type": "structural_tag", "format": {**matched, "tags": tags}})


def call_tag(form: CallFormat, tool: Tool) -> dict[str, Any]:
    """What a call of it must match."""
    content = json_format(tool.function.parameters or {"type": "object"})
    return {"type": "tag", "begin": form.begin + tool.function.name + form.middle, "content": content, "end": form.end}


def json_format(schema: Any) -> dict[str, Any]:
    """JSON, in one line, as a part of xgrammar's structural tags."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def template_message(message: ChatMessage) -> dict[str, Any]:
    """As chat templates take it."""
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in message.tool_calls
        ]
    return plain
