"""Calls as Gemma 4 spells them: keys without quotes, strings between marks."""

import json
from typing import Any

from checkpoints import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from matching import check_matches
from server.test_calls import cut, read
from server.test_tools import tools_that_must_be_called

from eagle_rt.server.calls import SPELLED
from eagle_rt.server.reasoning import MarkedReader, Reasoning, reply_form
from eagle_rt.server.replies import ReplyPart
from eagle_rt.server.tools import Tools
from eagle_rt.server.values import QUOTE, gemma_value

TEMPLATE = "{{ tools }}<|channel>thought <channel|><|tool_call>call:name{}<tool_call|>"
KEYS = st.text(st.characters(codec="utf-8", exclude_characters=':{}[],<|"'), min_size=1, max_size=6).filter(
    lambda key: key == key.strip()
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["1", "null", "}", ",", "]", "a: b", '"', " x "])
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8)


def spelled(value: Any, space: str = "") -> str:
    if isinstance(value, str):
        return QUOTE + value + QUOTE
    if isinstance(value, list):
        return f"[{f',{space}'.join(spelled(own, space) for own in value)}]"
    if isinstance(value, dict):
        return f"{{{f',{space}'.join(f'{key}:{space}{spelled(own, space)}' for key, own in value.items())}{space}}}"
    return json.dumps(value)


def written(name: str, arguments: dict[str, Any], space: str = "") -> str:
    return f"<|tool_call>call:{name}{spelled(arguments, space)}<tool_call|>"


@settings(max_examples=300, deadline=None)
@given(VALUES, st.sampled_from(["", " ", "\n"]))
def test_what_is_spelled_is_read(value: Any, space: str) -> None:
    assert gemma_value(spelled(value, space)) == value


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_calls_are_found_wherever_a_text_is_cut(data: st.DataObject) -> None:
    calls = data.draw(
        st.lists(st.tuples(st.sampled_from(["add", "look_up"]), st.dictionaries(KEYS, VALUES, max_size=3)), max_size=3)
    )
    words = st.sampled_from(["", "Let me see. ", "<|tool", "{a:1}", written("unknown", {}), "call:add{}"])
    text, content = "", ""
    for call in calls:
        before = data.draw(words)
        text, content = text + before + written(*call), content + before
    last = data.draw(words)
    assert read(SPELLED, cut(data, text + last)) == (content + last, calls)


def test_what_is_no_call_stays_text() -> None:
    for inside in (
        *("", "add{}", "call:add", "call:add[]", "call:{}", "call:add{x:1", "call:add{x}", "call:add{x:}", "call:add{x:1}}"),
        *("call:add{x:1,}", "call:add{x:[1 2}", f"call:add{{x:{QUOTE}a}}", f"call:add{{x:{QUOTE}a{QUOTE}b}}"),
        "call:add{x:" + "[" * 5000,
    ):
        text = f"<|tool_call>{inside}<tool_call|>"
        assert read(SPELLED, [text]) == (text, [])


def test_words_without_marks_are_strings() -> None:
    """As a model that forgets them means it; and what Python writes."""
    assert gemma_value("{city: New York, on:True, off:None, n:NaN}") == {"city": "New York", "on": True, "off": None, "n": "NaN"}


def tools() -> Tools:
    return tools_that_must_be_called(TEMPLATE)


def test_calls_that_must_be_made() -> None:
    rome, total = written("look_up", {"city": "Rome"}), written("add", {"x": 1})
    others = ["", "No.", rome.replace("city", "town"), f"Yes. {rome}", rome.replace(QUOTE, '"')]
    check_matches(tools().structural_tag, [rome, total, rome + total], others)
    calls = ReplyPart("", tools().reader().read(rome + total, is_last=True)).calls
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("look_up", {"city": "Rome"}), ("add", {"x": 1})]


def test_thoughts_in_a_channel() -> None:
    """What a template that shall not have it thought begins a reply with is closed already."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    told, untold = (
        reply_form(tokenizer, tokenizer.encode(prompt), "auto") for prompt in ("model\n", "model\n<|channel>thought\n<channel|>")
    )
    assert told == Reasoning(False, ("<|channel>thought", "<channel|>"))
    assert not isinstance(untold, Reasoning)
    reader = told.reader(tools(), tells_reasoning=True)
    assert isinstance(reader, MarkedReader)
    part = reader.read("<|channel>thought\nHm.\n<channel|>Yes." + written("add", {}), is_last=True)
    assert (part.reasoning, part.content, [call.name for call in part.calls]) == ("Hm.", "Yes.", ["add"])
