"""Requests of OpenAI's Responses API: chats told another way, as a list of what was said, called, answered and thought. Nothing is
stored, so all of it comes with every request."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from eagle_rt.engine.params import AtLeastOne
from eagle_rt.server.errors import told_of
from eagle_rt.server.protocol import IGNORED, AnyRequest, ChatRequest, Function, Strict

# What would have to be stored, or is none of a server of one model.
WITHOUT_STORE = ("previous_response_id", "conversation", "prompt", "background")
# What a chat calls the same.
SAME = (*AnyRequest.model_fields, "parallel_tool_calls", "chat_template_kwargs")


class Part(BaseModel):
    """Of a text."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


Content = str | list[Part]


class Message(BaseModel):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCall(BaseModel):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(BaseModel):
    call_id: str
    output: Content


class Reasoning(BaseModel):
    content: list[Part] | None = None


def kind_of(item: Any) -> str:
    """Messages need not say that they are."""
    return item.get("type", "message") if isinstance(item, dict) else "message"


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(
        kind_of,
        custom_error_type="unknown_item",
        custom_error_message="items are messages, function_call, function_call_output and reasoning, others are not supported",
    ),
]


class ResponseFunction(Function):
    """As a chat's, but not within another object."""

    type: Literal["function"]


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    wanted: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @property
    def as_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        own = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": self.type, "json_schema": own}


class TextOptions(Strict):
    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None  # of models that know of it


class ReasoningOptions(Strict):
    """summary: what a model thinks is told as it is."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(AnyRequest):
    """Beside OpenAI's parameters those of ours that a chat takes."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None
    tools: list[ResponseFunction] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # of which there is none
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def is_complete_in_itself(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in WITHOUT_STORE:
            if values.get(name):
                raise ValueError(f"{name} is not supported: nothing is stored here, send all of the conversation as input")
        ignored = {*IGNORED, *WITHOUT_STORE} - {"metadata"}
        return {name: value for name, value in values.items() if name not in ignored}

    @field_validator("text", "reasoning", mode="before")
    @classmethod
    def none_is_default(cls, value: Any) -> Any:
        return {} if value is None else value

    def as_chat(self) -> ChatRequest:
        """Raises ValueError where a chat could not be asked so."""
        given = {name: getattr(self, name) for name in SAME}
        tools, choice = self.tools or [], self.tool_choice
        given |= {
            "messages": messages_of(self),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": own.model_dump(exclude={"type"}, exclude_none=True)} for own in tools]
            or None,
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, FunctionChoice)
            else choice,
            "response_format": self.text.format.as_chat,
            "reasoning_effort": self.reasoning.effort,
        }
        try:
            return ChatRequest.model_validate({name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            raise ValueError(told_of(error.errors()[0])[1]) from None

    def described(self) -> dict[str, Any]:
        """What a response repeats of it."""
        told = self.model_dump(include={"instructions", "max_output_tokens", "temperature", "top_p", "metadata"})
        choice = self.tool_choice
        return told | {
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or []],
            "text": self.text.model_dump(exclude_none=True, by_alias=True),
            "reasoning": self.reasoning.model_dump(),
            "truncation": "disabled",
            "store": False,
        }


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """A chat's: what a model thinks and calls belongs to the message that it is part of; instructions come first, as one."""
    items = [Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    instructions, messages, thought = [body.instructions] if body.instructions else [], [], ""
    for item in items:
        if isinstance(item, Reasoning):
            thought += text_of(item.content or [])
            continue
        if isinstance(item, FunctionCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, FunctionCall):
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            if thought or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item.role in ("system", "developer") and not messages:
            instructions.append(text_of(item.content))
        else:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": text_of(item.content)})
        if thought and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thought = thought, ""
    return [{"role": "system", "content": "\n\n".join(instructions)}, *messages] if instructions else messages
