"""Functions that a model may call: how it is told of them, and how it is made to call them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle_rt.server.calls import CallFormat, CallReader, Functions, call_format
from eagle_rt.server.protocol import ChatMessage, ChatRequest, NamedFunction, Tool


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
    def functions(self) -> Functions:
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    def reader(self) -> CallReader:
        return CallReader(self.form, self.functions)


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
        matched = {
            "type": "tags_with_separator",
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": not several,
        }
    tags = [call_tag(form, tool) for tool in wanted]
    return Tools(tools, form, matched and {"type": "structural_tag", "format": {**matched, "tags": tags}})


def call_tag(form: CallFormat, tool: Tool) -> dict[str, Any]:
    """What a call of it must match."""
    content = json_format(tool.function.parameters or {"type": "object"}) | {"style": form.style}
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
