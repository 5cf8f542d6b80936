"""Log-probabilities of replies and of prompts, as clients are told them."""

import openai
import pytest
from servers import MESSAGES, Server


def test_logprobs_of_chats(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options).choices[0]
    told = whole.logprobs.content
    assert len(told) == 9
    assert all(own.top_logprobs[0].logprob == own.logprob <= 0 for own in told), "greedy replies are of the likeliest tokens"
    assert all(len(own.top_logprobs) == 2 and own.token.encode() == bytes(own.bytes) for own in told)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    assert [own for chunk in chunks if chunk.logprobs for own in chunk.logprobs.content] == told
    assert client.chat.completions.create(**{**options, "logprobs": False, "top_logprobs": None}).choices[0].logprobs is None


def test_logprobs_of_completions(client: openai.OpenAI, server: Server) -> None:
    options = {"model": "tiny", "prompt": "abc", "max_tokens": 9, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**options).choices[0].logprobs
    assert whole.text_offset == [sum(map(len, whole.tokens[:index])) for index in range(9)]
    assert [max(best.values()) for best in whole.top_logprobs] == whole.token_logprobs
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [own for part in parts for own in getattr(part, name)] == getattr(whole, name)
    asked = {
        "text": "abc",
        "sampling_params": {"temperature": 0, "max_new_tokens": 9},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    native = server.post("/generate", asked).json()
    assert [(value, token) for value, token, _ in native["meta_info"]["output_token_logprobs"]] == list(
        zip(whole.token_logprobs, native["output_ids"], strict=True)
    )
    assert [own[0][1] for own in native["meta_info"]["output_top_logprobs"]] == native["output_ids"]
    assert "output_token_logprobs" not in server.post("/generate", {"text": "abc"}).json()["meta_info"]


def test_echoed_prompts(client: openai.OpenAI, server: Server) -> None:
    """As evaluations ask for it that score texts."""
    options = {"model": "tiny", "temperature": 0, "logprobs": 1, "max_tokens": 1}
    tokens = list(b"abcabd")
    first, second = client.completions.create(**options, prompt=[tokens, tokens[:3]], echo=True).choices
    prompt, reply = first.text[:6], client.completions.create(**options, prompt=tokens).choices[0]
    assert first.text == prompt + reply.text
    assert first.logprobs.tokens == [*prompt, *reply.logprobs.tokens]
    assert first.logprobs.text_offset == list(range(7))
    assert first.logprobs.token_logprobs[0] is first.logprobs.top_logprobs[0] is None
    assert first.logprobs.token_logprobs[-1] == reply.logprobs.token_logprobs[0]
    assert first.logprobs.token_logprobs[1:3] == pytest.approx(second.logprobs.token_logprobs[1:3])
    best = [max(top.values()) for top in first.logprobs.top_logprobs[1:]]
    assert all(own <= other for own, other in zip(first.logprobs.token_logprobs[1:], best, strict=True))
    chunks = [chunk.choices[0] for chunk in client.completions.create(**options, prompt=tokens, echo=True, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == first.text
    assert [own for chunk in chunks for own in chunk.logprobs.token_logprobs] == first.logprobs.token_logprobs

    (read,) = client.completions.create(**{**options, "max_tokens": 0}, prompt=tokens, echo=True).choices
    assert (read.text, read.finish_reason) == (prompt, "length")
    assert read.logprobs.token_logprobs == first.logprobs.token_logprobs[:-1]
    (silent,) = client.completions.create(model="tiny", prompt="abc", max_tokens=0, echo=True).choices
    assert (silent.text, silent.logprobs) == ("abc", None)

    asked = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    told = server.post("/generate", asked).json()["meta_info"]
    assert told["input_token_logprobs"] == [[v, t, None] for v, t in zip(read.logprobs.token_logprobs, tokens, strict=True)]
    assert told["input_top_logprobs"] == [None, *[[]] * 5]
    assert told["output_token_logprobs"] == []
