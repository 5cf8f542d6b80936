"""Log-probabilities against transformers', with trees and without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import make_captured
from engines import Tree, make_core, random_prompts
from transformers import AutoModelForCausalLM

from eagle_rt.engine import logprobs
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SamplingParams
from eagle_rt.logprobs import TokenLogprob
from eagle_rt.speculate.logprobs import LEAST, token_logprobs

PROMPTS = random_prompts(4, seed=3, longest=30)
GREEDY = SamplingParams(temperature=0, max_new_tokens=14, ignore_eos=True)
# The third asks for nothing; the last is chosen otherwise than the model would, which is not told.
SETTINGS = [
    replace(GREEDY, logprobs=3),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_new_tokens=9, ignore_eos=True, logprobs=0),
    replace(GREEDY, max_new_tokens=20),
    replace(GREEDY, logprobs=20, frequency_penalty=1.5, logit_bias=((70, 4.0),)),
]


def run(core: EngineCore, settings: list[SamplingParams] = SETTINGS) -> list[tuple[list[int], list[TokenLogprob]]]:
    """The tokens of every reply, and what is told of them."""
    told: dict[str, tuple[list[int], list[TokenLogprob]]] = {}
    for index, setting in enumerate(settings):
        told[str(index)] = [], []
        core.submit(str(index), PROMPTS[index], setting)
    while core.has_work:
        for event in core.step():
            told[event.request_id][0].extend(event.tokens)
            told[event.request_id][1].extend(event.logprobs or [])
    return list(told.values())


@torch.inference_mode()
def check(target_dir: Path, replies: list[tuple[list[int], list[TokenLogprob]]], settings: list[SamplingParams] = SETTINGS) -> None:
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    for prompt, setting, (tokens, told) in zip(PROMPTS, settings, replies, strict=False):
        assert len(tokens) == setting.max_new_tokens
        if setting.logprobs is None:
            assert not told
            continue
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, dim=1)
        values = torch.tensor([own.value for own in told])
        torch.testing.assert_close(values, expected.gather(1, torch.tensor(tokens)[:, None])[:, 0], atol=1e-4, rtol=0)
        best = expected.topk(setting.logprobs, dim=1)
        assert [[token for token, _ in own.top] for own in told] == best.indices.tolist()
        found = torch.tensor([[value for _, value in own.top] for own in told]).view(best.values.shape)
        torch.testing.assert_close(found, best.values, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (None, {}),
        ((3, 2, 6), {}),
        ((3, 2, 6), {"speculative_tree": "adaptive"}),
        ((2, 2, 4), {"chunked_prefill_size": 8, "max_total_tokens": 96, "page_size": 4}),  # of which someone has to give way
        ((3, 2, 6), {"attention_backend": "triton"}),
    ],
    ids=str,
)
def test_they_are_the_models_own(target_dir: Path, head_dir: Path, tree: Tree | None, options: dict[str, Any]) -> None:
    core = make_core(target_dir, head_dir, tree, **options)
    check(target_dir, run(core))
    if "max_total_tokens" in options:
        assert core.current_metrics().num_preemptions > 0


@pytest.mark.parametrize("tree", [None, (3, 2, 6)], ids=str)
def test_captured_steps_make_room_for_them(target_dir: Path, head_dir: Path, tree: Tree | None) -> None:
    """Whoever asks for none is decoded by captured steps again, once the others have left."""
    core = make_captured(target_dir, head_dir, tree, (1, 4))
    replies = run(core)
    check(target_dir, replies)
    assert {"verify", "step"} <= set(core.runner.clock.seconds)
    quiet = [replace(setting, logprobs=None) for setting in SETTINGS]
    assert [tokens for tokens, _ in run(make_core(target_dir), quiet)] == [tokens for tokens, _ in replies]


def test_steps_that_make_room_teach_nothing_of_captured_ones(target_dir: Path, head_dir: Path) -> None:
    """They take longer."""
    core = make_captured(target_dir, head_dir, (3, 2, 6), (1, 4), speculative_tree="adaptive")
    lessons: list[bool] = []
    core.runner.choice.learn = lambda *args, **kwargs: lessons.append(True)
    run(core, SETTINGS[:2])
    assert not lessons
    run(core, SETTINGS[2:3])
    assert lessons


def test_a_reply_that_ends_within_a_step_is_told_of_no_more(target_dir: Path, head_dir: Path) -> None:
    settings = [replace(GREEDY, max_new_tokens=length, logprobs=1) for length in (1, 2, 3, 4)]
    check(target_dir, run(make_core(target_dir, head_dir, (5, 4, 16)), settings), settings)


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (None, {}),
        ((3, 2, 6), {"chunked_prefill_size": 7}),
        ((3, 2, 6), {"attention_backend": "triton"}),
        ((2, 2, 4), {"chunked_prefill_size": 8, "max_total_tokens": 96, "page_size": 4}),
    ],
    ids=str,
)
@torch.inference_mode()
def test_of_prompts(
    target_dir: Path, head_dir: Path, tree: Tree | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the model, told once, with the first token, of every token but the first, though all of it has been read before."""
    monkeypatch.setattr(logprobs, "ROWS_AT_ONCE", 5)
    core, model = make_core(target_dir, head_dir, tree, **options), AutoModelForCausalLM.from_pretrained(target_dir)
    prompts, asked = [*PROMPTS, [70]], [3, None, 0, 20, 1]
    length = 14 if "max_total_tokens" in options else 2
    for _ in range(2):
        told: dict[str, list[list[TokenLogprob]]] = {}
        for index, (prompt, count) in enumerate(zip(prompts, asked, strict=True)):
            told[str(index)] = []
            core.submit(str(index), prompt, replace(GREEDY, max_new_tokens=length, prompt_logprobs=count))
        while core.has_work:
            for event in core.step():
                if event.prompt_logprobs is not None:
                    assert event.tokens
                    told[event.request_id].append(event.prompt_logprobs)
        for prompt, count, own in zip(prompts, asked, told.values(), strict=True):
            assert len(own) == (count is not None)
            if count is None:
                continue
            expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], dim=1)
            values = torch.tensor([one.value for one in own[0]])
            torch.testing.assert_close(values, expected.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0])
            best = expected.topk(count, dim=1).indices.tolist()
            assert [[token for token, _ in one.top] for one in own[0]] == best
    assert core.current_metrics().num_preemptions > 0 or "max_total_tokens" not in options


@pytest.mark.parametrize("tree", [None, (3, 2, 6)], ids=str)
def test_a_prompt_may_only_be_read(target_dir: Path, head_dir: Path, tree: Tree | None) -> None:
    core = make_core(target_dir, head_dir, tree)
    settings = [replace(GREEDY, max_new_tokens=0, prompt_logprobs=0), GREEDY, replace(GREEDY, max_new_tokens=0)]
    for index, setting in enumerate(settings):
        core.submit(str(index), PROMPTS[index], setting)
    events = []
    while core.has_work:
        events += core.step()
        core.scheduler.check_integrity()
    read = [event for event in events if event.request_id != "1"]
    assert [(event.request_id, event.tokens) for event in read] == [("0", []), ("2", [])]
    assert [event.finish_reason for event in read] == [{"type": "length", "length": 0}] * 2
    assert [len(event.prompt_logprobs or []) for event in read] == [len(PROMPTS[0]) - 1, 0]
    assert core.current_metrics().num_finished == 3


def test_what_has_no_probability_is_a_number_all_the_same() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [torch.nan, 0.0, 1.0]])
    first, second = token_logprobs(logits, [1, 1], [3, 1])
    assert first.value == LEAST
    assert [token for token, _ in first.top] == [0, 2, 1]
    assert second.value == LEAST
