"""Calls in replies are found however the text comes."""

import json
import re
from functools import partial
from typing import Any

import pytest
from checkpoints import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_rt.server.calls import (
    BARE,
    INVOKES,
    LISTED,
    MARKED,
    PAIRS,
    PARAMETERS,
    SEED,
    TAGGED,
    Call,
    CallFormat,
    CallReader,
    Functions,
    call_format,
)
from eagle_rt.server.reasoning import MarkedReader

FUNCTIONS: Functions = {"look_up": {}, "add": {}}
CALL = ("add", {})


def read(form: CallFormat, parts: list[str], functions: Functions = FUNCTIONS) -> tuple[str, list[tuple[str, Any]]]:
    """What a reply that comes in these parts says, and what it calls."""
    reader, content, calls = CallReader(form, functions), "", []
    for number, part in enumerate(parts, 1):
        found = reader.read(part, is_last=number == len(parts))
        content += "".join(own for own in found if isinstance(own, str))
        calls += [(own.name, json.loads(own.arguments)) for own in found if isinstance(own, Call)]
    assert reader.num_calls == len(calls)
    return content, calls


ARGUMENTS = st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers() | st.none(), max_size=2)
CALLS = st.tuples(st.sampled_from(sorted(FUNCTIONS)), ARGUMENTS)
# Nothing in it is a call, however much it looks like one.
WORDS = st.sampled_from(["Let me see. ", "<", "<tool_call", "\n", "{", "</tool_call>", 'a < b, {"name": "add"}', "<tool>"])
MISTAKES = st.sampled_from(
    [
        "<tool_call>no JSON</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"x": NaN}}</tool_call>',
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


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_calls_after_marks_are_the_rest_of_a_reply(data: st.DataObject) -> None:
    """As Mistral's models write them, each after a mark, or all in a list."""
    calls = data.draw(st.lists(CALLS, min_size=1, max_size=3))
    ids = data.draw(st.sampled_from(["", "[CALL_ID]abc123def"]))
    in_list = [{"name": name, "arguments": arguments, "id": "abc123def"} for name, arguments in calls]
    one_by_one = "".join(f"[TOOL_CALLS]{name}{ids}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
    before = data.draw(st.sampled_from(["", "So: ", "[TOOL", "a [", "\n"]))
    for form, text in ((MARKED, one_by_one), (LISTED, f"[TOOL_CALLS] {json.dumps(in_list)}")):
        assert read(form, cut(data, before + text)) == (before, calls)
        assert read(form, cut(data, before)) == (before, [])
        for broken in (text + " and more", text[:-1], text.replace(calls[0][0], "unknown", 1), text + "[TOOL_CALLS]"):
            assert read(form, cut(data, before + broken)) == (before + broken, [])
    reader = CallReader(MARKED, FUNCTIONS)
    assert reader.read("So: [TOOL", is_last=False) == ["So: "]
    found = reader.read(one_by_one.removeprefix("[TOOL"), is_last=True)
    assert all(isinstance(call, Call) and re.fullmatch("[0-9a-z]{9}", call.id) for call in found)


def test_a_call_that_is_not_closed() -> None:
    """A model may end with it."""
    assert read(TAGGED, ['Yes.<tool_call>{"name": "add", "arguments": {}}']) == ("Yes.", [("add", {})])
    assert read(TAGGED, ['<tool_call>{"name": "add", "argu']) == ('<tool_call>{"name": "add", "argu', [])


def in_tags(name: str, arguments: dict[str, Any], form: CallFormat = PARAMETERS) -> str:
    """A call as Qwen3-Coder's template writes one: texts as they are, objects and lists in JSON, and the rest as Python does."""
    text = form.begin + name + form.middle
    for key, value in arguments.items():
        text += f"<parameter={key}>\n{json.dumps(value) if isinstance(value, dict | list) else value}\n</parameter>\n"
    return text.rstrip("\n") + form.end


def in_pairs(name: str, arguments: dict[str, Any], between: str = "\n") -> str:
    """A call as GLM's templates write one: texts as they are, all else in JSON; those of later models without new lines."""
    parts = [PAIRS.begin + name]
    for key, value in arguments.items():
        parts += [f"<arg_key>{key}</arg_key>"]
        parts += [f"<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>"]
    return between.join([*parts, PAIRS.end])


def in_invokes(*calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as MiniMax-M2's template writes them: texts as they are, all else in JSON."""
    parts = [INVOKES.opens]
    for name, arguments in calls:
        parts += [f'<invoke name="{name}">']
        for key, value in arguments.items():
            parts += [f'<parameter name="{key}">{value if isinstance(value, str) else json.dumps(value)}</parameter>']
        parts += ["</invoke>"]
    return "\n".join([*parts, INVOKES.closes])


SCHEMAS = {"text": "string", "whole": "integer", "number": "number", "flag": "boolean", "object": "object", "list": "array"}
TYPED: Functions = {"add": {"properties": {name: {"type": kind} for name, kind in SCHEMAS.items()}}, "look_up": {}}
VALUES = {
    "text": st.text(st.characters(codec="utf-8", exclude_characters="<"))
    | st.sampled_from(["1", "true", "None", "[]", "\n\n a", '"']),
    "whole": st.integers(),
    "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "object": st.dictionaries(st.text(max_size=3), st.integers() | st.none(), max_size=2),
    "list": st.lists(st.text(max_size=3), max_size=2),
}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_parameters_in_tags_have_the_types_of_their_schemas(data: st.DataObject) -> None:
    named = st.fixed_dictionaries({}, optional=VALUES)
    calls = data.draw(st.lists(st.tuples(st.just("add"), named), max_size=3))
    form, written = data.draw(
        st.sampled_from(
            [
                (PARAMETERS, in_tags),
                (SEED, partial(in_tags, form=SEED)),
                (PAIRS, in_pairs),
                (PAIRS, partial(in_pairs, between="")),
                (INVOKES, lambda *call: in_invokes(call)),
            ]
        )
    )
    text = "Yes. ".join(["", *(written(*call) for call in calls), ""])
    assert read(form, cut(data, text), TYPED) == ("Yes. " * (len(calls) + 1), calls)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_several_calls_between_the_same_marks(data: st.DataObject) -> None:
    calls = data.draw(st.lists(st.tuples(st.just("add"), st.fixed_dictionaries({}, optional=VALUES)), min_size=1, max_size=3))
    text = in_invokes(*calls)
    assert read(INVOKES, cut(data, f"Yes.{text} {text}"), TYPED) == ("Yes. ", calls * 2)
    for broken in (in_invokes(*calls, ("unknown", {})), text.replace("</invoke>", "</invoke>and", 1), in_invokes()):
        assert read(INVOKES, cut(data, broken), TYPED) == (broken, [])


def without_outer_marks(call: str, *, is_closed: bool) -> str:
    """As Qwen3-Coder now and then writes it."""
    bare = call.removeprefix("<tool_call>\n")
    return bare if is_closed else bare.removesuffix("\n</tool_call>")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_calls_whose_first_mark_is_forgotten(data: st.DataObject) -> None:
    calls = data.draw(st.lists(st.tuples(st.just("add"), st.fixed_dictionaries({}, optional=VALUES)), max_size=3))
    words = st.sampled_from(["", "Yes. ", "\n", "<", "</tool_call", "<function", "<function=unknown></function>"])
    text, content = "", ""
    for call in calls:
        before, own = data.draw(words), in_tags(*call)
        if data.draw(st.booleans()):
            own = without_outer_marks(own, is_closed=data.draw(st.booleans()))
        text, content = text + before + own, content + before
    last = data.draw(words)
    assert read(PARAMETERS, cut(data, text + last), TYPED) == (content + last, calls)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {}, 1),
        ("1", {"type": "string"}, "1"),
        ("1", {"type": ["string", "null"]}, "1"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("2.5", {"oneOf": [{"type": "number"}, {"type": "string"}]}, 2.5),
        ("2.5", {"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "2.5"),
        ("2.5", {"anyOf": [{"type": "boolean"}, {"type": "string"}]}, "2.5"),
        ("2.5", {"type": "integer"}, "2.5"),
        ("True", {"type": "boolean"}, True),
        ("True", True, True),
        ('"a"', {"enum": ["a"]}, '"a"'),
        ("NaN", {}, "NaN"),
        ("a, b", {"type": "array"}, "a, b"),
        ("[1]", {"type": {"a": 1}}, "[1]"),
        (" a ", {"type": "string"}, " a "),
        (" a\r", {"enum": ["a", "b"]}, "a"),
        (" a", {"enum": [" a", "b"]}, " a"),
        (" a", {"enum": 1}, "a"),
        (" a1 ", {"type": "string", "pattern": "[a-z][0-9]"}, "a1"),
    ],
)
def test_what_a_parameter_says(text: str, schema: Any, value: Any) -> None:
    calls = read(PARAMETERS, [in_tags("add", {"x": text})], {"add": {"properties": {"x": schema}}})[1]
    assert calls == [("add", {"x": value})]
    assert type(calls[0][1]["x"]) is type(value)


@pytest.mark.parametrize("parameters", [{}, {"properties": None}, {"properties": ["x"]}, {"properties": {"y": {}}}], ids=str)
def test_parameters_that_no_schema_knows(parameters: dict[str, Any]) -> None:
    assert read(PARAMETERS, [in_tags("add", {"x": 1})], {"add": parameters}) == ("", [("add", {"x": 1})])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>add</tool_call>",
        in_tags("unknown", {}),
        in_tags("add", {"x": 1}).replace("</function>", ""),
        in_tags("add", {"x": 1}).replace("</parameter>", ""),
        in_tags("add", {"x": 1}).replace("<parameter=x>", "x is"),
        in_tags("add", {"x": 1})[:-30],
        without_outer_marks(in_tags("unknown", {}), is_closed=True),
        without_outer_marks(in_tags("add", {"x": 1}).replace("</parameter>", ""), is_closed=True),
        without_outer_marks(in_tags("add", {"x": 1}), is_closed=False)[:-3],
    ],
)
def test_what_is_no_call_in_tags_stays_text(text: str) -> None:
    assert read(PARAMETERS, [text], {"add": {"properties": None}}) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call></tool_call>",
        in_pairs("unknown", {}),
        in_pairs("add", {"x": 1}).replace("</arg_key>", ""),
        in_pairs("add", {"x": 1}).replace("</arg_value>", ""),
        in_pairs("add", {"x": 1}).replace("<arg_key>x</arg_key>", "x is"),
        in_pairs("add", {"x": 1})[:-20],
    ],
)
def test_what_is_no_call_in_pairs_stays_text(text: str) -> None:
    assert read(PAIRS, [text]) == (text, [])


def test_what_is_nested_too_deeply_is_no_call() -> None:
    deep = '{"x": ' + "[" * 5000
    for form, text in (
        (TAGGED, TAGGED.begin + "add" + TAGGED.middle + deep + TAGGED.end),
        (BARE, BARE.begin + "add" + BARE.middle + deep),
    ):
        assert read(form, [text]) == (text, [])
    assert read(PARAMETERS, [in_tags("add", {"x": deep})]) == ("", [("add", {"x": deep})])


def test_formats_are_told_by_templates() -> None:
    tokenizer = byte_tokenizer()
    assert call_format(tokenizer) is TAGGED
    for template, form in (
        ('{% if tools %}Respond as {"name": name, "parameters": dictionary}{% endif %}', BARE),
        ("{% if tools %}<tool_call>{'name': name, 'arguments': {}}</tool_call>{% endif %}", TAGGED),
        ("{{ tools }}<seed:tool_call>\n<function=name>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>", SEED),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]name[ARGS]{}", MARKED),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS] [{}]", LISTED),
        ("{% if tools %}<tool_call>\n<function=name>\n<parameter=a>\n{{ arguments }}\n</parameter>{% endif %}", PARAMETERS),
        ('{% if tools %}<minimax:tool_call>\n<invoke name="n">\n<parameter name="a">1</parameter>{% endif %}', INVOKES),
        ("{% if tools %}<tool_call>name\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>{% endif %}", PAIRS),
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


def answer_of(parts: list[str]) -> list[str | tuple[str, Any]]:
    """What is told of a reply that comes in these parts, words that follow each other together."""
    reader, told = MarkedReader(CallReader(TAGGED, FUNCTIONS)), []
    for number, part in enumerate(parts, 1):
        for own in reader.read(part, is_last=number == len(parts)).answer:
            if isinstance(own, str) and told and isinstance(told[-1], str):
                told[-1] += own
            else:
                told.append(own if isinstance(own, str) else (own.name, json.loads(own.arguments)))
    return told


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_words_and_calls_are_told_in_order_and_alike_wherever_a_text_is_cut(data: st.DataObject) -> None:
    spaces = st.sampled_from(["\n", " ", "\n\n", "Yes.", " No", "a\nb "])
    parts = data.draw(st.lists(CALLS | spaces, max_size=7))
    text = "".join(part if isinstance(part, str) else written(TAGGED, part) for part in parts)
    whole = answer_of([text])
    assert answer_of(cut(data, text)) == whole
    calls = [part for part in parts if not isinstance(part, str)]
    assert [own for own in whole if not isinstance(own, str)] == calls
    words = "".join(own for own in whole if isinstance(own, str))
    assert "".join(words.split()) == "".join("".join(part for part in parts if isinstance(part, str)).split())
    if calls:
        assert words == words.rstrip()
    else:
        assert words == text


def test_white_space_that_only_parts_calls_is_left_out() -> None:
    call = written(TAGGED, ("add", {}))
    for text, told in (
        (f"\n{call}\n{call}\n", [CALL, CALL]),
        (f"\n\nSo: \n{call}\n", ["\n\nSo:", CALL]),
        (f"{call}\nSo: {call}\n and \n", [CALL, "So:", CALL, "\n and"]),
        (" \n", [" \n"]),
    ):
        assert answer_of([text]) == told
