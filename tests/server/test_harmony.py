"""Replies in gpt-oss' format: what they say is found however the text comes, and they are made to say what they must."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from checkpoints import byte_tokenizer, write_target
from family_configs import VOCAB_SIZE
from hypothesis import given, settings
from hypothesis import strategies as st
from matching import ANSWER, LOOK_UP, check_matches
from server.test_calls import cut
from server.test_tools import ADD
from servers import MESSAGES, Server

from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.text import TextDelta
from eagle_rt.models.tokenizer import HARMONY_MARKS
from eagle_rt.server.calls import MESSAGES as CALLS
from eagle_rt.server.calls import call_format
from eagle_rt.server.choices import ChatChoice
from eagle_rt.server.harmony import ENDS, Harmony, HarmonyReader, harmony_message
from eagle_rt.server.protocol import ChatRequest
from eagle_rt.server.reasoning import AllAnswer, Reasoning, reply_form
from eagle_rt.server.tools import tools_of

FUNCTIONS = {"look_up": {}, "add": {}}
TEMPLATE = (
    "{% for tool in tools or [] %}namespace functions {type {{ tool.function.name }}}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.tool_calls and not message.thinking %}{{ raise_exception('no thoughts') }}{% endif %}"
    "<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}<|start|>assistant"
    "{# which goes on with <|channel|> #}"
)
Call = tuple[str, dict[str, Any]]


def read(parts: list[str], *, tells_reasoning: bool = True) -> tuple[str, str, list[Call]]:
    reader, reasoning, content, calls = HarmonyReader(FUNCTIONS, tells_reasoning=tells_reasoning), "", "", []
    for number, text in enumerate(parts, 1):
        part = reader.read(text, is_last=number == len(parts))
        reasoning, content = reasoning + part.reasoning, content + part.content
        calls += [(call.name, json.loads(call.arguments)) for call in part.calls]
    assert reader.num_calls == len(calls)
    return reasoning, content, calls


WORDS = st.text(alphabet='ab {}<|>"\n', min_size=1, max_size=9).filter(lambda text: "<|" not in text)
ARGUMENTS = st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers() | st.none(), max_size=2)
MESSAGE = st.one_of(
    st.tuples(st.just("reasoning"), st.just("<|channel|>analysis"), WORDS),
    st.tuples(st.just("content"), st.sampled_from(["<|channel|>final", "<|channel|>commentary", "<|channel|>odd"]), WORDS),
    # Of functions that were not given, and arguments that are none.
    st.tuples(st.just("content"), st.just("<|channel|>commentary to=functions.other <|constrain|>json"), WORDS),
    st.tuples(st.just("content"), st.just("<|channel|>commentary to=functions.add"), st.just("[1]")),
    st.tuples(
        st.just("calls"),
        st.sampled_from(
            [
                "<|channel|>commentary to=functions.{} <|constrain|>json",
                " to=functions.{}<|channel|>commentary json",
                "<|channel|>commentary to={}",
            ]
        ),
        st.tuples(st.sampled_from(sorted(FUNCTIONS)), ARGUMENTS),
    ),
)


@settings(max_examples=300, deadline=None)
@given(messages=st.lists(MESSAGE, min_size=1, max_size=5), end=st.sampled_from(["", "<|return|>", "<|call|>"]), data=st.data())
def test_messages_are_told_apart_wherever_a_text_is_cut(
    messages: list[tuple[str, str, Any]], end: str, data: st.DataObject
) -> None:
    written, said = [], {"reasoning": [], "content": [], "calls": []}
    for kind, header, body in messages:
        name, text = (body[0], json.dumps(body[1])) if kind == "calls" else ("", body)
        written.append(f"{header.format(name)}<|message|>{text}")
        said[kind].append(body)
    text = "<|end|><|start|>assistant".join(written) + end
    expected = "\n".join(said["reasoning"]), "\n".join(said["content"]), said["calls"]
    assert read([text]) == expected
    assert read(cut(data, text)) == expected
    together = read(cut(data, text), tells_reasoning=False)
    assert together == ("", "\n".join(body for kind, _, body in messages if kind != "calls"), said["calls"])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["Yes", ", I do."], ("", "Yes, I do.", [])),
        (["<b", ">so"], ("", "<b>so", [])),
        (["<|chan"], ("", "<|chan", [])),
        (["to", "day"], ("", "today", [])),
        (["<|channel|>anal"], ("", "", [])),
        (["<|channel|>analysis<|message|>a<|e", "nd|>", "<|start|>assist"], ("a", "", [])),
        (["<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b"], ("a", "b", [])),
        ([], ("", "", [])),
    ],
)
def test_replies_that_are_cut_off_or_in_no_format(parts: list[str], expected: tuple[str, str, list[Call]]) -> None:
    assert read([*parts, ""]) == expected


def test_nothing_is_held_back_longer_than_it_must_be() -> None:
    reader = HarmonyReader(FUNCTIONS, tells_reasoning=True)
    texts = ["<|channel|>", "analysis", "<|message|>", "so", " <", "b>", "<|end|>", "<|start|>", "assistant", "<|channel|>"]
    texts += ["final", "<|message|>", "Yes"]
    told = [reader.read(text, is_last=False) for text in texts]
    assert [part.reasoning for part in told] == ["", "", "", "so", " ", "<b>", *[""] * 7]
    assert [part.content for part in told] == [*[""] * 12, "Yes"]
    assert HarmonyReader(FUNCTIONS, tells_reasoning=True).read("Yes", is_last=False).content == "Yes"


def harmony_tokenizer() -> Any:
    tokenizer = byte_tokenizer((*HARMONY_MARKS[:1], *HARMONY_MARKS[2:], "<|return|>", "<|call|>"))  # one of them it has
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_who_writes_so() -> None:
    tokenizer = harmony_tokenizer()
    assert reply_form(tokenizer, [], "auto") == Harmony()
    assert reply_form(tokenizer, [], "none") == Harmony(tells_reasoning=False)
    assert reply_form(tokenizer, [], "qwen3") == Reasoning(has_begun=False)
    assert call_format(tokenizer) is CALLS
    assert reply_form(byte_tokenizer(), [], "auto") == AllAnswer()
    assert reply_form(byte_tokenizer(), [], "gpt-oss") == Harmony()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "a"}, {"content": "a"}),
        ({"content": "a", "reasoning_content": "b"}, {"content": "a", "reasoning_content": "b", "thinking": "b"}),
        (
            {"content": "a", "reasoning_content": "b", "tool_calls": [1]},
            {"content": "", "reasoning_content": "b", "tool_calls": [1], "thinking": "b\na"},
        ),
    ],
)
def test_dialogues_as_the_template_takes_them(message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert harmony_message(message) == expected


def call_of(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


THOUGHTS, FINAL = "<|channel|>analysis<|message|>so {<|end|><|start|>assistant", "<|channel|>final<|message|>"
OK = '{"ok": true, "size": "small", "n": 12}'


@pytest.mark.parametrize(
    ("asked", "matching", "others"),
    [
        ({"regex": "red|blue"}, [FINAL + "red", THOUGHTS + FINAL + "blue"], ["red", THOUGHTS, FINAL + "so", FINAL + "red<|end|>"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}},
            [FINAL + OK, THOUGHTS + FINAL + OK],
            [OK, FINAL + "{}"],
        ),
        (
            {"tools": [LOOK_UP, ADD], "tool_choice": "required"},
            [call_of("add", "{}"), THOUGHTS + call_of("look_up", '{"city": "Oslo"}')],
            [FINAL + "no", THOUGHTS, call_of("look_up", "{}"), call_of("add", "{}") + call_of("add", "{}")],
        ),
        (
            {"tools": [ADD], "tool_choice": "auto"},
            [FINAL + "no", THOUGHTS + call_of("add", "{}"), call_of("add", "{}")],
            [call_of("add", "[]"), call_of("sub", "{}")],
        ),
    ],
)
def test_replies_match(asked: dict[str, Any], matching: list[str], others: list[str]) -> None:
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **asked})
    tools = tools_of(body, harmony_tokenizer())
    tag = tools and tools.structural_tag
    params = Harmony().before(body.sampling({}, None, None, tag), is_call=tag is not None)
    assert params.grammar
    check_matches(params.grammar.text, matching, others)


def test_without_anything_to_match_nothing_changes() -> None:
    free = SamplingParams()
    assert Harmony().before(free, is_call=False) is free


def test_choices() -> None:
    choice = ChatChoice(HarmonyReader(FUNCTIONS, tells_reasoning=True))
    texts = [THOUGHTS[:20], THOUGHTS[20:] + "<|channel|>commentary<|message|>Wait"]
    texts += ["<|end|><|start|>assistant" + call_of("add", '{"a'), '": 1}<|call|>']
    deltas = [choice.part(TextDelta(text, None))["delta"] for text in texts]
    last = choice.part(TextDelta("", {"type": "stop", "matched": 3}))
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so {"
    assert "".join(delta.get("content", "") for delta in deltas) == "Wait"
    called = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert called == [{"name": "add", "arguments": '{"a": 1}'}]
    assert last["finish_reason"] == "tool_calls"


@pytest.fixture(scope="module")
def oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory, tokenizer = tmp_path_factory.mktemp("oss"), harmony_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    write_target(directory, "gpt-oss", vocab_size=VOCAB_SIZE + 6, num_hidden_layers=2, eos_token_id=ends)
    tokenizer.eos_token = "<|return|>"
    tokenizer.save_pretrained(directory)
    server = Server("--model-path", str(directory), "--max-total-tokens", "4096", "--device", "cpu", "--served-model-name", "tiny")
    yield server.wait_until_up()
    assert server.stop() == 0


def test_a_server_tells_messages_apart(oss: Server) -> None:
    client = openai.OpenAI(base_url=f"{oss.url}/v1", api_key="unused", max_retries=0)

    def ask(stream: bool = False, **more: Any) -> Any:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "temperature": 1, "seed": 1, "n": 8, "stream": stream}
        return client.chat.completions.create(**body, **more)  # type: ignore[arg-type]

    choices = ask(extra_body={"regex": "red|blue"}).choices
    ended = [choice.message for choice in choices if choice.finish_reason == "stop"]
    assert ended, "some replies leave out the thoughts"
    assert all(message.content in ("red", "blue") for message in ended)
    thinking = [choice.message for choice in choices if choice.message.reasoning_content]
    assert thinking, "and some do not"
    told = " ".join(str(choice.message) for choice in choices)
    assert not any(mark in told for mark in ENDS)
    said = {choice.index: "" for choice in choices}
    for chunk in ask(stream=True, extra_body={"regex": "red|blue"}):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert list(said.values()) == [choice.message.content for choice in choices]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    thought = {"role": "assistant", "reasoning_content": "so", "tool_calls": [call]}
    for message, status in ((thought, 200), ({**thought, "reasoning_content": None}, 400)):
        body = {"messages": [*MESSAGES, message, {"role": "tool", "content": "1", "tool_call_id": "1"}], "max_tokens": 1}
        assert oss.post("/v1/chat/completions", body).status_code == status
    choices = ask(tools=[ADD], tool_choice="required").choices
    called = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    assert called
    assert all(choice.message.tool_calls[0].function.name == "add" for choice in called)
