"""Replies that match grammars: the same with any tree, and the target's own choice among what is allowed."""

import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captured import make_captured
from checkpoints import byte_tokenizer
from engines import Tree, make_core, random_prompts
from family_configs import VOCAB_SIZE
from matching import (
    ANSWERS,
    COLOURS,
    END,
    NUM_SPECIAL,
    NUMBERS,
    allowed_by,
    compiled,
    is_answer,
    is_expression,
    match_of,
    text_of,
    tokens_of,
)
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from xgrammar import GrammarCompiler, GrammarMatcher

from eagle_rt.engine import grammars as module
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.grammars import INSTALL, Grammars, tokenizer_info
from eagle_rt.engine.loop import run_loop
from eagle_rt.engine.messages import Abort, Command, Rejected, Report, Shutdown, Submit, decode, encode
from eagle_rt.engine.params import Grammar, SamplingParams
from eagle_rt.engine.plan import StepResult
from eagle_rt.engine.request import TokenEvent

PROMPTS = random_prompts(5, seed=4, longest=30)
GREEDY = SamplingParams(temperature=0, max_new_tokens=40)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=3, max_new_tokens=40)


def under(setting: SamplingParams, grammar: Grammar) -> SamplingParams:
    return replace(setting, **{grammar.kind: grammar.text})


# The third is free.
SETTINGS = [
    under(GREEDY, COLOURS),
    under(replace(SAMPLED, frequency_penalty=0.5), NUMBERS),
    replace(GREEDY, ignore_eos=True),
    under(GREEDY, ANSWERS),
    under(SAMPLED, COLOURS),
]


def run(core: EngineCore, settings: list[SamplingParams] = SETTINGS) -> list[list[int]]:
    replies: dict[str, list[int]] = {}
    for index, setting in enumerate(settings):
        replies[str(index)] = []
        core.submit(str(index), PROMPTS[index], setting, match_of(setting.grammar) if setting.grammar else None)
    while core.has_work:
        for event in core.step():
            replies[event.request_id] += event.tokens
            assert event.failure is None
        core.scheduler.check_integrity()
    return list(replies.values())


@pytest.fixture(scope="module")
def expected(target_dir: Path) -> list[list[int]]:
    return run(make_core(target_dir))


def test_greedy_replies_are_the_best_that_match(target_dir: Path, expected: list[list[int]]) -> None:
    """By transformers' logits, with nothing of ours."""
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    for prompt, setting, reply in zip(PROMPTS, SETTINGS, expected, strict=True):
        if setting.temperature > 0 or not setting.grammar:
            continue
        allowed, tokens = allowed_by(setting.grammar), []
        while END not in tokens and len(tokens) < GREEDY.max_new_tokens:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
            tokens.append(max(allowed(tuple(tokens)), key=lambda token: float(logits[token])))
        assert reply == tokens


def test_replies_match(expected: list[list[int]]) -> None:
    for setting, reply in zip(SETTINGS, expected, strict=True):
        if not setting.grammar:
            assert len(reply) == setting.max_new_tokens
            continue
        is_whole = is_answer if setting.grammar == ANSWERS else is_expression
        tokens = tuple(reply)
        assert is_whole(setting.grammar, text_of(tokens[:-1])) if tokens[-1] == END else len(tokens) == setting.max_new_tokens
    assert expected[3][-1] == END, "an answer has an end"


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        ((3, 2, 6), {}),
        ((5, 4, 16), {"speculative_tree": "adaptive"}),
        ((3, 2, 6), {"max_total_tokens": 128, "page_size": 4, "chunked_prefill_size": 8}),  # someone has to give way
    ],
    ids=str,
)
def test_trees_change_nothing(
    target_dir: Path, head_dir: Path, expected: list[list[int]], tree: Tree | None, options: dict[str, Any]
) -> None:
    core = make_core(target_dir, head_dir, tree, **options)
    assert run(core) == expected
    if "max_total_tokens" in options:
        assert core.current_metrics().num_preemptions > 0


@pytest.mark.parametrize("tree", [None, (3, 2, 6)], ids=str)
def test_captured_steps_make_room(target_dir: Path, head_dir: Path, tree: Tree | None) -> None:
    """And go on once those who match something have left."""
    settings = [
        replace(SETTINGS[0], max_new_tokens=4),
        replace(SETTINGS[1], max_new_tokens=3),
        replace(SETTINGS[2], max_new_tokens=9),
    ]
    core = make_captured(target_dir, head_dir, tree, (1, 4))
    assert run(core, settings) == run(make_core(target_dir), settings)
    assert {"verify", "step"} <= set(core.runner.clock.seconds)


@pytest.mark.parametrize("is_captured", [False, True])
def test_drafts_keep_to_the_grammar(target_dir: Path, head_dir: Path, is_captured: bool) -> None:
    """Where it leaves one token that is what is drafted, though a random head and a random target agree on nothing."""
    tree = (3, 1, 4)
    core = make_captured(target_dir, head_dir, tree, (1,)) if is_captured else make_core(target_dir, head_dir, tree)
    assert core.runner.stepper.drafter
    ids = core.runner.stepper.drafter.head.token_map.target_ids.tolist()
    letters = [token for token in ids if token >= NUM_SPECIAL and text_of([token]).isalpha()]
    text = (text_of(letters) * 20)[:20].decode()
    (reply,) = run(core, [under(replace(GREEDY, max_new_tokens=20), Grammar("regex", text))])
    assert text_of(reply) == text.encode()
    metrics = core.current_metrics()
    assert metrics.num_accepted_tokens == 3 * metrics.num_drafts, "every draft was right, and the last reply token ended a step"


def test_a_reply_that_fails_is_given_up_alone(target_dir: Path, head_dir: Path) -> None:
    core = make_core(target_dir, head_dir, (3, 2, 6))
    match = match_of(COLOURS)
    core.submit("bad", PROMPTS[0], SETTINGS[0], match)
    core.submit("good", PROMPTS[3], SETTINGS[3], match_of(ANSWERS))
    tokens, failures = [], []
    while core.has_work:
        for event in core.step():
            if event.request_id == "good":
                tokens += event.tokens
            elif event.failure:
                failures.append(event.failure)
        match.failure = match.failure or "it took too long"
    assert failures == ["it took too long"]
    assert text_of(tokens[:-1]).startswith(b'{"ok": ')
    metrics = core.current_metrics()
    assert (metrics.num_finished, metrics.num_aborted) == (1, 1)


def test_what_comes_after_the_end_is_not_followed(target_dir: Path) -> None:
    core = make_core(target_dir)
    core.submit("a", PROMPTS[0], SamplingParams(temperature=0, regex="a*", max_new_tokens=2), match_of(Grammar("regex", "a*")))
    (first,) = core.step()
    assert first.tokens == list(tokens_of("a"))
    (last,) = core.scheduler.commit(core.scheduler.plan(), StepResult([], [[*tokens_of("ab")]], [1], [False]))
    assert (last.tokens, last.finish_reason) == ([*tokens_of("a")], {"type": "length", "length": 2})


def test_what_is_made_up_matches_nothing(target_dir: Path, head_dir: Path) -> None:
    core = make_core(target_dir, head_dir, (3, 2, 6), speculative_simulate_accept_length=2.0)
    with pytest.raises(ValueError, match="makes up what is accepted"):
        core.submit("a", PROMPTS[0], SETTINGS[0], match_of(COLOURS))


def test_tokens_of_sentencepiece() -> None:
    """Whose texts are written otherwise, and whose rarest are single bytes, as Llama 2's."""
    own = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"yesno", "▁no", "▁yes", "yes"]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(own))}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    info = tokenizer_info(tokenizer, len(vocab) + 5, [vocab["</s>"]])  # a few more in the model than have a text
    matcher = GrammarMatcher(GrammarCompiler(info).compile_regex("yes( no)*é"))
    reply = [vocab[token] for token in ("yes", "▁no", "▁", "n", "o", "<0xC3>", "<0xA9>")]
    assert all(matcher.accept_token(token) for token in reply)
    assert matcher.is_completed()
    assert tokenizer.decode(reply) == "yes no noé"


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    """With a process of its own."""
    made = Grammars(byte_tokenizer(), VOCAB_SIZE, frozenset([END]))
    yield made
    made.close()


def deep_schema(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + '{"type": "string"}' + "}" * depth


def test_what_is_compiled_elsewhere_matches_the_same(grammars: Grammars) -> None:
    for grammar in (COLOURS, NUMBERS, ANSWERS):
        there, here = grammars.match(grammars.compile(grammar).result()), match_of(grammar)
        for _ in range(12):
            assert np.array_equal(there.allowed(()), here.allowed(()))
            token = int(np.flatnonzero(here.allowed(()))[-1])
            there.follow([token])
            here.follow([token])
            if token == END:
                break
    assert grammars.compile(COLOURS) is grammars.compile(COLOURS), "it is kept"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "(a"), "regex is not possible: Regex parsing error at position 3: The parenthesis is not closed."),
        (Grammar("regex", "(?=a)b"), "Lookahead is not supported yet"),
        (Grammar("regex", "\x00"), "must not contain null"),
        (Grammar("json_schema", '{"type": "number'), "json_schema is not possible: Failed to parse JSON"),
        (Grammar("json_schema", '{"type": "nothing"}'), 'Unsupported type "nothing"'),
        (Grammar("json_schema", '{"$ref": "#/nowhere"}'), "json_schema is not possible: Cannot find field"),
    ],
    ids=lambda value: getattr(value, "text", None),
)
def test_what_is_wrong_with_a_grammar(grammars: Grammars, grammar: Grammar, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        grammars.compile(grammar).result()
    assert grammars.compile(grammar) is grammars.compile(grammar), "what is known to be wrong holds nobody up again"
    assert grammars.compile(COLOURS).result()


def test_a_process_that_has_ended_is_started_again() -> None:
    own = Grammars(byte_tokenizer(), VOCAB_SIZE, frozenset([END]))
    assert own.compile(COLOURS).result()
    assert own._process is not None
    own._process.kill()
    own._process.wait()
    with pytest.raises(RuntimeError, match="has ended with exit code -9: try again"):
        own.compile(NUMBERS).result()
    assert own.compile(NUMBERS).result()
    own.close()


def test_what_takes_too_long_is_given_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 1.0)
    own = Grammars(byte_tokenizer(), VOCAB_SIZE, frozenset([END]))
    endless, after = own.compile(Grammar("json_schema", deep_schema(1000))), own.compile(COLOURS)
    with pytest.raises(ValueError, match="compiling it takes more than 1 s, or more than 4 GiB: make it simpler"):
        endless.result()
    assert after.result()
    own.close()


def test_what_is_being_compiled_ends_with_the_engine() -> None:
    own = Grammars(byte_tokenizer(), VOCAB_SIZE, frozenset([END]))
    endless = own.compile(Grammar("json_schema", deep_schema(1000)))
    own.compile(COLOURS)
    while own._process is None:
        time.sleep(0.01)
    process = own._process
    own.close()
    assert process.wait(10) == -signal.SIGKILL
    assert endless.exception()


def test_without_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="names no token that ends a reply"):
        Grammars(byte_tokenizer(), VOCAB_SIZE, frozenset()).compile(COLOURS)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(INSTALL)):
        Grammars(byte_tokenizer(), VOCAB_SIZE, frozenset([END])).compile(COLOURS)


def test_nobody_waits_for_a_grammar(target_dir: Path) -> None:
    """But who wants it: others are answered meanwhile, and may give up what still waits."""
    core = make_core(target_dir)
    slow: Future[Any] = Future()
    assert core.grammars
    core.grammars.compile = lambda grammar: slow if grammar == ANSWERS else ready(compiled(grammar))
    reports: list[Report] = []

    def ends() -> set[str]:
        return {report.request_id for report in reports if isinstance(report, Rejected | TokenEvent) and is_end(report)}

    def commands() -> Iterator[list[Command]]:
        wanted = {"slow": SETTINGS[3], "given up": SETTINGS[3], "wrong": SETTINGS[3], "quick": SETTINGS[0], "free": SETTINGS[2]}
        yield [decode(encode(Submit(name, PROMPTS[0], setting))) for name, setting in wanted.items()]
        while not {"quick", "free"} <= ends():
            yield []
        assert ends() == {"quick", "free"}
        yield [Abort("given up")]
        assert ends() == {"quick", "free", "given up"}
        slow.set_result(compiled(ANSWERS))
        while not {"slow", "wrong"} <= ends():
            yield []
        yield [Shutdown()]

    script = commands()
    run_loop(core, lambda wait: next(script), reports.append)


def is_end(report: Rejected | TokenEvent) -> bool:
    return isinstance(report, Rejected) or report.finish_reason is not None


def ready(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_a_reply_that_fails_is_told(target_dir: Path) -> None:
    core, reports = make_core(target_dir), []
    assert core.grammars
    failing = match_of(COLOURS)
    failing.failure = "it takes too long"
    core.grammars.compile, core.grammars.match = lambda grammar: ready(compiled(grammar)), lambda compiled: failing
    script = [[Submit("a", PROMPTS[0], SETTINGS[0])]]
    run_loop(core, lambda wait: script.pop() if script else [Shutdown()] if wait else [], reports.append)
    assert [report for report in reports if isinstance(report, Rejected | TokenEvent)] == [Rejected("a", "it takes too long")]


def test_a_grammar_that_fails_is_told(target_dir: Path) -> None:
    core, reports = make_core(target_dir), []
    script = [[Submit("a", PROMPTS[0], under(GREEDY, Grammar("regex", "(a")))]]

    def receive(wait: bool) -> list[Command]:
        done = any(isinstance(report, Rejected) for report in reports)
        return script.pop() if script else [Shutdown()] if done else []

    run_loop(core, receive, reports.append)
    (rejected,) = [report for report in reports if isinstance(report, Rejected)]
    assert rejected.reason.startswith("regex is not possible: ")
