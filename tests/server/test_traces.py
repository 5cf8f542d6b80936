"""Trees in replies of the server, in both kinds of format, whole and streamed."""

import json

import openai
from servers import MESSAGES, Server

from eagle_rt.trace import StepTrace

TRACED = {"speculative": {"trace": True}}


def test_replies_with_their_trees(client: openai.OpenAI, server: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
    body = {"text": "abc", "sampling_params": {**sampling, **TRACED}}
    reply = server.post("/generate", body).json()
    info = reply["meta_info"]
    assert len(info["spec_trace"]) == info["spec_verify_ct"]
    told = [reply["output_ids"][0], *(token for step in info["spec_trace"] for token in StepTrace(**step).choices)]
    assert told[:10] == reply["output_ids"]
    plain = server.post("/generate", {"text": "abc", "sampling_params": sampling}).json()
    assert plain["output_ids"] == reply["output_ids"]
    assert "spec_trace" not in plain["meta_info"]

    options = {"model": "tiny", "temperature": 0, "max_tokens": 10, "extra_body": {**TRACED, "ignore_eos": True}}
    whole = client.completions.create(**options, prompt="abc").choices[0]
    steps = whole.model_dump()["spec_trace"]
    # Whether a step drafts is a matter of time, what comes of it is not.
    assert [token for step in steps for token in step["choices"]][:9] == told[1:10]
    chat = client.chat.completions.create(**options, messages=MESSAGES).choices[0].model_dump()
    assert chat["spec_trace"][0]["path"][0] == 0


def test_streams_tell_them_at_the_end(client: openai.OpenAI, server: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True, **TRACED}
    lines = server.post("/generate", {"text": "abc", "sampling_params": sampling, "stream": True}).text.splitlines()
    *before, last = [json.loads(line.removeprefix("data: "))["meta_info"] for line in lines if line.startswith("data: {")]
    assert not any("spec_trace" in info for info in before)
    assert len(last["spec_trace"]) == last["spec_verify_ct"]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 10, "stream": True, "extra_body": {**TRACED, "ignore_eos": True}}
    for chunks in (
        client.completions.create(**options, prompt="abc"),
        client.chat.completions.create(**options, messages=MESSAGES),
    ):
        *early, end = [chunk.choices[0].model_dump() for chunk in chunks if chunk.choices]
        assert not any("spec_trace" in choice for choice in early)
        assert end["finish_reason"] == "length"
        assert end["spec_trace"][-1]["choices"]
