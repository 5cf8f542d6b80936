"""Calls in replies: found however the text comes, and made where they must be."""

import json
from typing import Any

import pytest
from checkpoints import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from matching import INFO, LOOK_UP, check_matches
from pydantic import ValidationError
from xgrammar import GrammarCompiler, GrammarMatcher

from eagle_rt.engine.text import TextDelta
from eagle_rt.models.tokenizer import chat_tokens
from eagle_rt.server.choices import ChatChoice
from eagle_rt.server.protocol import ChatRequest
from eagle_rt.server.reasoning import MarkedReader
from eagle_rt.server.tools import BARE, TAGGED, CallFormat, CallReader, call_format, template_message, tools_of

NAMES = frozenset(["look_up", "add"])
ADD = {"type": "function", "function": {"name": "add", "strict": True}}


def read(form: CallFormat, parts: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """What a reply that comes in these parts says, and what it calls."""
    reader, content, calls = CallReader(form, NAMES), "", []
    for number, part in enumerate(parts, 1):
        more, found = reader.read(part, is_last=number == len(parts))
        content += more
        calls += [(call.name, json.loads(call.arguments)) for call in found]
    assert reader.num_calls == len(calls)
    return content, calls


ARGUMENTS = st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers() | st.none(), max_size=2)
CALLS = st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS)
# Nothing in it is a call, however much it looks like one.
WORDS = st.sampled_from(["Let me see. ", "<", "<tool_call", "\n", "{", "</tool_call>", 'a < b, {"name": "add"}', "<tool>"])
MISTAKES = st.sampled_from(
    [
        "<tool_call>no JSON</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        "<tool_call>[]</tool_call>",
    ]
)


def written(form: CallFormat, call: tuple[str, dict[str, Any]]) -> str:
    return form.begin + call[0] + form.middle + json.dumps(call[1]) + form.end


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    return [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_calls_in_tags_are_found_wherever_a_text_is_cut(data: st.DataObject) -> None:
    parts = data.draw(st.lists(CALLS | WORDS | MISTAKES, max_size=6))
    text = "".join(part if isinstance(part, str) else written(TAGGED, part) for part in parts)
    # A word may open what only the next call closes.
    calls = [part for part in parts if not isinstance(part, str)]
    content = "".join(part for part in parts if isinstance(part, str))
    whole = read(TAGGED, [text])
    assert read(TAGGED, cut(data, text)) == whole
    if "<tool_call" not in parts:
        assert whole == (content, calls)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_bare_calls_are_all_of_a_reply(data: st.DataObject) -> None:
    calls = data.draw(st.lists(CALLS, min_size=1, max_size=3))
    text = data.draw(st.sampled_from(["; ", "\n", ""])).join(written(BARE, call) for call in calls)
    assert read(BARE, cut(data, text)) == ("", calls)
    assert read(BARE, cut(data, "So: " + text)) == ("So: " + text, [])
    for more in (" and more", '; {"name": "unknown", "parameters": {}}', "; {"):
        assert read(BARE, cut(data, text + more)) == (text + more, [])


def test_a_call_that_is_not_closed() -> None:
    """A model may end with it."""
    assert read(TAGGED, ['Yes.<tool_call>{"name": "add", "arguments": {}}']) == ("Yes.", [("add", {})])
    assert read(TAGGED, ['<tool_call>{"name": "add", "argu']) == ('<tool_call>{"name": "add", "argu', [])


def test_formats_are_told_by_templates() -> None:
    tokenizer = byte_tokenizer()
    assert call_format(tokenizer) is TAGGED
    for template, form in (
        ('{% if tools %}Respond as {"name": name, "parameters": dictionary}{% endif %}', BARE),
        ("{% if tools %}<tool_call>{'name': name, 'arguments': {}}</tool_call>{% endif %}", TAGGED),
    ):
        tokenizer.chat_template = template
        assert call_format(tokenizer) is form
    for template in (
        None,
        "{{ messages }}",
        "<tool_call><function=name>arguments</function></tool_call>",
        "[TOOL_CALLS]{{ tools }}",
    ):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=r"^tools is not possible with this model"):
            call_format(tokenizer)


def body(**options: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": [LOOK_UP, ADD], **options})


ROME = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Rome"}}\n</tool_call>'
OSLO = ROME.replace("Rome", "Oslo")
PARIS = ROME.replace("Rome", "Paris")
SUM = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("options", "matching", "others"),
    [
        ({"tool_choice": "required"}, [ROME, OSLO, SUM, f"{ROME}\n{SUM}"], ["", "No.", PARIS, f"Yes. {ROME}"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [ROME, SUM], [f"{ROME}\n{SUM}"]),
        ({"tool_choice": {"type": "function", "function": {"name": "look_up"}}}, [ROME], [SUM, f"{ROME}\n{OSLO}", ""]),
        ({"tool_choice": "auto"}, ["No.", ROME, f"Yes. {ROME} and {SUM}"], [PARIS, "<tool_call>no"]),
        ({}, ["No.", SUM], [PARIS]),
    ],
    ids=["any", "one of any", "named", "free but strict", "by default"],
)
def test_what_must_be_called(options: dict[str, Any], matching: list[str], others: list[str]) -> None:
    tools = tools_of(body(**options), byte_tokenizer())
    assert tools is not None
    assert tools.structural_tag is not None
    check_matches(tools.structural_tag, matching, others)


def test_nothing_must_be_matched_unless_it_is_asked_for() -> None:
    tools = tools_of(body(tools=[LOOK_UP]), byte_tokenizer())
    assert tools is not None
    assert tools.structural_tag is None
    assert tools_of(body(tool_choice="none"), byte_tokenizer()) is None
    assert tools_of(body(tools=[]), byte_tokenizer()) is None
    with pytest.raises(ValueError, match=r"^tool_choice is 'fly', which is not among the tools"):
        tools_of(body(tool_choice={"type": "function", "function": {"name": "fly"}}), byte_tokenizer())
    with pytest.raises(ValueError, match=r"^tool_choice is given, but tools is not"):
        tools_of(body(tools=None, tool_choice="required"), byte_tokenizer())


def test_bare_calls_that_must_be_made() -> None:
    """One: what would separate two is not told to the model."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = '{{ tools }}{"name": name, "parameters": dictionary}'
    tools = tools_of(body(tool_choice="required"), tokenizer)
    assert tools is not None
    assert tools.structural_tag is not None
    matcher = GrammarMatcher(GrammarCompiler(INFO).compile_structural_tag(tools.structural_tag))
    assert matcher.accept_string('{"name": "look_up", "parameters": {"city": "Rome"}}')
    assert matcher.is_completed()
    assert not matcher.accept_string("\n{")


def test_dialogues_with_calls() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "20"}]},
    ]
    tokenizer = byte_tokenizer()
    plain = [template_message(message) for message in body(messages=messages).messages]
    assert plain[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    text = tokenizer.decode(chat_tokens(tokenizer, plain, [LOOK_UP]))
    assert '"description": "the weather"' in text
    assert "<|assistant|>look_upcity<|end|><|tool|>20<|end|><|assistant|>" in text
    for broken in ({"arguments": "[1]"}, {"arguments": "{"}):
        messages[1]["tool_calls"] = [{**call, "function": {"name": "look_up", **broken}}]
        with pytest.raises(ValidationError, match="must be a JSON object"):
            body(messages=messages)
    with pytest.raises(ValidationError, match="content is missing"):
        body(messages=[{"role": "user"}])


def test_choices_of_replies_with_calls() -> None:
    """Parts together are the whole; what ended a reply with calls is that it has made them."""
    end = {"type": "stop", "matched": 3}
    choice = ChatChoice(MarkedReader(CallReader(TAGGED, NAMES)))
    parts = [choice.part(TextDelta(text, None)) for text in ("Yes. ", ROME[:20], ROME[20:], SUM)] + [
        choice.part(TextDelta("", end))
    ]
    calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert "".join(part["delta"].get("content", "") for part in parts) == "Yes. "
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "look_up"), (1, "add")]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Rome"}
    assert calls[0]["id"] != calls[1]["id"]
    assert [part["finish_reason"] for part in parts] == [None] * 4 + ["tool_calls"]
    cut_off = ChatChoice(MarkedReader(CallReader(TAGGED, NAMES)))
    assert cut_off.part(TextDelta(ROME, {"type": "length", "length": 5}))["finish_reason"] == "length"
