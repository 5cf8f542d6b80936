"""Drafting under the target's own noise: it accepts more and changes nothing."""

from pathlib import Path

import pytest
import torch
from engines import make_core
from scipy import stats
from torch import Tensor

from eagle_rt.engine.core import run_to_end
from eagle_rt.engine.params import SamplingParams
from eagle_rt.kernels.noise import gumbel_noise
from eagle_rt.models.tokenizer import load_tokenizer, question_tokens
from eagle_rt.speculate.sampler import DRAFT_MARGIN, SamplingBatch, coupled_logits, target_choice

NUM_DRAWS, VOCAB_SIZE = 20_000, 12


def sampling(temperatures: list[float], seeds: Tensor, top_k: int = 0) -> SamplingBatch:
    temperature = torch.tensor(temperatures)
    ones = torch.ones(len(temperature))
    sampled = torch.nonzero(temperature > 0)[:, 0]
    return SamplingBatch(temperature, (ones * top_k).long(), ones, ones * 0, seeds, sampled, top_k > 0)


def test_a_head_that_knows_the_targets_logits_foresees_its_draw() -> None:
    """Whatever order its draft vocabulary has; greedy sequences beside sampled ones keep their logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 40, generator=generator)
    positions = torch.arange(15).view(3, 5)
    order = torch.randperm(40, generator=generator)
    for top_k in (0, 7):
        batch = sampling([1.0, 0.0, 0.6], torch.tensor([1, 2, 2**62 + 3]), top_k)
        drafted = coupled_logits(logits[..., order], positions, batch, order)
        assert torch.equal(order[drafted.argmax(-1)], target_choice(logits, positions, batch))
        assert torch.equal(drafted[1], logits[1][:, order])
    greedy = sampling([0.0, 0.0, 0.0], torch.arange(3))
    assert coupled_logits(logits, positions, greedy, torch.arange(40)) is logits


def test_noise_is_added_in_the_heads_own_unit() -> None:
    """The lead of a guess over another is that of its logits plus the temperature times that of the noise."""
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(2))
    positions, ids = torch.arange(6).view(3, 2), torch.arange(50)
    temperatures, seeds = [0.5, 1.0, 3.0], torch.tensor([3, 4, 5])
    found = coupled_logits(logits, positions, sampling(temperatures, seeds), ids)
    for own, temperature, seed, places, expected in zip(found, temperatures, seeds, positions, logits, strict=True):
        noise = gumbel_noise(seed.repeat(2), places, ids)
        whole = expected + temperature * noise
        kept = own > -torch.inf
        torch.testing.assert_close(own[kept], whole[kept])
        assert (whole < whole.amax(-1, keepdim=True) - DRAFT_MARGIN)[~kept].all()


def test_a_coupled_draft_leaves_the_distribution_alone() -> None:
    """Draft and choice share their noise, and still the choice is an exact draw; a verifier that favours the draft is not."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 1, VOCAB_SIZE, generator=generator).expand(NUM_DRAWS, 1, VOCAB_SIZE)
    draft_logits = logits + 0.5 * torch.randn(1, 1, VOCAB_SIZE, generator=generator)
    positions = torch.full((NUM_DRAWS, 1), 9)
    batch = sampling([1.0] * NUM_DRAWS, torch.arange(NUM_DRAWS) * 17)
    choice = target_choice(logits, positions, batch)[:, 0]
    draft = coupled_logits(draft_logits, positions, batch, torch.arange(VOCAB_SIZE)).argmax(-1)[:, 0]
    expected = logits[0, 0].double().softmax(-1) * NUM_DRAWS

    def p_value(tokens: Tensor) -> float:
        return float(stats.chisquare(tokens.bincount(minlength=VOCAB_SIZE).numpy(), expected.numpy(), sum_check=False).pvalue)

    uncoupled = draft_logits[:, 0].argmax(-1)
    assert (draft == choice).sum() > 1.5 * (uncoupled == choice).sum()
    assert p_value(choice) > 1e-3
    is_likely = logits[0, 0].softmax(-1)[draft] > 0.1
    assert p_value(torch.where(is_likely, draft, choice)) < 1e-9
    assert p_value(draft) < 1e-9


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 30}], ids=["plain", "filtered"])
def test_it_accepts_more_and_changes_no_token(built_in: Path, filters: dict) -> None:
    """On the trained pair, with a greedy request in the same batch."""
    tokenizer = load_tokenizer(built_in / "target", trust_remote_code=False)
    questions = ("Tom has 3 apples and buys 4 more.", "Tell me a story about a fox.", "Add 17 and 25.", "Write a haiku.")
    prompts = [question_tokens(tokenizer, question) for question in questions]
    params = [SamplingParams(temperature=1.0, seed=index, max_new_tokens=48, **filters) for index in range(3)]
    params.append(SamplingParams(temperature=0, max_new_tokens=48))
    plain = run_to_end(make_core(built_in / "target"), prompts, params)
    accepted = {}
    for coupling in ("auto", "off"):
        core = make_core(built_in / "target", built_in / "eagle3", (5, 4, 16), speculative_coupling=coupling)
        assert run_to_end(core, prompts, params) == plain
        accepted[coupling] = core.current_metrics().mean_accepted_tokens
    assert accepted["auto"] > 1.15 * accepted["off"]
