"""Calls in replies: made where they must be, and told."""

import json
from typing import Any

import pytest
from checkpoints import byte_tokenizer
from matching import INFO, LOOK_UP, check_matches
from pydantic import ValidationError
from xgrammar import GrammarCompiler, GrammarMatcher

from eagle_rt.engine.grammars import tokenizer_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.request import RequestStats, TokenEvent
from eagle_rt.engine.text import Reply, TextDelta
from eagle_rt.models.tokenizer import OF_MISTRAL, chat_tokens, decode_tokens
from eagle_rt.server.calls import TAGGED, CallReader
from eagle_rt.server.choices import ChatChoice
from eagle_rt.server.protocol import ChatRequest
from eagle_rt.server.reasoning import MarkedReader
from eagle_rt.server.replies import ReplyPart
from eagle_rt.server.tools import Tools, template_message, tools_of

ADD = {"type": "function", "function": {"name": "add", "strict": True}}


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


def tools_that_must_be_called(chat_template: str) -> Tools:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    tools = tools_of(body(tool_choice="required"), tokenizer)
    assert tools is not None
    assert tools.structural_tag is not None
    return tools


def test_bare_calls_that_must_be_made() -> None:
    """One: what would separate two is not told to the model."""
    tools = tools_that_must_be_called('{{ tools }}{"name": name, "parameters": dictionary}')
    matcher = GrammarMatcher(GrammarCompiler(INFO).compile_structural_tag(tools.structural_tag))
    assert matcher.accept_string('{"name": "look_up", "parameters": {"city": "Rome"}}')
    assert matcher.is_completed()
    assert not matcher.accept_string("\n{")


IN_TAGS = "<tool_call>\n<function=look_up>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
IN_PAIRS = "<tool_call>look_up\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
INVOKED = '<minimax:tool_call>\n<invoke name="look_up">\n<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>'


@pytest.mark.parametrize(
    ("template", "rome", "between"),
    [
        ("<tool_call><function=f><parameter=a></parameter></function></tool_call>", IN_TAGS, "\n"),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", IN_PAIRS, ""),
        ('<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke>', INVOKED, "\n"),
    ],
    ids=["tags", "pairs", "invoked"],
)
def test_calls_that_must_be_made(template: str, rome: str, between: str) -> None:
    """between: the parts of the second one."""
    tools = tools_that_must_be_called("{{ tools }}" + template)
    total = rome.replace("look_up", "add").replace("city", "x").replace("Rome", "1").replace("\n", between)
    check_matches(
        tools.structural_tag, [rome, total, f"{rome}\n{total}"], ["", "No.", rome.replace("city", "town"), f"Yes. {rome}"]
    )
    calls = ReplyPart("", tools.reader().read(rome + total, is_last=True)).calls
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("look_up", {"city": "Rome"}), ("add", {"x": 1})]


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
    for broken in ({"arguments": "[1]"}, {"arguments": "{"}, {"arguments": '{"x": ' + "[" * 5000}):
        messages[1]["tool_calls"] = [{**call, "function": {"name": "look_up", **broken}}]
        with pytest.raises(ValidationError, match="must be a JSON object"):
            body(messages=messages)
    with pytest.raises(ValidationError, match="content is missing"):
        body(messages=[{"role": "user"}])


def test_choices_of_replies_with_calls() -> None:
    """Parts together are the whole; what ended a reply with calls is that it has made them."""
    end = {"type": "stop", "matched": 3}
    choice = ChatChoice(MarkedReader(CallReader(TAGGED, {"look_up": {}, "add": {}})))
    parts = [choice.part(TextDelta(text, None)) for text in ("Yes. ", ROME[:20], ROME[20:], SUM)] + [
        choice.part(TextDelta("", end))
    ]
    calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert "".join(part["delta"].get("content", "") for part in parts) == "Yes."
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "look_up"), (1, "add")]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Rome"}
    assert calls[0]["id"] != calls[1]["id"]
    assert [part["finish_reason"] for part in parts] == [None] * 4 + ["tool_calls"]
    cut_off = ChatChoice(MarkedReader(CallReader(TAGGED, {"look_up": {}, "add": {}})))
    assert cut_off.part(TextDelta(ROME, {"type": "length", "length": 5}))["finish_reason"] == "length"


def test_marks_that_are_special_tokens() -> None:
    """As Mistral's are: they are part of texts and of what replies must match, and other special tokens are of neither."""
    tokenizer = byte_tokenizer((*OF_MISTRAL, "<|other|>"))
    tokenizer.chat_template = "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]name[ARGS]{}"
    tools = tools_of(body(tool_choice="required"), tokenizer)
    assert tools is not None
    end, written = tokenizer.convert_tokens_to_ids("<|end|>"), '[TOOL_CALLS]look_up[ARGS]{"city": "Rome"}'
    tokens = [*tokenizer.encode(written), end]
    assert len(tokens) == len("look_up") + len('{"city": "Rome"}') + 3

    info = tokenizer_info(tokenizer, len(tokenizer), [end])
    matcher = GrammarMatcher(GrammarCompiler(info).compile_structural_tag(json.dumps(tools.structural_tag)))
    assert all(matcher.accept_token(token) for token in tokens)
    assert not matcher.accept_token(tokenizer.convert_tokens_to_ids("<|other|>"))

    reply, reader = Reply(tokenizer, SamplingParams(), [9]), tools.reader()
    other = tokenizer.convert_tokens_to_ids("<|other|>")
    delta = reply.push(TokenEvent("a", [*tokens[:-1], other, end], RequestStats(), {"type": "stop", "matched": end}))
    assert delta.text == written
    (call,) = ReplyPart("", reader.read(delta.text, is_last=True)).calls
    assert (call.name, json.loads(call.arguments)) == ("look_up", {"city": "Rome"})
    plain = byte_tokenizer(("<|other|>",))
    assert decode_tokens(plain, [*plain.encode("a"), other, end]) == "a"
