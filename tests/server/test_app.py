"""The whole server, as its users meet it: a process on a port, and the openai client."""

import json
import threading
import time
from pathlib import Path

import openai
import pytest
import requests
from matching import LOOK_UP
from servers import MESSAGES, Server

import bench_speculative

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"
    stream = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    assert stream[-1].usage == whole.usage or stream[-1].usage.completion_tokens == 20
    assert [chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1] == "length"


def test_penalties_and_biases(client: openai.OpenAI, server: Server) -> None:
    """In OpenAI's names, which its client sends, and in SGLang's."""
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    reply = client.chat.completions.create(**options, logit_bias={"72": 100}, presence_penalty=0.5)
    assert reply.choices[0].message.content == "c" * 6
    streamed = client.chat.completions.create(**options, logit_bias={"72": 100}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "c" * 6
    sampling = {"temperature": 0, "max_new_tokens": 6, "logit_bias": {"72": 50.0}, "repetition_penalty": 1.5}
    body = {"text": "hello", "sampling_params": sampling}
    assert requests.post(f"{server.url}/generate", json=body, timeout=60).json()["text"] == "c" * 6


def test_completions_of_text_and_tokens(client: openai.OpenAI) -> None:
    replies = [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0).choices[0].text
        for prompt in ("abc", [ord("a") - 33 + 6, ord("b") - 33 + 6, ord("c") - 33 + 6], ["abc"])
    ]
    assert len(set(replies)) == 1
    two = client.completions.create(model="tiny", prompt=["abc", "xyz"], max_tokens=8, temperature=0)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == replies[0]


def test_seeds_and_n(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 1.0, "seed": 5}
    three = client.chat.completions.create(**options, n=3)
    texts = [choice.message.content for choice in three.choices]
    assert len(set(texts)) == 3
    assert client.chat.completions.create(**options).choices[0].message.content == texts[0]
    assert client.chat.completions.create(**{**options, "seed": 6}).choices[0].message.content == texts[1]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**options, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_stop_strings(client: openai.OpenAI, server: Server) -> None:
    """Nobody has given up what they end, and the engine does not go on with it."""
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, "temperature": 1.0, "seed": 1}
    options["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**options).choices[0].message.content
    time.sleep(2)  # until numbers are told again
    stop, num_aborted, num_tokens = whole[5:7], server.metric("requests_aborted_total"), server.metric("generation_tokens_total")
    cut = client.chat.completions.create(**options, stop=stop).choices[0]
    assert cut.message.content == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    client.chat.completions.create(**{**options, "max_tokens": 1})
    time.sleep(2)
    assert server.metric("requests_aborted_total") == num_aborted
    assert server.metric("generation_tokens_total") < num_tokens + 200


def test_native_route(server: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
    reply = server.post("/generate", {"text": "abc", "sampling_params": params}).json()
    info = reply["meta_info"]
    assert len(reply["output_ids"]) == info["completion_tokens"] == 10
    assert sum(info["spec_correct_drafts_histogram"]) == info["spec_verify_ct"]
    alone = server.post("/generate", {"text": "abc", "sampling_params": {**params, "speculative": {"enabled": False}}}).json()
    assert alone["text"] == reply["text"]
    assert alone["meta_info"]["spec_draft_token_num"] == 0
    many = server.post("/generate", {"text": ["abc", "x"], "sampling_params": params}).json()
    assert many[0]["text"] == reply["text"]
    lines = server.post("/generate", {"text": "abc", "sampling_params": params, "stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[-3].removeprefix("data: "))["text"] == reply["text"]


def test_models_info_and_metrics(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    info = requests.get(f"{server.url}/server_info", timeout=5).json()
    assert info["config"]["speculative_num_draft_tokens"] == 6
    assert info["context_length"] == 512
    for seed in range(4):  # in so many steps trees are tried, though a random head's do not pay
        sampling = {"temperature": 1.0, "seed": seed, "max_new_tokens": 200, "ignore_eos": True}
        server.post("/generate", {"text": "abc", "sampling_params": sampling})
    time.sleep(1)
    assert server.metric("spec_decode_num_drafts_total") > 0
    assert 0 < server.metric("spec_decode_num_draft_tokens_total") <= 5 * server.metric("spec_decode_num_drafts_total")
    assert 0 <= server.metric("spec_decode_num_undrafted_total") < server.metric("spec_decode_num_drafts_total")
    assert 0 < server.metric("spec_decode_brier_score") < 1
    assert server.metric('spec_decode_estimated_nodes_total{tenth="0"}') >= 0
    assert "spec_decode_num_accepted_tokens_per_pos_total" in requests.get(f"{server.url}/metrics", timeout=5).text


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}]}, 400, "messages", "type 'image_url' are not"),
        ("chat/completions", {"messages": []}, 400, "messages", "at least 1 item"),
        ("chat/completions", {"model": "tiny"}, 400, "messages", "required"),
        ("chat/completions", {"model": "gpt", "messages": MESSAGES}, 404, "model", "'gpt' is not served here"),
        ("chat/completions", {"messages": MESSAGES, "temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ("chat/completions", {"messages": MESSAGES, "top_p": 0}, 400, "top_p", "greater than 0"),
        ("chat/completions", {"messages": MESSAGES, "n": 0}, 400, "n", "greater than or equal to 1"),
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ("chat/completions", {"messages": MESSAGES, "n": True}, 400, "n", "valid integer"),
        ("chat/completions", {"messages": MESSAGES, "temperature": "1"}, 400, "temperature", "valid number"),
        ("chat/completions", {"messages": MESSAGES, "logit_bias": {"5": "1"}}, 400, "logit_bias", "valid number"),
        ("completions", {"prompt": "a", "stream": "no"}, 400, "stream", "valid boolean"),
        ("chat/completions", {"messages": MESSAGES, "bogus": 1}, 400, "bogus", "not a known parameter"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools", "required"),
        ("chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice", "but tools is not"),
        (
            "chat/completions",
            {"messages": MESSAGES, "tools": [LOOK_UP], "tool_choice": "required", "regex": "a"},
            400,
            None,
            "regex and structural_tag are given",
        ),
        ("chat/completions", {"messages": MESSAGES, "tools": [{**LOOK_UP, "x": 1}]}, 400, "tools", "tools.0.x is not a known"),
        (
            "chat/completions",
            {"messages": MESSAGES, "tools": [LOOK_UP], "tool_choice": "required", "structural_tag": {}},
            400,
            None,
            "tools and structural_tag are both given",
        ),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages", "content is missing"),
        ("completions", {"prompt": "a", "structural_tag": {"type": "x"}}, 400, "structural_tag", "is not possible"),
        ("chat/completions", {"messages": MESSAGES, "response_format": {"type": "xml"}}, 400, "response_format", "'json_object'"),
        (
            "chat/completions",
            {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
            400,
            "response_format",
            "type is json_schema, but json_schema is missing",
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "response_format": {"type": "json_object"}, "json_schema": {}},
            400,
            None,
            "response_format and json_schema are both given",
        ),
        ("completions", {"prompt": "a", "json_schema": {"type": "nothing"}}, 400, "json_schema", 'Unsupported type "nothing"'),
        ("completions", {"prompt": "a", "regex": "a", "ignore_eos": True}, 400, "ignore_eos", "ends with it"),
        ("completions", {"prompt": "a", "regex": "a" * 2**17}, 400, "regex", "at most 65536 characters"),
        ("chat/completions", {"messages": MESSAGES, "logprobs": 2}, 400, "logprobs", "valid boolean"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs: true"),
        (
            "chat/completions",
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21},
            400,
            "top_logprobs",
            "less than or equal to 20",
        ),
        ("completions", {"prompt": "a", "logprobs": -1}, 400, "logprobs", "greater than or equal to 0"),
        ("chat/completions", {"messages": MESSAGES, "frequency_penalty": 3}, 400, "frequency_penalty", "less than or equal to 2"),
        ("chat/completions", {"messages": MESSAGES, "repetition_penalty": 0}, 400, "repetition_penalty", "greater than 0"),
        ("chat/completions", {"messages": MESSAGES, "logit_bias": {"x": 1}}, 400, "logit_bias", "valid integer"),
        ("chat/completions", {"messages": MESSAGES, "logit_bias": {"5": 200}}, 400, "logit_bias", "less than or equal to 100"),
        ("chat/completions", {"messages": MESSAGES, "logit_bias": {"9999": 1}}, 400, None, "outside the vocabulary"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}, 400, None, "context length is 512"),
        ("chat/completions", {"messages": MESSAGES, "seed": 2**70}, 400, "seed", "less than 9223372036854775808"),
        (
            "chat/completions",
            {"messages": MESSAGES, "speculative": {"num_steps": 99}},
            400,
            "speculative",
            "this server drafts at most 3",
        ),
        ("chat/completions", {"messages": MESSAGES, "speculative": {"enabled": "no"}}, 400, "speculative", "valid boolean"),
        (
            "chat/completions",
            {"messages": MESSAGES, "speculative": {"depth": 3}},
            400,
            "speculative",
            "speculative.depth is not a parameter",
        ),
        ("completions", {"prompt": ""}, 400, "prompt", "must not be empty"),
        ("completions", {"prompt": [1, 9999]}, 400, None, "outside the vocabulary"),
        ("completions", {"prompt": [1, 2**70]}, 400, "prompt", "valid string"),
        ("completions", {"prompt": "a" * 600, "stream": True}, 400, None, "600 tokens, but the context length is 512"),
        ("completions", {"prompt": ["a"] * 3, "regex": "(", "stream": True}, 400, "regex", "regex is not possible"),
        (
            "chat/completions",
            {"messages": MESSAGES, "logit_bias": {"9999": 1}, "stream": True},
            400,
            None,
            "outside the vocabulary",
        ),
        ("completions", {"prompt": "a", "max_tokens": 2**64}, 400, "max_tokens", "less than 9223372036854775808"),
    ],
)
def test_bad_requests_are_answered_in_openais_format(
    server: Server, path: str, body: dict, status: int, param: str | None, message: str
) -> None:
    response = server.post(f"/v1/{path}", body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["param"] == param


def test_malformed_json_and_unknown_paths(server: Server) -> None:
    response = requests.post(f"{server.url}/v1/completions", data="{oops", headers={"Content-Type": "application/json"}, timeout=5)
    assert response.status_code == 400
    assert "not valid JSON" in response.json()["error"]["message"]
    response = requests.get(f"{server.url}/v1/nothing", timeout=5)
    assert response.status_code == 404
    assert response.json()["error"]["message"]


def test_native_errors(server: Server) -> None:
    for body, message in (
        ({"text": "a", "sampling_params": {"temperatur": 1}}, "temperatur is not a parameter"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature is 'hot': Input should be a valid number"),
        ({"text": "a", "sampling_params": {"speculative": 5}}, "speculative is 5"),
        ({"text": "a", "sampling_params": {"seed": 1.5}}, "seed is 1.5"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [2**70]}}, "stop_token_ids.0"),
        ({"text": "a", "sampling_params": {"regex": "("}, "stream": True}, "regex is not possible"),
        ({"input_ids": [2**70]}, "input_ids"),
        ({"input_ids": []}, "prompt is empty"),
        ({"text": ""}, "prompt is empty"),
        ({"text": []}, "prompt is empty"),
        ({"sampling_params": {}}, "either text or input_ids"),
    ):
        response = server.post("/generate", body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_aborts_the_request(server: Server, stream: bool) -> None:
    """Several replies, so that some are still being written then, however fast the machine is."""
    aborted = server.metric("requests_aborted_total")
    body = {"messages": MESSAGES, "max_tokens": 480, "ignore_eos": True, "stream": stream, "n": 16}
    seconds = 30 if stream else 0.3
    try:
        response = requests.post(f"{server.url}/v1/chat/completions", json=body, stream=True, timeout=(5, seconds))
        next(response.iter_content(1))
        response.close()
    except requests.ReadTimeout:
        assert not stream, "a stream sends its first event as soon as there is some text"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (
        server.metric("requests_aborted_total") == aborted or server.metric("requests_running") > 0
    ):
        time.sleep(0.2)
    assert aborted < server.metric("requests_aborted_total") <= aborted + 16
    assert server.metric("requests_running") == server.metric("requests_waiting") == 0


def test_many_at_once(server: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    alone = [server.post("/generate", {"text": f"prompt {i}", "sampling_params": params}).json()["text"] for i in range(8)]
    results: dict[int, str] = {}

    def ask(index: int) -> None:
        results[index] = server.post("/generate", {"text": f"prompt {index % 8}", "sampling_params": params}).json()["text"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: alone[index % 8] for index in range(40)}


def test_the_benchmark_against_a_server(server: Server, target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--base-url {server.url} --model-path {target_dir} --num-prompts 4 --max-new-tokens 8 --batch-size 1 4 --device cpu"
    assert bench_speculative.main(flags.split()) == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
    assert [row["batch_size"] for row in rows] == [1, 4]
    assert all(row["tokens_per_second"] > 0 and row["mean_accepted_tokens"] >= 1 for row in rows)
