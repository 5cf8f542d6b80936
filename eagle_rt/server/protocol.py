"""The bodies of HTTP requests, checked by pydantic, in OpenAI's and SGLang's names."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from eagle_rt.engine.params import AtLeastOne, NotNegative, NumLogprobs, SamplingParams, TokenId, sampling_params

# Parameters of the OpenAI API that change a reply and are not supported, with the values at which they change nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
# Parameters that say something about the caller and nothing about the reply.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}


class Strict(BaseModel):
    """Nothing unknown, and no number that is a text or a truth value."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    include_usage: bool = False


class JsonSchema(Strict):
    """A schema with its name. Replies keep to it whether it is called strict or not."""

    name: str
    description: str | None = None
    wanted: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the whole reply must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def has_a_schema_if_that_is_its_type(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError(f"type is {self.type}, but json_schema is {'missing' if self.json_schema is None else 'given'}")
        return self

    @property
    def wanted(self) -> dict[str, Any] | None:
        """The schema; None: any text will do."""
        if self.json_schema:
            return self.json_schema.wanted
        return {"type": "object"} if self.type == "json_object" else None


class AnyRequest(Strict):
    """What all of OpenAI's forms of a request have in common."""

    model: str | None = None
    stream: bool = False
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    speculative: dict[str, Any] | None = None


class OpenAIRequest(AnyRequest):
    """What chat and text completions have in common."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    logit_bias: dict[Annotated[int, Field(strict=False)], float] | None = None  # names in JSON are texts
    response_format: ResponseFormat | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def drop_what_changes_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {}
        for name, value in values.items():
            is_unknown = name in NEUTRAL_VALUES and name not in cls.model_fields
            if name in IGNORED or (is_unknown and (value is None or value in NEUTRAL_VALUES[name])):
                continue
            if is_unknown:
                raise ValueError(f"{name} is not supported")
            kept[name] = value
        return kept

    def sampling(
        self,
        defaults: dict[str, Any],
        max_new_tokens: int | None,
        num_logprobs: int | None,
        structural_tag: dict[str, Any] | None = None,
    ) -> SamplingParams:
        """structural_tag: what the tools want of the reply. Raises ValueError for a value that is out of range."""
        names = set(OpenAIRequest.model_fields) & set(SamplingParams.__dataclass_fields__)
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        schema = self.response_format.wanted if self.response_format else None
        for source, name, wanted in (("response_format", "json_schema", schema), ("tools", "structural_tag", structural_tag)):
            if wanted is not None and given.setdefault(name, wanted) is not wanted:
                raise ValueError(f"{source} and {name} are both given, but a reply can only match one of them")
        return sampling_params({**given, "max_new_tokens": max_new_tokens, "logprobs": num_logprobs}, defaults)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Function(Strict):
    """One that a model may call. Its calls keep to the schema of its parameters if it is strict, or must be called."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedFunction(Strict):
    """The one that must be called."""

    type: Literal["function"]
    function: FunctionName


def json_object(text: Any) -> dict[str, Any]:
    """Raises ValueError if the text is none."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object")
    return found


class CalledFunction(BaseModel):
    """arguments: what the JSON says that the model wrote."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(json_object)]


class ToolCall(BaseModel):
    id: str
    function: CalledFunction


class ChatMessage(BaseModel):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def is_text(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and part.get("type") != "text":
                raise ValueError(f"parts of type {part.get('type')!r} are not supported, only text is")
        return content

    @model_validator(mode="after")
    def says_something(self) -> "ChatMessage":
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ValueError("content is missing")
        return self

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])


class ChatRequest(OpenAIRequest):
    """chat_template_kwargs: what the chat template asks for besides messages and tools, as Qwen 3's `enable_thinking`.
    separate_reasoning: what the model thinks is no part of the content."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    separate_reasoning: bool = True

    @model_validator(mode="after")
    def has_logprobs_to_rank(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, but needs logprobs: true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def template_options(self) -> dict[str, Any]:
        """For the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        silence = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return {**effort, **silence, **(self.chat_template_kwargs or {})}


class CompletionRequest(OpenAIRequest):
    """echo: the reply is told after its prompt, and log-probabilities of both."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: NotNegative | None = 16
    logprobs: NumLogprobs | None = None
    echo: bool | None = None

    @field_validator("prompt")
    @classmethod
    def has_content(cls, prompt: Any) -> Any:
        if len(prompt) == 0:
            raise ValueError("must not be empty")
        return prompt


class GenerateRequest(Strict):
    """SGLang's native request: `text` or `input_ids`, one or several, and its own sampling names."""

    text: str | list[str] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Literal[-1, 0] = -1  # 0: of the prompt, too
    top_logprobs_num: NumLogprobs = 0

    @model_validator(mode="after")
    def has_one_prompt(self) -> "GenerateRequest":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        if not self.text and not self.input_ids:
            raise ValueError("the prompt is empty")
        return self
