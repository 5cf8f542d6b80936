"""What may follow a text, against what is found without a matcher."""

import time

import numpy as np
import pytest
import torch
from family_configs import VOCAB_SIZE
from hypothesis import given, settings
from hypothesis import strategies as st
from matching import COLOURS, END, GRAMMARS, INFO, NUM_SPECIAL, NUMBERS, allowed_by, match_of, tokens_of
from xgrammar import GrammarCompiler, GrammarMatcher

from eagle_rt.engine.params import Grammar
from eagle_rt.speculate import grammar_match
from eagle_rt.speculate.grammar_masks import GrammarMasks
from eagle_rt.speculate.grammar_match import GrammarMatch
from eagle_rt.token_map.token_map import TokenMap


@st.composite
def texts(draw: st.DrawFn, grammar: Grammar) -> tuple[int, ...]:
    """Tokens that match so far; in the end they may end."""
    allowed, tokens = allowed_by(grammar), ()
    for _ in range(draw(st.integers(0, 30))):
        token = draw(st.sampled_from(sorted(allowed(tokens) - {END})))
        tokens = (*tokens, token)
        if not allowed(tokens) - {END}:
            break
    return tokens


def found(match: GrammarMatch, path: tuple[int, ...] = ()) -> frozenset[int]:
    return frozenset(np.flatnonzero(match.allowed(path)).tolist())


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.text[:12])
def test_what_may_follow(grammar: Grammar) -> None:
    """The text, or the text and a path; looking at paths changes nothing."""
    allowed = allowed_by(grammar)

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        tokens = data.draw(texts(grammar))
        match, start = match_of(grammar), 0
        for stop in sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=4)) | {len(tokens)}):
            match.follow(tokens[start:stop])
            start = stop
            paths = data.draw(st.lists(st.integers(0, len(tokens) - stop), max_size=4))
            for length in [*paths, 0]:
                assert found(match, tokens[stop : stop + length]) == allowed(tokens[: stop + length])
        assert match.failure is None

    check()


def test_nothing_is_ruled_out_where_nothing_can_be() -> None:
    """On paths that are ruled out themselves, and after the end."""
    match = match_of(COLOURS)
    every = frozenset(range(VOCAB_SIZE))
    assert found(match, tokens_of("x")) == found(match, tokens_of("rex")) == found(match, (END,)) == every
    assert found(match, (*tokens_of("red"), END)) == found(match, (*tokens_of("red"), END, END)) == every
    assert found(match, tokens_of("re")) == set(tokens_of("d"))
    match.follow([*tokens_of("red"), END])
    assert found(match) == every
    assert match.failure is None


def test_special_tokens_are_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    """On a path there may be some, of which xgrammar would complain aloud."""
    match = match_of(Grammar("regex", ".*"))
    assert found(match) & set(range(NUM_SPECIAL)) == {END}
    assert found(match, (4,)) == frozenset(range(VOCAB_SIZE))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("tokens", [tokens_of("reddish"), (*tokens_of("re"), END), (4,)], ids=["text", "end", "special"])
def test_what_does_not_match_fails(tokens: tuple[int, ...]) -> None:
    """A broken target may choose what it must not."""
    match = match_of(COLOURS)
    match.follow(tokens)
    assert match.failure
    assert found(match) == found(match, tokens_of("red")) == {END}
    match.follow(tokens_of("red"))


def test_where_a_grammar_leads_nowhere_the_reply_ends() -> None:
    nowhere = GrammarCompiler(INFO).compile_grammar('root ::= "a" more\nmore ::= more "b"')
    match = GrammarMatch(GrammarMatcher(nowhere), VOCAB_SIZE, frozenset())
    assert found(match) == set(tokens_of("a"))
    match.follow(tokens_of("a"))
    assert found(match) == {END}
    assert match.failure is None
    match.follow([END])
    assert match.failure == "the reply does not match its grammar any more after 1 tokens"


def test_what_takes_ever_longer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_match, "SLOW_SECONDS", 0.005)
    match, start = match_of(Grammar("regex", "((a*)*b?)*")), time.monotonic()
    while match.failure is None and time.monotonic() < start + 20:
        match.follow(tokens_of("a"))
    assert "is ambiguous" in (match.failure or "")
    assert found(match) == {END}


def rows_allowed(logits: torch.Tensor) -> list[set[int]]:
    return [set(torch.isfinite(row).nonzero()[:, 0].tolist()) for row in logits]


def test_logits_lose_what_is_ruled_out() -> None:
    """Of every sequence's own nodes; those of no grammar are left alone, to the bit."""
    matches = [match_of(COLOURS), None, match_of(NUMBERS)]
    matches[0].follow(tokens_of("green"))
    logits = torch.randn(5, VOCAB_SIZE, dtype=torch.bfloat16)
    owners, path = torch.tensor([0, 0, 1, 2, 2]), tokens_of(" a")
    paths = torch.tensor([[-1, -1], path, path, [tokens_of("7")[0], -1], [-1, *tokens_of("-")]])
    masked = GrammarMasks(matches).applied_to(logits, owners, paths)
    expected = [
        allowed_by(COLOURS)(tokens_of("green")),
        allowed_by(COLOURS)(tokens_of("green a")),
        set(range(VOCAB_SIZE)),
        allowed_by(NUMBERS)(tokens_of("7")),
        allowed_by(NUMBERS)(tokens_of("-")),
    ]
    assert rows_allowed(masked) == expected
    assert torch.equal(masked[torch.isfinite(masked)], logits[torch.isfinite(masked)])
    one_each = GrammarMasks(matches).applied_to(logits[:3])
    assert rows_allowed(one_each) == [expected[0], set(range(VOCAB_SIZE)), allowed_by(NUMBERS)(())]
    assert GrammarMasks([None] * 5).applied_to(logits) is logits


def test_drafts_lose_the_same_unless_nothing_is_left() -> None:
    draft_ids = torch.tensor([*tokens_of("dg+"), END])
    match = match_of(COLOURS)
    paths = torch.tensor([tokens_of("re"), tokens_of("b" + "l")])
    logits = torch.zeros(2, 4)
    masked = GrammarMasks([match]).applied_to(logits, torch.tensor([0, 0]), paths, TokenMap(draft_ids))
    assert rows_allowed(masked) == [{0}, {0, 1, 2, 3}], "u, which would have to follow, can't be drafted"
