"""The whole engine on a tiny random pair: every way of running gives the same text as transformers."""

import random
from pathlib import Path

import checkpoints
import pytest
import torch
from engines import collect, make_core, random_prompts, run
from transformers import AutoModelForCausalLM

from eagle_rt.engine.build import PROMPT_LENGTHS, warm_up
from eagle_rt.engine.params import SamplingParams

TREES = [None, (1, 1, 2), (3, 1, 4), (5, 4, 16), (5, 8, 32), (8, 10, 60)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
PROMPTS = random_prompts(6)


@pytest.fixture(scope="module")
def greedy_text(target_dir: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    texts = []
    for prompt in PROMPTS:
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        texts.append(tokens[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 16}, {"disable_radix_cache": True}, {"page_size": 1}], ids=str)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_greedy_text_is_transformers(
    target_dir: Path, head_dir: Path, greedy_text: list[list[int]], tree: tuple[int, int, int] | None, options: dict
) -> None:
    core = make_core(target_dir, head_dir, tree, **options)
    assert run(core, PROMPTS, GREEDY) == greedy_text
    assert [run(core, [prompt], GREEDY)[0] for prompt in PROMPTS] == greedy_text, "one at a time, on a warm cache"


@pytest.mark.parametrize(
    "name", ["mistral", "qwen2-window", "qwen3", "llama-biased", "phi3", "hunyuan", "gemma3", "gemma4", "qwen3-vl"]
)
def test_greedy_text_of_other_families(tmp_path: Path, head_dir: Path, name: str) -> None:
    checkpoints.write_target(tmp_path, name)
    plain = run(make_core(tmp_path), PROMPTS, GREEDY)
    model = checkpoints.transformers_model(tmp_path)
    expected = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert plain[0] == expected[0, len(PROMPTS[0]) :].tolist()
    assert run(make_core(tmp_path, head_dir, (5, 4, 16)), PROMPTS, GREEDY) == plain


SAMPLED = [
    SamplingParams(temperature=temperature, seed=seed, max_new_tokens=20, ignore_eos=True, **filters)
    for seed, temperature in ((1, 0.6), (2, 1.0))
    for filters in ({}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05})
]


@pytest.mark.parametrize("tree", TREES[1:], ids=str)
def test_seeded_text_does_not_depend_on_the_tree(target_dir: Path, head_dir: Path, tree: tuple[int, int, int]) -> None:
    prompts = random_prompts(len(SAMPLED), seed=3)
    plain = run(make_core(target_dir), prompts, SAMPLED)
    assert run(make_core(target_dir, head_dir, tree), prompts, SAMPLED) == plain
    assert len({tuple(text) for text in plain}) == len(plain)


def test_requests_outlive_the_heads_context(target_dir: Path, head_dir: Path) -> None:
    """The head's max_position_embeddings is 64."""
    setting = SamplingParams(temperature=0, max_new_tokens=90, ignore_eos=True)
    prompts = random_prompts(2, seed=4)
    assert run(make_core(target_dir, head_dir, (3, 2, 6)), prompts, setting) == run(make_core(target_dir), prompts, setting)


def test_text_ends_at_the_context(target_dir: Path, head_dir: Path) -> None:
    core = make_core(target_dir, head_dir, (5, 4, 16), context_length=40)
    setting = SamplingParams(temperature=0, max_new_tokens=None, ignore_eos=True)
    texts = run(core, [prompt[:30] for prompt in PROMPTS], setting)
    assert [len(prompt[:30]) + len(text) for prompt, text in zip(PROMPTS, texts, strict=True)] == [40] * len(PROMPTS)


def test_a_head_without_numbers_costs_only_its_drafts(target_dir: Path, head_dir: Path, greedy_text: list[list[int]]) -> None:
    core = make_core(target_dir, head_dir, (3, 2, 6))
    norm = core.runner.stepper.drafter.head._final_norm
    norm.weight[3] = norm._scaled_weight[3] = torch.nan
    assert run(core, PROMPTS, GREEDY) == greedy_text
    assert core.metrics.num_broken_drafts == core.metrics.num_drafts > 0
    assert core.metrics.num_accepted_tokens == 0


def test_200_requests_on_a_pool_too_small(target_dir: Path, head_dir: Path) -> None:
    """Random lengths, ends, seeds and aborts: every survivor equals its solo run, nothing leaks, no one starves."""
    rng = random.Random(11)
    prompts = random_prompts(200, seed=9, longest=50)
    settings = [
        SamplingParams(
            temperature=rng.choice([0, 0.7, 1.0]),
            seed=number,
            max_new_tokens=rng.randrange(1, 40),
            stop_token_ids=tuple(rng.sample(range(6, 262), 3)),
            ignore_eos=rng.random() < 0.5,
        )
        for number in range(200)
    ]
    core = make_core(
        target_dir, head_dir, (3, 4, 8), max_total_tokens=400, page_size=4, max_running_requests=16, context_length=120
    )
    outputs: dict[str, list[int]] = {f"r{number}": [] for number in range(200)}
    aborted: set[str] = set()
    for number, (prompt, setting) in enumerate(zip(prompts, settings, strict=True)):
        core.submit(f"r{number}", prompt, setting)
    num_steps = 0
    while core.has_work:
        collect(core.step(), outputs)
        core.scheduler.check_integrity()
        if rng.random() < 0.1:
            name = f"r{rng.randrange(200)}"
            if core.abort(name):
                aborted.add(name)
        num_steps += 1
        assert num_steps < 3000, "a request starves"
    assert core.scheduler.num_preemptions > 0, "the pool was meant to be too small"
    assert 3 < len(aborted) < 150
    assert core.scheduler.num_available_pages == core.scheduler.limits.num_pages

    solo = make_core(target_dir)
    for number in range(200):
        name = f"r{number}"
        expected = run(solo, [prompts[number]], settings[number])[0]
        if name in aborted:
            assert outputs[name] == expected[: len(outputs[name])]
        else:
            assert outputs[name] == expected, name


def test_prompts_that_cannot_be_served_harm_no_one(target_dir: Path, head_dir: Path) -> None:
    core = make_core(target_dir, head_dir, (3, 1, 4))
    core.submit("good", PROMPTS[0], GREEDY)
    for prompt, message in (([5, 262], "token 262 is outside the vocabulary of 262"), ([], "empty"), ([9] * 600, "context length")):
        with pytest.raises(ValueError, match=message):
            core.submit("bad", prompt, GREEDY)
    with pytest.raises(ValueError, match="already in use"):
        core.submit("good", PROMPTS[0], GREEDY)
    outputs: dict[str, list[int]] = {"good": []}
    while core.has_work:
        collect(core.step(), outputs)
    assert len(outputs["good"]) == 24


def test_warming_up_leaves_nothing_behind(target_dir: Path, head_dir: Path) -> None:
    """With prompts longer than the context, too."""
    core = make_core(target_dir, head_dir, (2, 2, 4), context_length=64, max_total_tokens=512)
    num_pages = core.scheduler.num_available_pages
    warm_up(core, PROMPT_LENGTHS, num_tokens=1, temperatures=(0.0,))
    assert core.current_metrics().num_prompt_tokens == 0
    assert core.scheduler.num_available_pages == num_pages == core.scheduler.limits.num_pages
