"""How models write calls of functions, and how these are found in a reply."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from eagle_rt.models.tokenizer import writes_harmony
from eagle_rt.server.text import length_of_begun
from eagle_rt.server.values import DECODER, NO_JSON, decoded, gemma_value, value_of

# Names of functions, and the JSON schemas of their parameters.
Functions = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class CallFormat:
    """How a model writes a call: begin, the function's name, middle, its arguments in a style (of xgrammar's names), end.

    opens: the first part of `begin`, by which a call is recognised; closes: the last part of `end`, empty where calls are the whole
    reply. Between them is an object with the name and, under this key, the arguments. inner: the marks within these, where a model
    is known to forget the first one of those. one_of_several: a pattern, where several calls may stand between the same marks.
    separator: between calls. of_mistral: calls are all of a reply from the first mark on, and have ids of nine letters and digits,
    which templates insist on.
    """

    begin: str
    middle: str
    end: str
    opens: str
    closes: str
    key: str
    style: Literal["json", "qwen_xml", "glm_xml", "minimax_xml", "gemma"] = "json"
    inner: tuple[str, str] | None = None
    one_of_several: str | None = None
    separator: str = "\n"
    of_mistral: bool = False


# Hermes', which Qwen 2.5 and 3 and MiMo have learned, Qwen3-Coder's, Seed-OSS', GLM-4.5's, MiniMax-M2's, Llama 3's, Gemma 4's, and
# Mistral's: each call after a mark of its own, or, formerly, all in one list.
TAGGED = CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "<tool_call>", "</tool_call>", "arguments")
PARAMETERS = CallFormat(
    "<tool_call>\n<function=",
    ">\n",
    "\n</function>\n</tool_call>",
    "<tool_call>",
    "</tool_call>",
    "arguments",
    "qwen_xml",
    ("<function=", "</function>"),
)
SEED = replace(
    PARAMETERS,
    begin="<seed:tool_call>\n<function=",
    end="\n</function>\n</seed:tool_call>",
    opens="<seed:tool_call>",
    closes="</seed:tool_call>",
)
PAIRS = CallFormat("<tool_call>", "", "</tool_call>", "<tool_call>", "</tool_call>", "arguments", "glm_xml")
INVOKES = CallFormat(
    '<minimax:tool_call>\n<invoke name="',
    '">\n',
    "\n</invoke>\n</minimax:tool_call>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "arguments",
    "minimax_xml",
    one_of_several=r"\s*(<invoke .*?</invoke>)\s*",
)
SPELLED = CallFormat("<|tool_call>call:", "", "<tool_call|>", "<|tool_call>", "<tool_call|>", "arguments", "gemma", separator="")
MARKED = CallFormat("[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]", "", "arguments", of_mistral=True)
LISTED = replace(MARKED, begin='[TOOL_CALLS] [{"name": "', middle='", "arguments": ', end="}]")
BARE = CallFormat('{"name": "', '", "parameters": ', "}", "{", "", "parameters")

# Where parameters have tags of their own: a name and what belongs to it, and of that each parameter and its value.
TAGS = {
    "qwen_xml": (r"\s*<function=([^>\n]+)>(.*?)</function>\s*", r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"),
    "minimax_xml": (r'<invoke name="([^"\n]+)">(.*?)</invoke>', r'<parameter name="([^"\n]+)">(.*?)</parameter>'),
    "glm_xml": (r"\s*([^\s<]+)(.*)", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
}

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
    if "[AVAILABLE_TOOLS]" in template and MARKED.opens in template:
        return MARKED if MARKED.middle in template else LISTED
    if "<function=" in template and "<parameter=" in template and (SEED.opens in template or "<tool_call>" in template):
        return SEED if SEED.opens in template else PARAMETERS
    if SPELLED.opens in template:
        return SPELLED
    if "<tool_call>" in template and "<arg_key>" in template:
        return PAIRS
    if "<minimax:tool_call>" in template and "<invoke name=" in template:
        return INVOKES
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

    def __init__(self, form: CallFormat, functions: Functions) -> None:
        self.num_calls = 0
        self._form, self._functions = form, functions
        self._held = ""  # since the last that was decided
        self._has_text = False
        self._may_close = False  # whether the last call had inner marks alone, which the last of the outer ones may follow

    def read(self, text: str, *, is_last: bool) -> list[str | Call]:
        """The reply goes on with this, and ends if it is the last: the calls, and what is none, in their order."""
        self._held += text
        read = self._read_tagged if self._form.closes else self._read_marked if self._form.of_mistral else self._read_bare
        told = [own for own in read(is_last) if own]
        self._has_text |= any(isinstance(own, str) and bool(own.strip()) for own in told)
        self.num_calls += sum(isinstance(own, Call) for own in told)
        return told

    def _read_tagged(self, is_last: bool) -> list[str | Call]:
        outer, inner = (self._form.opens, self._form.closes), self._form.inner
        told: list[str | Call] = []
        while not self._may_close or self._is_closed(is_last):
            marks = [(place, own) for own in (outer, inner) if own and (place := self._held.find(own[0])) >= 0]
            if not marks:
                begun = max(length_of_begun(self._held, own[0]) for own in (outer, inner) if own)
                cut = len(self._held) if is_last else len(self._held) - begun
                told.append(self._held[:cut])
                self._held = self._held[cut:]
                break
            place, own = min(marks)
            told.append(self._held[:place])
            self._held = self._held[place:]
            inside, end, after = self._held.removeprefix(own[0]).partition(own[1])
            if not end and not is_last:
                break
            whole, self._held = own[0] + inside + end, after
            found = self._calls_in(inside if own == outer else whole)
            told += found or [whole]
            self._may_close = bool(found) and own == inner
        return told

    def _is_closed(self, is_last: bool) -> bool:
        """Whether it is known by now if the last of the outer marks follows; if it does, behind it."""
        closes, text = self._form.closes, self._held.lstrip()
        if not is_last and closes != text and closes.startswith(text):
            return False
        if text.startswith(closes):
            self._held = text.removeprefix(closes)
        self._may_close = False
        return True

    def _read_marked(self, is_last: bool) -> Sequence[str | Call]:
        """Calls are all of a reply from the first mark on."""
        before, mark, _ = self._held.partition(self._form.opens)
        cut = len(before) if mark or is_last else len(before) - length_of_begun(before, self._form.opens)
        content, self._held = self._held[:cut], self._held[cut:]
        if not is_last:
            return [content]
        rest, self._held = self._held, ""
        parts = rest.split(self._form.opens)[1:]
        if self._form is LISTED:
            listed = decoded(parts[0]) if len(parts) == 1 else None
            found = listed if isinstance(listed, list) else [None]
        else:
            halves = [part.partition(self._form.middle) for part in parts]
            found = [{"name": name.partition("[CALL_ID]")[0].strip(), "arguments": decoded(text)} for name, _, text in halves]
        calls = [call for own in found if (call := self._call(own))]
        return [content, *calls] if len(calls) == len(found) else [content + rest]

    def _read_bare(self, is_last: bool) -> Sequence[str | Call]:
        """Calls are all of a reply, one behind the other, perhaps with semicolons between them."""
        text = self._held.lstrip()
        may_be_call = not self._has_text and (not text or text.startswith(self._form.opens))
        if may_be_call and not is_last:
            return []
        content, self._held = self._held, ""
        calls = []
        while may_be_call and text:
            try:
                found, end = DECODER.raw_decode(text)
            except NO_JSON:
                return [content]
            call = self._call(found)
            if not call:
                return [content]
            calls.append(call)
            text = text[end:].lstrip("; \n")
        return calls or [content]

    def _calls_in(self, text: str) -> list[Call]:
        """Nothing where any of it is none."""
        style, pattern = self._form.style, self._form.one_of_several
        if pattern and re.sub(pattern, "", text, flags=re.DOTALL):
            return []
        parts = re.findall(pattern, text, re.DOTALL) if pattern else [text]
        if style == "json":
            read = [decoded(part) for part in parts]
        elif style == "gemma":
            read = [spelled_call(part) for part in parts]
        else:
            read = [parameters_in(part, *TAGS[style], self._functions) for part in parts]
        calls = [call for own in read if (call := self._call(own))]
        return calls if len(calls) == len(parts) else []

    def _call(self, found: Any) -> Call | None:
        """None if what is written there is none."""
        name, arguments = (found.get("name"), found.get(self._form.key, {})) if isinstance(found, dict) else (None, None)
        if not isinstance(name, str) or name not in self._functions or not isinstance(arguments, dict):
            return None
        call = Call(name, json.dumps(arguments, ensure_ascii=False))
        return replace(call, id=uuid.uuid4().hex[:9]) if self._form.of_mistral else call


def parameters_in(text: str, call_pattern: str, tag_pattern: str, functions: Functions) -> dict[str, Any] | None:
    """The object that a call with tags for each parameter stands for; None if it is none. The patterns: see TAGS."""
    called = re.fullmatch(call_pattern, text, re.DOTALL)
    if not called:
        return None
    name, inside = called[1], called[2]
    tag = re.compile(tag_pattern, re.DOTALL)
    if tag.sub("", inside).strip():
        return None
    schemas = functions.get(name, {}).get("properties")
    schemas = schemas if isinstance(schemas, dict) else {}
    return {"name": name, "arguments": {own[1]: value_of(own[2], schemas.get(own[1])) for own in tag.finditer(inside)}}


def spelled_call(text: str) -> dict[str, Any] | None:
    """What Gemma 4 writes between its marks; None if it is no call."""
    called = re.fullmatch(r"\s*call:([^\s{]+)\s*({.*)", text, re.DOTALL)
    return called and {"name": called[1], "arguments": gemma_value(called[2])}
