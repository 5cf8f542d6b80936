"""Replies of a form that was asked for, as clients of the server meet them."""

import json
import re
from typing import Literal

import openai
import pydantic
from matching import LOOK_UP
from servers import MESSAGES, Server


class Answer(pydantic.BaseModel):
    ok: bool
    size: Literal["small", "large"]


def test_replies_of_a_format(client: openai.OpenAI) -> None:
    """As OpenAI's client asks for it, whole and streamed."""
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 80, "temperature": 1.0, "seed": 2}
    parsed = client.chat.completions.parse(**options, response_format=Answer).choices[0]
    assert isinstance(parsed.message.parsed, Answer)
    assert parsed.finish_reason == "stop"
    with client.chat.completions.stream(**options, response_format=Answer) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.message.parsed
    any_object = client.chat.completions.create(**options, response_format={"type": "json_object"}).choices[0]
    assert any_object.message.content.startswith("{")
    free = client.chat.completions.create(**options, response_format={"type": "text"}).choices[0].message.content
    assert free == client.chat.completions.create(**options).choices[0].message.content


def test_replies_of_a_grammar(client: openai.OpenAI, server: Server) -> None:
    """In SGLang's names."""
    sampling = {"temperature": 0, "max_new_tokens": 40}
    expression, schema = "[0-9]{3}-[a-f]{2}", Answer.model_json_schema()
    text = server.post("/generate", {"text": "a", "sampling_params": {**sampling, "regex": expression}}).json()["text"]
    assert re.fullmatch(expression, text)
    extra = {"regex": expression}
    assert client.completions.create(model="tiny", prompt="a", temperature=0, extra_body=extra).choices[0].text == text
    for own in (schema, json.dumps(schema)):
        reply = server.post("/generate", {"text": "a", "sampling_params": {**sampling, "json_schema": own}}).json()
        Answer.model_validate_json(reply["text"])
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 3}
    body = {"prompt": "a", "regex": "(a", "stream": True}
    assert "The parenthesis is not closed" in server.post("/v1/completions", body).text


def test_calls_of_tools(client: openai.OpenAI) -> None:
    """Made because they must be, whole and streamed, and answered."""
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "temperature": 1.0, "seed": 1, "tools": [LOOK_UP]}
    free = client.chat.completions.create(**options).choices[0]
    assert free.message.tool_calls is None
    assert free.finish_reason in ("stop", "length")
    for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
        one = {**options, "tool_choice": choice, "parallel_tool_calls": False}
        reply = client.chat.completions.create(**one).choices[0]
        (call,) = reply.message.tool_calls
        assert (reply.finish_reason, reply.message.content, call.function.name) == ("tool_calls", None, "look_up")
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
        with client.chat.completions.stream(**one) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        assert streamed.finish_reason == "tool_calls"
    answered = [*MESSAGES, reply.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}]
    assert client.chat.completions.create(**{**options, "messages": answered, "tool_choice": "none"}).choices[0].message.content
