"""What a model thinks is told from what it answers, however the text comes, and is free where the answer must match something."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from checkpoints import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from matching import ANSWER, check_matches
from server.test_calls import cut
from servers import MESSAGES, Server

from eagle_rt.engine.params import SamplingParams, sampling_params
from eagle_rt.engine.text import TextDelta
from eagle_rt.models.tokenizer import chat_tokens
from eagle_rt.server.calls import TAGGED, CallReader
from eagle_rt.server.choices import ChatChoice
from eagle_rt.server.matching import behind
from eagle_rt.server.protocol import ChatRequest
from eagle_rt.server.reasoning import KNOWN_MARKS, THINK, AllAnswer, MarkedReader, Marks, Reasoning, ReasoningReader, reply_form
from eagle_rt.server.replies import ReplyForm
from eagle_rt.server.tools import template_message

# As Qwen 3's, which is told to think or not, and as one that always does.
SWITCHED = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
ALWAYS = "{# thoughts end with </think> #}<think>\n"
THOUGHTS = {"type": "stop", "matched": 3}


def read(parts: list[str], *, has_begun: bool, marks: Marks = THINK) -> tuple[str, str]:
    reader, thoughts, answer = ReasoningReader(has_begun=has_begun, marks=marks), "", ""
    for number, part in enumerate(parts, 1):
        more, rest = reader.read(part, is_last=number == len(parts))
        assert not (more and answer), "reasoning comes first"
        thoughts, answer = thoughts + more, answer + rest
    return thoughts, answer


def expected(text: str, *, has_begun: bool) -> tuple[str, str]:
    """All at once."""
    opened = re.match(r"\s*<think>", text)
    if not opened and not has_begun:
        return "", text
    thoughts, _, answer = (text[opened.end() :] if opened else text).partition("</think>")
    return thoughts.strip(), answer.lstrip()


PIECES = st.sampled_from(["<think>", "</think>", "<", "</thin", "<thi", "\n", " ", "a", "so <b>", "\n\n", ">"])


@settings(max_examples=500, deadline=None)
@given(st.lists(PIECES, max_size=8), st.booleans(), st.data())
def test_reasoning_is_found_wherever_a_text_is_cut(pieces: list[str], has_begun: bool, data: st.DataObject) -> None:
    text = "".join(pieces)
    wanted = expected(text, has_begun=has_begun)
    assert read(cut(data, text), has_begun=has_begun) == wanted
    marks = data.draw(st.sampled_from(KNOWN_MARKS))

    def renamed(text: str) -> str:
        for own, other in zip(THINK, marks, strict=True):
            text = text.replace(own, other)
        return text

    found = read(cut(data, renamed(text)), has_begun=has_begun, marks=marks)
    assert found == (renamed(wanted[0]), renamed(wanted[1]))


def test_nothing_is_held_back_longer_than_it_must_be() -> None:
    reader = ReasoningReader(has_begun=False)
    told = [
        reader.read(part, is_last=False) for part in ("\n<thi", "nk>\nso", " it </", "b> is", " ", "</think>", "\n", "\nYes", " .")
    ]
    assert told == [("", ""), ("so", ""), (" it", ""), (" </b> is", ""), ("", ""), ("", ""), ("", ""), ("", "Yes"), ("", " .")]
    assert ReasoningReader(has_begun=False).read("Yes", is_last=False) == ("", "Yes")
    assert ReasoningReader(has_begun=True).read("Hm", is_last=False) == ("Hm", "")


def prompt_for(template: str, **options: Any) -> tuple[Any, list[int]]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}<|assistant|>" + template
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a</think>"}], **options})
    messages = [template_message(message) for message in request.messages]
    return tokenizer, chat_tokens(tokenizer, messages, options=request.template_options)


@pytest.mark.parametrize(
    ("template", "options", "parser", "form"),
    [
        (SWITCHED, {}, "auto", Reasoning(has_begun=False)),
        (SWITCHED, {"chat_template_kwargs": {"enable_thinking": True}}, "auto", Reasoning(has_begun=False)),
        (SWITCHED, {"chat_template_kwargs": {"enable_thinking": False}}, "auto", AllAnswer()),
        (SWITCHED, {"reasoning_effort": "none"}, "auto", AllAnswer()),
        (SWITCHED, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "auto", Reasoning(False)),
        (SWITCHED, {"reasoning_effort": "low"}, "auto", Reasoning(has_begun=False)),
        (SWITCHED, {}, "none", AllAnswer()),
        ("{# [THINK]so[/THINK] #}", {}, "auto", Reasoning(False, ("[THINK]", "[/THINK]"))),
        ("{# </seed:think> #}<seed:think>", {}, "auto", Reasoning(True, ("<seed:think>", "</seed:think>"))),
        (ALWAYS, {}, "auto", Reasoning(has_begun=True)),
        ("", {}, "auto", AllAnswer()),
        ("", {}, "qwen3", Reasoning(has_begun=False)),
    ],
)
def test_who_thinks(template: str, options: dict[str, Any], parser: str, form: ReplyForm) -> None:
    assert reply_form(*prompt_for(template, **options), parser) == form


def test_templates_get_what_is_theirs() -> None:
    tokenizer, prompt = prompt_for("{{ mood }}{{ reasoning_effort }}", chat_template_kwargs={"mood": "x"}, reasoning_effort="high")
    assert tokenizer.decode(prompt).endswith("<|assistant|>xhigh")
    for name in ("tools", "chat_template", "add_generation_prompt", "messages", "tokenize"):
        with pytest.raises(ValueError, match=rf"^chat_template_kwargs\.{name} is not the template's but the tokenizer's"):
            prompt_for("", chat_template_kwargs={name: None})


def test_a_dialogue_with_reasoning() -> None:
    messages = [{"role": "assistant", "content": "Yes", "reasoning_content": "so"}, {"role": "user", "content": "b"}]
    request = ChatRequest.model_validate({"messages": messages})
    assert template_message(request.messages[0]) == messages[0]


COLOUR, JSON = SamplingParams(regex="red|blue"), SamplingParams(json_schema=ANSWER)  # type: ignore[arg-type]
TAG = SamplingParams(structural_tag=json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "red"}}))
OK = '{"ok": true, "size": "small", "n": 12}'


@pytest.mark.parametrize(
    ("has_begun", "params", "matching", "others"),
    [
        (False, COLOUR, ["red", "<think>so</think>blue", "<think>\n\n</think>\n\nred"], ["so red", "<think>red", "so</think>red"]),
        (True, COLOUR, ["so</think>red", "\nred\n</think>\n\nblue"], ["red", "so</think>so", "so</think>\n\n\nred"]),
        (True, JSON, [f"hm</think>\n\n{OK}"], [OK, "hm</think>{}"]),
        (False, TAG, ["red", "<think>a</think>red"], ["blue"]),
    ],
)
def test_answers_match_and_thoughts_are_free(
    has_begun: bool, params: SamplingParams, matching: list[str], others: list[str]
) -> None:
    changed = Reasoning(has_begun).before(params, is_call=False)
    assert changed.grammar
    assert changed.grammar.kind == "structural_tag"
    check_matches(changed.grammar.text, matching, others)


def test_what_cannot_stand_behind_thoughts_stays_as_it_is() -> None:
    free = SamplingParams()
    assert Reasoning(has_begun=True).before(free, is_call=False) is free
    for wrong in ("no JSON", '{"triggers": []}', "[]"):
        params = SamplingParams(structural_tag=wrong)
        assert Reasoning(has_begun=True).before(params, is_call=False) is params
    long = sampling_params({"regex": "a" * (2**16 - 3)}, {})
    with pytest.raises(ValueError, match=r"^structural_tag is .*at most 65536 characters"):
        Reasoning(has_begun=True).before(long, is_call=False)
    deep = SamplingParams(json_schema='{"const": ' + "[" * 5000 + "]" * 5000 + "}")
    with pytest.raises(ValueError, match=r"^json_schema is nested too deeply"):
        Reasoning(has_begun=True).before(deep, is_call=False)
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ValueError, match=r"^json_schema is nested too deeply"):
        behind(deep, [], {"type": "json_schema", "json_schema": {"const": nested}})


def test_choices_of_replies_with_thoughts_and_calls() -> None:
    call = TAGGED.begin + "add" + TAGGED.middle + "{}" + TAGGED.end
    choice = ChatChoice(MarkedReader(CallReader(TAGGED, {"add": {}}), ReasoningReader(has_begun=True)))
    texts = ["so <tool", "_call>\n</thi", "nk>\n\nYes. ", call]
    deltas = [choice.part(TextDelta(text, None))["delta"] for text in texts] + [choice.part(TextDelta("", THOUGHTS))["delta"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so <tool_call>"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", [])] == ["add"]


@pytest.fixture(scope="module")
def thinking(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model begins to think, unless it is told not to."""
    tokenizer, directory = byte_tokenizer(), tmp_path_factory.mktemp("thinking")
    tokenizer.chat_template += "<think>\n{% if enable_thinking is false %}</think>\n{% endif %}"
    tokenizer.save_pretrained(directory)
    flags = ["--model-path", str(target_dir), "--tokenizer-path", str(directory), "--max-total-tokens", "2048", "--device", "cpu"]
    server = Server(*flags, "--served-model-name", "tiny")
    yield server.wait_until_up()
    assert server.stop() == 0


def test_a_server_tells_them_apart(thinking: Server) -> None:
    client = openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="unused", max_retries=0)

    def ask(stream: bool = False, **more: Any) -> Any:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "stream": stream}
        return client.chat.completions.create(**body, extra_body={"regex": "red|blue", **more})  # type: ignore[arg-type]

    message = ask().choices[0].message
    assert message.reasoning_content
    assert not re.match("red|blue", message.reasoning_content), "thoughts are free"
    assert message.content == ""
    deltas = [chunk.choices[0].delta for chunk in ask(stream=True)]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning_content
    assert not any(delta.content for delta in deltas)
    together = ask(separate_reasoning=False).choices[0].message
    assert together.content.strip() == message.reasoning_content
    assert not hasattr(together, "reasoning_content")
    answer = ask(chat_template_kwargs={"enable_thinking": False}).choices[0].message
    assert answer.content in ("red", "blue")
    refused = thinking.post("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}})
    assert refused.status_code == 400
    assert "chat_template_kwargs.tools is not the template's" in refused.json()["error"]["message"]
