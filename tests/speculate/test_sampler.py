"""The target's choice: filters against transformers, draws against the distribution, with controls that must fail."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle_rt.speculate.sampler import SamplingBatch, filter_tokens, perturbed_logits, target_choice
from eagle_rt.tree.draft_tree import DraftTree
from eagle_rt.tree.verify import walk

NUM_DRAWS = 20_000
VOCAB_SIZE, MANY_TOKENS = 12, 16391


def sampling(seeds: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingBatch:
    count = len(seeds)
    return SamplingBatch(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        seeds=seeds,
        sampled=torch.arange(count if temperature else 0),
        has_filters=bool(top_k or top_p < 1 or min_p),
    )


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (1, 1.0, 0.0), (500, 0.3, 0.2), (20, 0.7, 0.1)]
)
def test_filters_equal_transformers(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(30, 200, generator=torch.Generator().manual_seed(0)) * 3
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    ones = torch.ones(30)
    found = filter_tokens(logits, (ones * top_k).long(), ones * top_p, ones * min_p)
    assert torch.equal(found, expected)


def test_greedy_is_argmax_and_mixes_with_sampling() -> None:
    logits = torch.randn(2, 3, 50)
    batch = sampling(torch.tensor([1, 2]), 1.0)
    mixed = SamplingBatch(torch.tensor([0.0, 1.0]), batch.top_k, batch.top_p, batch.min_p, batch.seeds, torch.tensor([1]), False)
    positions = torch.arange(3).expand(2, 3)
    choice = target_choice(logits, positions, mixed)
    assert torch.equal(choice[0], logits[0].argmax(-1))
    assert torch.equal(choice[1], target_choice(logits, positions, batch)[1])


# A fixed tree under every root: two children, and two children of the first one.
PARENTS = [-1, 0, 0, 1, 1]
TOKENS = [0, 3, 7, 1, 4]
NODE_LOGITS = torch.randn(len(PARENTS), VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 1.5


def draw_first_two_tokens(temperature: float, always_accept_first_child: bool = False, **filters: float) -> Tensor:
    """[NUM_DRAWS, 2] the first tokens that as many seeds emit; pairs that end after one token are padded with the draw of
    another step at the same position."""
    tree = DraftTree(
        *(torch.tensor([values]).expand(NUM_DRAWS, -1) for values in (TOKENS, PARENTS, [0, 1, 1, 2, 2])),
        torch.zeros(NUM_DRAWS, len(PARENTS)),
    )
    positions = 40 + tree.depths
    logits = NODE_LOGITS.expand(NUM_DRAWS, -1, -1)
    choice = target_choice(logits, positions, sampling(torch.arange(NUM_DRAWS) * 31 + 5, temperature, **filters))
    if always_accept_first_child:
        choice = choice.clone()
        choice[:, 0] = TOKENS[1]
    acceptance = walk(tree, choice, max_depth=2)
    second = torch.where(acceptance.num_accepted > 0, acceptance.tokens[:, 1], -1)
    return torch.stack((acceptance.tokens[:, 0], second), dim=1)


def p_value(pairs: Tensor, probabilities: Tensor) -> float:
    """Chi-square of the first tokens, and of the second ones after the first child, against the target's own distribution."""
    result = []
    after_first_child = pairs[pairs[:, 0] == TOKENS[1]][:, 1]
    for tokens, node in ((pairs[:, 0], 0), (after_first_child, 1)):
        expected = probabilities[node] * len(tokens)
        possible = expected > 0
        counts = torch.bincount(tokens, minlength=VOCAB_SIZE)
        if counts[~possible].any():
            return 0.0
        expected = expected[possible] / expected[possible].sum() * len(tokens)
        result.append(stats.chisquare(counts[possible].numpy(), expected.numpy(), sum_check=False).pvalue)
    return float(min(result))


FILTERS = [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_step_draws_from_the_target(temperature: float, filters: dict) -> None:
    scaled = NODE_LOGITS / temperature
    if filters:
        ones = torch.ones(len(scaled))
        scaled = filter_tokens(
            scaled, (ones * filters.get("top_k", 0)).long(), ones * filters.get("top_p", 1.0), ones * filters.get("min_p", 0.0)
        )
    pairs = draw_first_two_tokens(temperature, **filters)
    assert p_value(pairs, scaled.double().softmax(-1)) > 1e-3


def test_a_verifier_that_always_accepts_the_first_child_fails() -> None:
    pairs = draw_first_two_tokens(1.0, always_accept_first_child=True)
    assert p_value(pairs, NODE_LOGITS.double().softmax(-1)) < 1e-9


def test_a_draw_at_the_wrong_temperature_fails() -> None:
    pairs = draw_first_two_tokens(1.1)
    assert p_value(pairs, NODE_LOGITS.double().softmax(-1)) < 1e-3


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
@pytest.mark.parametrize(("margin", "top_k"), [(0.0, 0), (0.0, 30), (8.0, 0)])
def test_noise_that_cannot_matter_is_left_out(spread: float, margin: float, top_k: int) -> None:
    """Of flat and of steep logits: what is kept is as it would be, what is left out is further below the best than allowed."""
    generator = torch.Generator().manual_seed(int(spread))
    logits = (torch.randn(6, 2, MANY_TOKENS, generator=generator) * spread).bfloat16()
    temperature = 0.7
    batch = sampling(torch.tensor([1, 2, 2**62 + 3, -5, 7, 8]), temperature, top_k=top_k)
    positions = torch.arange(12).view(6, 2) * 1000
    tokens = torch.randperm(logits.shape[-1], generator=generator)
    whole = perturbed_logits(logits, positions, batch, tokens)
    found = perturbed_logits(logits, positions, batch, tokens, margin)
    is_left_out = found == -torch.inf
    assert torch.equal(found[~is_left_out], whole[~is_left_out])
    assert (whole < whole.amax(-1, keepdim=True) - margin / temperature)[is_left_out].all()
    assert torch.equal(found.argmax(-1), whole.argmax(-1))
    assert margin or is_left_out.float().mean() > 0.98


@settings(max_examples=150, deadline=None)
@given(
    num_tokens=st.one_of(st.integers(1, 40), st.integers(200, 3000), st.just(MANY_TOKENS)),
    spread=st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    temperature=st.sampled_from([1e-6, 0.3, 1.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 300, 20_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.001, 0.31, 0.77, 0.95, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.04, 0.6]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    seed=st.integers(0, 10_000),
)
def test_filters_of_many_tokens_keep_what_their_twin_keeps(
    num_tokens: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, dtype: torch.dtype, seed: int
) -> None:
    """But where rounding decides, and the token that is drawn is the same."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(3, 1, num_tokens, generator=generator) * spread).to(dtype)
    batch = sampling(torch.arange(3) + seed, temperature, top_k, top_p, min_p)
    positions, tokens = torch.arange(3)[:, None], torch.arange(num_tokens)
    whole = perturbed_logits(logits, positions, batch, tokens)[:, 0]
    found = perturbed_logits(logits, positions, batch, tokens, margin=1e30)[:, 0]
    is_kept, is_expected = found > -torch.inf, whole > -torch.inf
    assert torch.equal(found[is_kept & is_expected], whole[is_kept & is_expected])
    choice = target_choice(logits, positions, batch)[:, 0]
    for row in range(3):
        if torch.equal(is_kept[row], is_expected[row]):
            assert choice[row] == whole[row].argmax()
        else:
            scaled = logits[row, 0].float() / temperature
            powers = torch.where(in_top_k(scaled, top_k), (scaled - scaled.max()).double().exp(), 0.0)
            parted = scaled[is_kept[row] != is_expected[row]]
            above = torch.stack([powers[scaled > value].sum() for value in parted.unique()]) / powers.sum()
            up_to = torch.stack([powers[scaled >= value].sum() for value in parted.unique()]) / powers.sum()
            assert ((above < top_p + 1e-4) & (up_to > top_p - 1e-4)).any()


def in_top_k(scaled: Tensor, top_k: int) -> Tensor:
    return scaled >= scaled.sort(descending=True).values[min(top_k or len(scaled), len(scaled)) - 1]


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_a_draw_from_many_tokens_is_that_of_its_twin(spread: float) -> None:
    """Beside a greedy sequence, whose choice is its best token."""
    generator = torch.Generator().manual_seed(int(spread))
    logits = (torch.randn(9, 3, MANY_TOKENS, generator=generator) * spread).bfloat16()
    batch = sampling(torch.arange(9) * 2**40 + 11, 0.7)
    temperature = torch.tensor([0.7, 1.0, 0.0, 1e-6, 100.0, 0.3, 1.0, 1.0, 1.0])
    batch = replace(batch, temperature=temperature, sampled=torch.nonzero(temperature)[:, 0])
    positions = torch.arange(27).view(9, 3) * 1000
    found = target_choice(logits, positions, batch)
    whole = perturbed_logits(logits, positions, batch, torch.arange(logits.shape[-1])).argmax(-1)
    assert torch.equal(found[batch.sampled], whole)
    assert torch.equal(found[2], logits[2].argmax(-1))


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_rows_without_numbers_draw_something(odd: float) -> None:
    logits = torch.zeros(1, 2, MANY_TOKENS)
    logits[0, 0] = odd
    logits[0, 1, 5] = odd
    batch, positions = sampling(torch.tensor([1]), 1.0), torch.zeros(1, 2, dtype=torch.int64)
    choice = target_choice(logits, positions, batch)
    assert ((choice >= 0) & (choice < MANY_TOKENS)).all()
    assert (choice[0, 1] == 5) == (odd == torch.inf or odd != odd)
    kept = perturbed_logits(logits, positions, batch, torch.arange(MANY_TOKENS), 0.0)
    assert kept[0, 1].argmax() == choice[0, 1]
