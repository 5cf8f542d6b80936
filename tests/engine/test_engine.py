"""The Engine class, as scripts use it."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_rt import Engine, SamplingParams

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(target_dir: Path, head_dir: Path) -> Iterator[Engine]:
    with Engine(
        model_path=str(target_dir),
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(head_dir),
        speculative_num_steps=3,
        speculative_eagle_topk=2,
        speculative_num_draft_tokens=6,
        speculative_tree="fixed",
        max_total_tokens=4096,
        device="cpu",
    ) as engine:
        yield engine


def test_one_prompt_and_many(engine: Engine) -> None:
    one = engine.generate("hello", GREEDY)
    assert len(one["output_ids"]) == one["meta_info"]["completion_tokens"] == 12
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    many = engine.generate(["hello", "world"], GREEDY)
    assert many[0]["text"] == one["text"]
    tokens = engine.tokenizer.encode("hello")
    assert engine.generate(input_ids=tokens, sampling_params=GREEDY)["text"] == one["text"]
    assert engine.generate(input_ids=[tokens], sampling_params=SamplingParams(**GREEDY))[0]["text"] == one["text"]


def test_meta_info_adds_up(engine: Engine) -> None:
    info = engine.generate("hello", {**GREEDY, "max_new_tokens": 40})["meta_info"]
    histogram = info["spec_correct_drafts_histogram"]
    assert sum(histogram) == info["spec_verify_ct"]
    assert sum(number * count for number, count in enumerate(histogram)) == info["spec_accept_token_num"]
    assert info["spec_draft_token_num"] == 5 * info["spec_verify_ct"]
    assert info["spec_broken_drafts"] == info["num_preemptions"] == info["cached_tokens"] == 0
    assert info["spec_accept_length"] == pytest.approx(1 + info["spec_accept_token_num"] / info["spec_verify_ct"])
    # One token comes from the prompt's pass; the last step may have been cut.
    assert 0 <= 1 + info["spec_verify_ct"] + info["spec_accept_token_num"] - info["completion_tokens"] <= 3


def test_n_replies_have_n_seeds(engine: Engine) -> None:
    settings = {"temperature": 1.0, "max_new_tokens": 10, "seed": 7, "ignore_eos": True}
    three = engine.generate("hello", {**settings, "n": 3})
    assert len({reply["text"] for reply in three}) == 3
    assert engine.generate("hello", {**settings, "seed": 8})["text"] == three[1]["text"]


def test_requests_without_a_seed_differ(engine: Engine) -> None:
    settings = {"temperature": 1.0, "max_new_tokens": 10, "ignore_eos": True}
    assert engine.generate("hello", settings)["text"] != engine.generate("hello", settings)["text"]


def test_streams_run_side_by_side(engine: Engine) -> None:
    async def read(prompt: str) -> tuple[str, str]:
        deltas, last = [], {}
        async for last in engine.stream(prompt, GREEDY):
            deltas.append(last["delta"])
        assert last["meta_info"]["finish_reason"]
        return "".join(deltas), last["text"]

    async def both() -> list[tuple[str, str]]:
        return await asyncio.gather(read("hello"), read("world"))

    for prompt, (streamed, whole) in zip(("hello", "world"), asyncio.run(both()), strict=True):
        assert streamed == whole == engine.generate(prompt, GREEDY)["text"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_finishes_a_request(engine: Engine, streams: bool) -> None:
    """Which nobody has given up, though the engine would go on with it."""
    text = engine.generate("hello", GREEDY)["text"]
    setting = {**GREEDY, "max_new_tokens": 400, "stop": text[2:4]}

    async def read() -> dict[str, Any]:
        return [item async for item in engine.stream("hello", setting)][-1]

    before = engine.metrics()
    num_finished, num_aborted = before.num_finished, before.num_aborted
    reply = asyncio.run(read()) if streams else engine.generate("hello", setting)
    assert reply["text"] == text[: text.index(text[2:4])]
    engine.generate("hello", {**GREEDY, "max_new_tokens": 1})  # when this is answered the engine has heard of the other's end
    assert (engine.metrics().num_finished, engine.metrics().num_aborted) == (num_finished + 2, num_aborted)


def test_leaving_a_stream_aborts_it(engine: Engine) -> None:
    num_aborted = engine.metrics().num_aborted

    async def leave() -> None:
        stream = engine.stream("hello", {**GREEDY, "max_new_tokens": 400})
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    engine.generate("hello", GREEDY)
    assert engine.metrics().num_running == 0
    assert engine.metrics().num_aborted == num_aborted + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "x", "sampling_params": {"temperature": -1}}, "temperature is -1"),
        ({"prompt": "x", "sampling_params": {"temprature": 1}}, "temprature is not a parameter"),
        ({"prompt": "x" * 600}, "context length is 512"),
        ({"input_ids": [5, 9999]}, "token 9999 is outside"),
        ({"input_ids": [[5, 1.5]]}, "list of token ids"),
        ({"prompt": [None]}, "list of token ids"),
        ({}, "either prompt or input_ids"),
        ({"prompt": "x", "input_ids": [1]}, "either prompt or input_ids"),
    ],
)
def test_bad_input_is_refused_and_the_engine_goes_on(engine: Engine, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(**arguments)
    assert engine.generate("hello", GREEDY)["text"]


def test_a_bad_prompt_among_good_ones(engine: Engine) -> None:
    with pytest.raises(ValueError, match="context length"):
        engine.generate(["hello", "x" * 600], GREEDY)
    assert engine.generate("hello", GREEDY)["text"]


def test_after_shutdown(target_dir: Path) -> None:
    engine = Engine(model_path=str(target_dir), max_total_tokens=1024, device="cpu")
    engine.shutdown()
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        engine.generate("hello", GREEDY)


def test_what_was_decided_is_said(engine: Engine) -> None:
    assert any("tree (3, 2, 6)" in note for note in engine.notes)
    assert any("context length 512" in note for note in engine.notes)


def test_a_missing_chat_template_is_said_and_one_can_be_brought(target_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(target_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!")
    for chat_template, own in ((None, None), (str(file), file.read_text())):
        with Engine(model_path=str(tmp_path), max_total_tokens=1024, device="cpu", chat_template=chat_template) as engine:
            assert engine.tokenizer.chat_template == own
            assert any("no chat template" in note for note in engine.notes) == (own is None)


def test_a_cache_too_small_for_one_request(target_dir: Path) -> None:
    with pytest.raises(ValueError, match="raise --max-total-tokens"):
        Engine(model_path=str(target_dir), max_total_tokens=1, page_size=1, device="cpu")


def test_a_small_cache_shortens_the_context_and_says_so(target_dir: Path) -> None:
    with Engine(model_path=str(target_dir), max_total_tokens=100, page_size=1, device="cpu") as engine:
        assert any("the context length is that instead of 512" in note for note in engine.notes)
        reply = engine.generate("hello", {"temperature": 0, "max_new_tokens": None, "ignore_eos": True})
        assert reply["meta_info"]["prompt_tokens"] + reply["meta_info"]["completion_tokens"] == 99
