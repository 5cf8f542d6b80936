"""How a captured step begins and ends, in Triton kernels against torch: interpreted on a CPU, natively on a GPU."""

from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_rt.engine import graphs
from eagle_rt.engine.graphs import GraphLimits, StepInputs
from eagle_rt.kernels.triton import begin_step, finish_step
from eagle_rt.speculate import sequences
from eagle_rt.speculate.sequences import scratch_rows
from eagle_rt.speculate.step import StepOutcome
from eagle_rt.tree.draft_tree import DraftTree
from eagle_rt.tree.verify import Acceptance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PADDING = 7


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    num_scratch=st.sampled_from([1, 6, 32]),
    page_size=st.sampled_from([1, 16]),
    seed=st.integers(0, 99),
)
def test_begin_step(lengths: list[int], num_scratch: int, page_size: int, seed: int) -> None:
    num_cached, num_pages = torch.tensor(lengths, device=DEVICE), -(-80 // page_size)
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randint(0, 2**31 - 1, (len(lengths), num_pages), generator=generator, dtype=torch.int32).to(DEVICE)
    with patch.object(sequences, "triton_kernel", lambda name, x: begin_step.begin_step):
        cache, slots = scratch_rows(num_cached, pages, page_size, num_scratch)
    with patch.object(sequences, "triton_kernel", lambda name, x: None):
        expected_cache, expected_slots = scratch_rows(num_cached, pages, page_size, num_scratch)
    assert equal(cache.kv_lens, expected_cache.kv_lens)
    assert equal(slots, expected_slots)
    assert cache.visible(num_scratch).kv_lens.tolist() == [length + num_scratch for length in lengths]
    assert slots[0, -1] % page_size == (lengths[0] + num_scratch - 1) % page_size


@settings(max_examples=20, deadline=None)
@given(accepted=st.lists(st.integers(0, 3), min_size=1, max_size=3), num_nodes=st.integers(1, 6), seed=st.integers(0, 99))
def test_finish_step(accepted: list[int], num_nodes: int, seed: int) -> None:
    """Rows of padding stay as they are, and trees of one node have no draft that could be broken."""
    generator = torch.Generator().manual_seed(seed)
    batch_size = len(accepted)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator).to(DEVICE)

    scores = torch.where(numbers(2, batch_size, num_nodes) > 0, -torch.inf, -1.0)
    tree = DraftTree(*(numbers(9, batch_size, num_nodes) for _ in range(3)), scores)
    acceptance = Acceptance(numbers(9, batch_size, 4), torch.tensor(accepted, device=DEVICE), numbers(99, batch_size, 4))
    outcome = StepOutcome(tree, acceptance, torch.zeros(0), has_head=True)
    integers, is_padding = numbers(50, 5, batch_size), numbers(2, batch_size) > 0
    integers[2] = torch.where(is_padding, PADDING, integers[2] + PADDING + 1)

    results = []
    for kernel in (finish_step.finish_step, None):
        inputs = StepInputs(batch_size, GraphLimits(16, 4, 6, 0, PADDING), DEVICE, None)
        inputs._integers.copy_(integers)
        with patch.object(graphs, "triton_kernel", lambda name, x, kernel=kernel: kernel):
            results.append((inputs.advance(outcome), inputs._integers))
    (rows, after), (expected_rows, expected_after) = results
    assert equal(rows, expected_rows)
    assert equal(after, expected_after)
    assert equal(after[:, is_padding], integers[:, is_padding])
    assert equal(after[1] - integers[1], torch.where(is_padding, 0, acceptance.num_emitted))


def equal(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)
