"""Made-up acceptance: as long as asked for, along paths of the tree, and never by accident."""

from pathlib import Path

import pytest
import torch
from engines import make_config, make_core, random_prompts, run

from eagle_rt.engine.build import build_core
from eagle_rt.engine.load import model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.text import Reply
from eagle_rt.resolve import unused_options
from eagle_rt.server.prometheus import EngineCollector
from eagle_rt.speculate.simulate import simulated_walk
from eagle_rt.tree.draft_tree import DraftTree

PARENTS = torch.tensor([[-1, 0, 0, 1, 2, 4, 5]])
DEPTHS = torch.tensor([[0, 1, 1, 2, 2, 3, 4]])


@pytest.mark.parametrize(("length", "lengths"), [(1.0, {1}), (2.0, {2}), (2.4, {2, 3}), (4.0, {4}), (5.0, {5})])
def test_the_path_is_one_of_the_trees(length: float, lengths: set[int]) -> None:
    torch.manual_seed(0)
    batch_size = 300
    tokens = torch.arange(7).expand(batch_size, -1) + 10
    tree = DraftTree(tokens, PARENTS.expand(batch_size, -1), DEPTHS.expand(batch_size, -1), torch.zeros(batch_size, 7))
    choice = tokens + 90
    kept = simulated_walk(tree, choice, 4, length)
    assert set(kept.num_emitted.tolist()) == lengths
    assert kept.num_emitted.double().mean() == pytest.approx(length, abs=0.1)
    for path, count, chosen in zip(kept.path.tolist(), kept.num_accepted.tolist(), kept.tokens.tolist(), strict=True):
        nodes = path[: count + 1]
        assert path[count + 1 :] == [-1] * (4 - count)
        assert nodes[0] == 0
        assert [int(PARENTS[0, node]) for node in nodes[1:]] == nodes[:-1]
        assert chosen[: count + 1] == [10 + node for node in nodes[1:]] + [100 + nodes[-1]]


def test_a_tree_that_is_not_so_deep_gives_what_it_has() -> None:
    tree = DraftTree(torch.zeros(2, 3).long(), torch.tensor([[-1, 0, 0]] * 2), torch.tensor([[0, 1, 1]] * 2), torch.zeros(2, 3))
    assert simulated_walk(tree, tree.tokens, 2, 3.0).num_accepted.tolist() == [1, 1]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_engine_gains_what_it_was_told_to_and_says_so(target_dir: Path, head_dir: Path, backend: str) -> None:
    torch.manual_seed(0)
    count = 120 if backend == "torch" else 12
    config = make_config(target_dir, head_dir, (3, 2, 8), speculative_simulate_accept_length=2.5, attention_backend=backend)
    core, notes = build_core(config, model_info(config))
    assert any("SIMULATED" in note and "2.5" in note for note in notes)
    texts = run(core, random_prompts(2, longest=8), SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True))
    assert [len(text) for text in texts] == [count, count]
    metrics = core.current_metrics()
    assert metrics.mean_accepted_tokens == pytest.approx(2.5, abs=0.2 if backend == "torch" else 0.8)
    assert metrics.is_simulated
    samples = {sample.name: sample.value for metric in EngineCollector(lambda: metrics).collect() for sample in metric.samples}
    assert samples["eagle_rt:spec_decode_simulated"] == 1


def test_it_is_off_unless_asked_for(target_dir: Path, head_dir: Path) -> None:
    core = make_core(target_dir, head_dir, (3, 2, 8))
    core.submit("a", [1, 2], SamplingParams(max_new_tokens=1))
    (event,) = [event for _ in range(2) for event in core.step()]
    assert not event.stats.is_simulated
    assert not core.current_metrics().is_simulated
    plain = make_config(target_dir, speculative_simulate_accept_length=2.0)
    core, notes = build_core(plain, model_info(plain))
    assert not core.runner.stepper.simulates
    assert not any("SIMULATED" in note for note in notes)
    assert any("nothing is drafted" in line for line in unused_options(plain))


@pytest.mark.parametrize("length", [0.5, 4.5, float("nan")])
def test_what_no_step_can_gain_is_refused(target_dir: Path, head_dir: Path, length: float) -> None:
    with pytest.raises(ValueError, match=f"is {length}, but a step of the tree .* gains between 1 and 4 tokens"):
        make_core(target_dir, head_dir, (3, 2, 8), speculative_simulate_accept_length=length)


def test_meta_info_says_it(target_dir: Path, head_dir: Path) -> None:
    core = make_core(target_dir, head_dir, (3, 2, 8), speculative_simulate_accept_length=2.0)
    core.submit("a", [1, 2], SamplingParams(max_new_tokens=1, ignore_eos=True))
    (event,) = [event for _ in range(2) for event in core.step()]
    reply = Reply(model_info(make_config(target_dir)).tokenizer, SamplingParams(), [8, 9])
    reply.push(event)
    assert reply.meta_info()["spec_simulated"] is True
