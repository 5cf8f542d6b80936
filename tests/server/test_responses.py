"""OpenAI's Responses API: what its client makes of our events, and what we make of its items."""

import json
from typing import Any

import openai
import pytest
from checkpoints import byte_tokenizer
from matching import LOOK_UP
from pydantic import BaseModel, ValidationError
from servers import MESSAGES, Server

from eagle_rt.server.protocol import ChatRequest
from eagle_rt.server.reasoning import Reasoning
from eagle_rt.server.response_items import ResponseWriter, usage_of
from eagle_rt.server.responses import ResponsesRequest
from eagle_rt.server.tools import tools_of

TOOL = {"type": "function", "strict": True, **LOOK_UP["function"]}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Rome"}}\n</tool_call>'
USAGE = usage_of({"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 0}}, 2)


class Size(BaseModel):
    ok: bool


def request(**options: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "a", **options})


def written(parts: list[str], ending: str = "stop") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The response that a thinking model's reply in these parts becomes, and the events that told of it."""
    tools = tools_of(ChatRequest.model_validate({"messages": MESSAGES, "tools": [LOOK_UP]}), byte_tokenizer())
    writer = ResponseWriter(request().described(), "m", Reasoning(has_begun=True).reader(tools, tells_reasoning=True))
    told = writer.begin()
    for number, part in enumerate(parts, 1):
        told += writer.more(part, is_last=number == len(parts))
    told += writer.end({"type": ending}, USAGE)
    events = []
    for event in told:
        kind, data = event.decode().strip().split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return writer.response, events


REPLY = f"It is far.</think>\n\nWait. {CALL}\n{CALL.replace('Rome', 'Oslo')}"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_reply_becomes_items_in_whatever_parts_it_comes(size: int) -> None:
    response, events = written([REPLY[start : start + size] for start in range(0, len(REPLY), size)])
    thought, message, rome, oslo = response["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "It is far.")
    assert (message["type"], message["content"][0]["text"].strip()) == ("message", "Wait.")
    assert [(own["type"], own["name"], json.loads(own["arguments"])["city"]) for own in (rome, oslo)] == [
        ("function_call", "look_up", "Rome"),
        ("function_call", "look_up", "Oslo"),
    ]
    assert all(item["status"] == "completed" for item in response["output"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1] == {"type": "response.completed", "sequence_number": len(events) - 1, "response": response}
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    for index, kind in ((0, "reasoning_text"), (1, "output_text"), (2, "function_call_arguments")):
        own = [event for event in events if event.get("output_index") == index]
        assert {event.get("item_id", response["output"][index]["id"]) for event in own} == {response["output"][index]["id"]}
        whole = next(event for event in own if event["type"] == f"response.{kind}.done")
        deltas = [event["delta"] for event in own if event["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == whole.get("text", whole.get("arguments"))
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_white_space_before_a_call_is_no_message_and_what_was_cut_is_told() -> None:
    response, _ = written(["</think>\n", "\n", CALL])
    assert [item["type"] for item in response["output"]] == ["function_call"]
    response, _ = written(["</think>", CALL, "\n", CALL, " Done."])
    assert [item["type"] for item in response["output"]] == ["function_call", "function_call", "message"]
    assert response["output"][2]["content"][0]["text"] == "Done."
    response, events = written(["Hm.</think>\n", "Ye"], ending="length")
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert events[-1]["type"] == "response.incomplete"
    assert written([""])[0]["output"] == []


def test_items_become_a_chat() -> None:
    """As clients send back what they were given, with what they have added."""
    given = written([REPLY])[0]["output"]
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "How "}, {"type": "input_text", "text": "far?"}]},
        *given,
        {"type": "function_call_output", "call_id": given[2]["call_id"], "output": "12 km"},
        {"type": "function_call_output", "call_id": given[3]["call_id"], "output": [{"type": "input_text", "text": "9 km"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Far.", "annotations": []}]},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "So?"},
    ]
    chat = request(input=items, instructions="Be exact.", tools=[TOOL], reasoning={"effort": "low"}).as_chat()
    system, question, answer, first, second, last, order, more = chat.messages
    assert (system.role, system.content) == ("system", "Be exact.\n\nBe kind.")
    assert (question.role, question.content) == ("user", "How far?")
    assert (answer.role, answer.text.strip(), answer.reasoning_content) == ("assistant", "Wait.", "It is far.")
    assert answer.tool_calls
    assert [(call.id, call.function.arguments) for call in answer.tool_calls] == [
        (given[2]["call_id"], {"city": "Rome"}),
        (given[3]["call_id"], {"city": "Oslo"}),
    ]
    assert [(own.role, own.tool_call_id, own.content) for own in (first, second)] == [
        ("tool", given[2]["call_id"], "12 km"),
        ("tool", given[3]["call_id"], "9 km"),
    ]
    assert (last.role, last.content, last.reasoning_content) == ("assistant", "Far.", None)
    assert (order.role, order.content, more.content) == ("system", "Be brief.", "So?")
    assert chat.reasoning_effort == "low"
    assert chat.tools
    assert (chat.tools[0].function.name, chat.tools[0].function.strict) == ("look_up", True)

    thought = [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}, given[2]]
    first, second = request(input=[given[1], *thought]).as_chat().messages
    assert (first.tool_calls, first.reasoning_content, second.reasoning_content) == (None, None, "Hm.")
    (asked,) = request(input=thought).as_chat().messages
    assert (asked.role, asked.reasoning_content, asked.content) == ("assistant", "Hm.", "")


def test_what_an_answer_must_be() -> None:
    schema = {"type": "json_schema", "name": "size", "schema": {"type": "object"}, "strict": True}
    chat = request(text={"format": schema}).as_chat()
    assert chat.response_format
    assert chat.response_format.wanted == {"type": "object"}
    assert request(tool_choice={"type": "function", "name": "look_up"}, tools=[TOOL]).as_chat().tool_choice
    assert request(text=None, reasoning=None, background=False, previous_response_id=None, store=True, user="u").as_chat()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported: nothing is stored here"),
        ({"background": True}, "background is not supported"),
        ({"input": []}, "at least 1 item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items are messages, function_call, function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "Input should be 'input_text'"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "Input should be 'user'"),
        ({"tools": [{"type": "web_search"}]}, "Input should be 'function'"),
        ({"truncation": "auto"}, "Input should be 'disabled'"),
        ({"include": ["message.output_text.logprobs"]}, "Input should be 'reasoning.encrypted_content'"),
        ({"max_output_tokens": 0}, "greater than or equal to 1"),
        ({"max_tokens": 5}, "Extra inputs are not permitted"),
    ],
)
def test_what_is_not_supported_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        request(**options)
    assert message in str(error.value)


def test_what_no_chat_could_hold_is_named() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "no"}
    with pytest.raises(ValueError, match=r"^messages.0.tool_calls.0.function.arguments: must be a JSON object$"):
        request(input=[call]).as_chat()


def test_with_the_clients_own_helpers(client: openai.OpenAI, server: Server) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_output_tokens": 20, "temperature": 0}
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, temperature=0)
    whole = client.responses.create(**options, input="hello")
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.usage.input_tokens, whole.usage.output_tokens) == ("incomplete", chat.usage.prompt_tokens, 20)
    with client.responses.stream(**options, input=MESSAGES) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text

    parsed = client.responses.parse(**{**options, "max_output_tokens": 200}, input="hello", text_format=Size)
    assert isinstance(parsed.output_parsed, Size)
    assert parsed.status == "completed"

    asked = {**options, "max_output_tokens": 200, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**asked, input="hello") as stream:
        final = stream.get_final_response()
    (call,) = final.output
    assert (call.type, call.name) == ("function_call", "look_up")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    answered = [*MESSAGES, *final.output, {"type": "function_call_output", "call_id": call.call_id, "output": "7"}]
    assert client.responses.create(**options, tools=[TOOL], input=answered).usage.input_tokens > final.usage.input_tokens

    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="hello")
    with pytest.raises(openai.BadRequestError, match="the prompt has"):
        client.responses.create(**options, input="hello " * 1000, stream=True)
    refused = server.post("/v1/responses", {"input": [{"type": "file_search_call"}]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input"
