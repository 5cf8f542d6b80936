"""Penalties and biases against transformers and a loop over tokens, and whole engines that use them in every way of stepping."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import Tree, make_core, random_prompts, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.prepare import penalties_of
from eagle_rt.engine.request import Request
from eagle_rt.speculate.penalty_tables import penalty_tables
from eagle_rt.token_map.token_map import TokenMap

VOCAB_SIZE = 12
TOKENS, DRAFT_IDS = st.integers(0, VOCAB_SIZE - 1), torch.tensor([7, 2, 11, 3, 0])
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3}
GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    biased = draw(st.lists(TOKENS, unique=True, max_size=3))
    setting = SamplingParams(
        frequency_penalty=draw(st.sampled_from([0.0, -0.5, 1.25])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.8, 1.5])),
        logit_bias=tuple((token, draw(st.sampled_from([-100.0, 3.5]))) for token in biased),
    )
    request = Request("a", draw(st.lists(TOKENS, min_size=1, max_size=6)), setting, seed=0)
    request.tokens += draw(st.lists(TOKENS, max_size=6))
    return request


def one_by_one(logits: list[float], request: Request, path: list[int]) -> list[float]:
    """What becomes of a row, token by token."""
    setting, text = request.sampling, [*request.tokens, *path]
    reply, changed = text[request.num_prompt_tokens :], []
    for token, logit in enumerate(logits):
        if token in text:
            logit = logit / setting.repetition_penalty if logit > 0 else logit * setting.repetition_penalty
        logit -= setting.frequency_penalty * reply.count(token) + setting.presence_penalty * (token in reply)
        changed.append(logit + dict(setting.logit_bias).get(token, 0.0))
    return changed


@settings(max_examples=80, deadline=None)
@given(
    own=st.lists(requests(), min_size=1, max_size=3),
    paths=st.lists(st.tuples(st.integers(0, 2), st.lists(TOKENS, max_size=3)), min_size=1, max_size=5),
)
def test_rows_are_changed_token_by_token(own: list[Request], paths: list[tuple[int, list[int]]]) -> None:
    """Also those of a draft vocabulary, which is not in the target's order."""
    logits = torch.randn(len(paths), VOCAB_SIZE, generator=torch.Generator().manual_seed(len(paths)))
    owners = [owner % len(own) for owner, _ in paths]
    padded = torch.tensor([[*path, *[-1] * (3 - len(path))] for _, path in paths])
    rows = zip(logits.tolist(), owners, paths, strict=True)
    expected = torch.tensor([one_by_one(row, own[owner], path) for row, owner, (_, path) in rows])
    penalties = penalties_of(own, "cpu")
    torch.testing.assert_close(penalties.applied_to(logits, torch.tensor(owners), padded), expected)
    drafted = penalties.applied_to(logits[:, DRAFT_IDS], torch.tensor(owners), padded, TokenMap(DRAFT_IDS))
    torch.testing.assert_close(drafted, expected[:, DRAFT_IDS])


@given(own=requests(), num_back=st.integers(0, 6))
def test_it_is_the_same_whatever_of_a_text_is_a_path(own: Request, num_back: int) -> None:
    """Bit by bit, so that a tree writes what plain decoding writes."""
    shorter = Request("a", own.tokens[: own.num_prompt_tokens], own.sampling, seed=0)
    num_path = min(num_back, own.num_output_tokens)
    shorter.tokens = own.tokens[: len(own.tokens) - num_path]
    logits, owner = torch.randn(1, VOCAB_SIZE), torch.tensor([0])
    whole = penalties_of([own], "cpu").applied_to(logits, owner)
    path = torch.tensor([own.tokens[len(own.tokens) - num_path :]], dtype=torch.int64).reshape(1, num_path)
    assert torch.equal(penalties_of([shorter], "cpu").applied_to(logits, owner, path), whole)


@settings(max_examples=80, deadline=None)
@given(own=st.lists(requests(), min_size=1, max_size=3), num_rows=st.integers(1, 3), data=st.data())
def test_tables_change_what_lists_of_tokens_do(own: list[Request], num_rows: int, data: st.DataObject) -> None:
    """Bit by bit, also once they have counted what replies have said since, and for whom there is no request."""
    tables = penalty_tables(4, VOCAB_SIZE, "cpu").first(len(own) + 1)
    tables.fill(penalties_of([*own, own[0]], "cpu"))
    tables.fill(penalties_of(own, "cpu"))
    said = [data.draw(st.lists(TOKENS, max_size=3)) for _ in own]
    tokens = torch.tensor([[*more, *[1] * (3 - len(more))] for more in [*said, []]])
    tables.count(tokens, torch.arange(3) < torch.tensor([[len(more)] for more in [*said, []]]))
    for request, more in zip(own, said, strict=True):
        request.tokens += more

    owners = torch.arange(len(own) + 1).repeat_interleave(num_rows)
    paths = [data.draw(st.lists(TOKENS, max_size=3)) for _ in owners]
    padded = torch.tensor([[*path, *[-1] * (3 - len(path))] for path in paths])
    logits = torch.randn(len(owners), VOCAB_SIZE, generator=torch.Generator().manual_seed(num_rows))
    num_own = len(own) * num_rows
    twin = penalties_of(own, "cpu")
    for columns, token_map in ((torch.arange(VOCAB_SIZE), None), (DRAFT_IDS, TokenMap(DRAFT_IDS))):
        found = tables.applied_to(logits[:, columns], owners, padded, token_map)
        expected = twin.applied_to(logits[:num_own, columns], owners[:num_own], padded[:num_own], token_map)
        assert torch.equal(found[:num_own], expected)
        assert torch.equal(found[num_own:], logits[num_own:, columns])


def test_repetition_penalty_is_that_of_transformers() -> None:
    request = Request("a", [3, 5, 3], replace(GREEDY, repetition_penalty=1.3), seed=0)
    request.tokens += [7, 5]
    logits = torch.randn(1, VOCAB_SIZE)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([request.tokens]), logits.clone())
    assert torch.equal(penalties_of([request], "cpu").applied_to(logits, torch.tensor([0])), expected)


class OpenAIPenalties(LogitsProcessor):
    """Of one text."""

    def __init__(self, num_prompt_tokens: int, setting: SamplingParams) -> None:
        self._num_prompt_tokens, self._setting = num_prompt_tokens, setting

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self._num_prompt_tokens :], minlength=scores.shape[1])
        penalty = self._setting.frequency_penalty * counts + self._setting.presence_penalty * (counts > 0)
        for token, bias in self._setting.logit_bias:
            penalty[token] -= bias
        return scores - penalty


@pytest.mark.parametrize("penalties", [PENALTIES, {"frequency_penalty": 1.5}, {"repetition_penalty": 1.2}], ids=str)
def test_greedy_text_is_transformers(target_dir: Path, head_dir: Path, penalties: dict) -> None:
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    prompts, setting = random_prompts(4), replace(GREEDY, **penalties, logit_bias=((65, 1.0), (66, -100.0)))
    expected = []
    for prompt in prompts:
        own = LogitsProcessorList([OpenAIPenalties(len(prompt), setting)])
        tokens = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=setting.repetition_penalty,
            logits_processor=own,
        )
        expected.append(tokens[0, len(prompt) :].tolist())
    assert expected != run(make_core(target_dir), prompts, GREEDY)
    for tree in (None, (3, 1, 4), (5, 4, 16)):
        assert run(make_core(target_dir, head_dir, tree), prompts, setting) == expected
    assert run(make_core(target_dir, head_dir, (5, 4, 16), speculative_tree="adaptive"), prompts, setting) == expected


MIXED = [
    SamplingParams(temperature=temperature, seed=seed, max_new_tokens=20, ignore_eos=True, **own)
    for seed, (temperature, own) in enumerate(
        [(1.0, PENALTIES), (0.7, {}), (0.0, {}), (0.6, {"top_p": 0.9, "presence_penalty": 2.0}), (0.0, PENALTIES)]
    )
]


@pytest.mark.parametrize(("tree", "small_pool"), [((1, 1, 2), 80), ((3, 1, 4), 80), ((5, 4, 16), 80), ((8, 10, 60), 192)], ids=str)
@pytest.mark.parametrize("is_preempted", [False, True])
def test_text_does_not_depend_on_the_tree(
    target_dir: Path, head_dir: Path, tree: Tree, small_pool: int, is_preempted: bool
) -> None:
    """Nor those of others on penalties."""
    options = {"max_total_tokens": small_pool, "context_length": 48, "page_size": 4} if is_preempted else {}
    prompts = random_prompts(len(MIXED), seed=3, longest=20)
    expected = [run(make_core(target_dir), [prompt], setting)[0] for prompt, setting in zip(prompts, MIXED, strict=True)]
    core = make_core(target_dir, head_dir, tree, **options)
    assert run(core, prompts, MIXED) == expected
    assert (core.scheduler.num_preemptions > 0) == is_preempted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_ranked_after_penalties(target_dir: Path, head_dir: Path, temperature: float) -> None:
    """A token that must follow is drafted, though the head would never think of it."""
    core = make_core(target_dir, head_dir, (3, 1, 4))
    setting = replace(GREEDY, temperature=temperature, seed=1, logit_bias=((65, 100.0),))
    assert run(core, random_prompts(1), setting) == [[65] * 24]
    assert core.current_metrics().mean_accepted_tokens > 3.5


def test_a_bias_outside_the_vocabulary_is_refused(target_dir: Path) -> None:
    core = make_core(target_dir)
    with pytest.raises(ValueError, match="logit_bias has token 9999, which is outside the vocabulary of 262"):
        core.submit("a", [7], replace(GREEDY, logit_bias=((9999, 1.0),)))
