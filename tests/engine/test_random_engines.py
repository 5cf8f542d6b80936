"""Random engines under random loads: whatever is asked for, shared, given up and put off, every reply is that of a plain engine
which has nothing else to do."""

import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import guessable
import mtp_layouts
import pytest
from engines import make_core
from matching import GRAMMARS, match_of

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SamplingParams, SpeculativeParams
from eagle_rt.engine.request import TokenEvent
from eagle_rt.logprobs import TokenLogprob

# Targets, and the algorithms that draft for them: with a head that foresees some of what comes, or with a layer of their own.
WITH_HEADS = ("llama", "mistral", "qwen3-moe", "llama4", "gemma4-moe", "gemma4-small", "qwen3.5", "deepseek-v3")
WITH_LAYERS: dict[str, Callable[[Path], object]] = {
    "own glm4-moe": mtp_layouts.write_nextn,
    "own qwen3.5": mtp_layouts.write_qwen3_5,
}
ALGORITHMS = ("EAGLE", "NGRAM", None)
CONTEXT_LENGTH = 200


@dataclass
class Reply:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: dict[str, Any] | None = None

    def add(self, event: TokenEvent) -> None:
        self.tokens += event.tokens
        self.logprobs += event.logprobs or []
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = event.finish_reason or self.finish_reason

    def told(self) -> tuple[Any, ...]:
        """But for how likely tokens were, which is only nearly the same."""
        lengths = len(self.logprobs), self.prompt_logprobs and len(self.prompt_logprobs)
        return self.tokens, self.finish_reason, lengths, [len(own.top) for own in (*self.logprobs, *(self.prompt_logprobs or ()))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path | None]]:
    """Makes a target, with a head if it takes one, the first time that it is wanted."""
    made: dict[str, tuple[Path, Path | None]] = {}

    def find(name: str) -> tuple[Path, Path | None]:
        if name not in made:
            directory = tmp_path_factory.mktemp("random")
            if name in WITH_LAYERS:
                WITH_LAYERS[name](directory / "target")
                made[name] = directory / "target", None
            else:
                made[name] = guessable.write_pair(directory, name, loudness=0.1)
        return made[name]

    return find


def random_texts(draw: random.Random, count: int) -> list[list[int]]:
    """Some begin as others do, some repeat themselves."""
    texts: list[list[int]] = []
    for _ in range(count):
        kind, some = draw.random(), [draw.randrange(6, 262) for _ in range(draw.choice([1, 2, 15, 16, 17, 40, 90]))]
        if texts and kind < 0.4:
            other = draw.choice(texts)
            some = other[: draw.randint(1, len(other))] + some[:20]
        elif kind < 0.6:
            some = (some[:9] * 30)[: draw.randint(1, 100)]
        texts.append(some[:110])
    return texts


def random_setting(draw: random.Random, *, can_draft: bool) -> SamplingParams:
    often = {"temperature": draw.choice([0, 0, 0.5, 1.0, 2.0]), "seed": draw.randrange(99), "ignore_eos": draw.random() < 0.8}
    often["max_new_tokens"] = draw.choice([0, 1, 2, 7, 24, 60])
    seldom: dict[str, Any] = {
        "top_k": draw.choice([1, 3, 20]),
        "top_p": draw.choice([0.3, 0.9]),
        "min_p": 0.1,
        "frequency_penalty": draw.choice([-1.0, 0.7]),
        "presence_penalty": 0.5,
        "repetition_penalty": draw.choice([0.8, 1.3]),
        "logit_bias": ((draw.randrange(6, 262), 5.0), (9, -100.0)),
        "stop_token_ids": tuple(draw.randrange(6, 262) for _ in range(4)),
        "logprobs": draw.choice([0, 3]),
        "prompt_logprobs": draw.choice([0, 2]),
    }
    if can_draft:
        of_one = SpeculativeParams(num_steps=1, eagle_topk=1, num_draft_tokens=2)
        seldom["speculative"] = draw.choice([SpeculativeParams(enabled=False), SpeculativeParams(trace=True), of_one])
    setting = SamplingParams(**often, **{name: value for name, value in seldom.items() if draw.random() < 0.15})
    if draw.random() < 0.15 and setting.max_new_tokens:
        grammar = draw.choice(GRAMMARS)
        setting = replace(setting, ignore_eos=False, **{grammar.kind: grammar.text})
    return setting


def random_options(draw: random.Random, algorithm: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "context_length": CONTEXT_LENGTH,
        "page_size": draw.choice([1, 4, 16]),
        "chunked_prefill_size": draw.choice([16, 33, 512]),
        "max_running_requests": draw.choice([1, 2, 6]),
        "max_total_tokens": draw.choice([208, 256, 4096]),
        "disable_radix_cache": draw.random() < 0.15,
        "prefill_delay": draw.choice(["auto", "on"]),
    }
    if algorithm:
        options |= {"speculative_algorithm": algorithm, "speculative_tree": draw.choice(["fixed", "adaptive"])}
    if algorithm not in (None, "NGRAM"):
        options |= {name: draw.choice(["auto", "off"]) for name in ("speculative_ngram", "speculative_coupling")}
        options["speculative_disable_by_batch_size"] = draw.choice([None, None, 2])
    return options


def submit(core: EngineCore, name: str, text: list[int], setting: SamplingParams) -> None:
    core.submit(name, text, setting, match_of(setting.grammar) if setting.grammar else None)


def serve(draw: random.Random, core: EngineCore, texts: list[list[int]], settings: list[SamplingParams]) -> dict[str, Reply]:
    """They come in bursts, and some are given up."""
    waiting, replies, hurry = list(range(len(texts))), {}, draw.choice([0.5, 0.95])
    while waiting or core.has_work:
        while waiting and draw.random() < hurry:
            number = waiting.pop(0)
            replies[str(number)] = Reply()
            submit(core, str(number), texts[number], settings[number])
        for event in core.step():
            replies[event.request_id].add(event)
        core.scheduler.check_integrity()
        going_on = [name for name, reply in replies.items() if not reply.finish_reason]
        if going_on and draw.random() < 0.03:
            gone = core.abort(draw.choice(going_on))
            assert gone
            replies[gone.request_id].add(gone)
    return replies


def alone(core: EngineCore, text: list[int], setting: SamplingParams) -> Reply:
    submit(core, "alone", text, replace(setting, speculative=SpeculativeParams()))
    reply = Reply()
    while core.has_work:
        for event in core.step():
            reply.add(event)
    return reply


def check(reply: Reply, expected: Reply) -> None:
    if reply.finish_reason and reply.finish_reason["type"] == "abort":
        assert reply.tokens == expected.tokens[: len(reply.tokens)]
        return
    assert reply.told() == expected.told()
    for own, other in zip(
        (*reply.logprobs, *(reply.prompt_logprobs or ())), (*expected.logprobs, *(expected.prompt_logprobs or ())), strict=True
    ):
        assert own.value == pytest.approx(other.value, abs=2e-3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*WITH_HEADS, *WITH_LAYERS])
def test_every_reply_is_that_of_a_plain_engine(checkpoint: Callable[[str], tuple[Path, Path | None]], name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    target, head = checkpoint(name)
    algorithm = "NEXTN" if head is None else ALGORITHMS[seed]
    options = random_options(draw, algorithm)
    if algorithm == "NEXTN":
        options["speculative_draft_model_path"] = None
    tree = draw.choice([(1, 1, 2), (3, 2, 8), (4, 4, 16)]) if algorithm in ("EAGLE", "NEXTN") else None
    texts = random_texts(draw, 12)
    settings = [random_setting(draw, can_draft=tree is not None) for _ in texts]
    with closing(make_core(target, head, tree, **options)) as core:
        replies = serve(draw, core, texts, settings)
        assert core.scheduler.num_available_pages == core.scheduler.limits.num_pages
    plain = {"context_length": CONTEXT_LENGTH, "page_size": 1, "max_running_requests": 1, "disable_radix_cache": True}
    with closing(make_core(target, **plain)) as core:
        for number, (text, setting) in enumerate(zip(texts, settings, strict=True)):
            check(replies[str(number)], alone(core, text, setting))
