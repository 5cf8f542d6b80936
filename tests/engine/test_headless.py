"""Steps without a head: what texts repeat gains tokens, and changes none."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_core, random_prompts, run
from step_costs import costs

from eagle_rt.engine import calibrate
from eagle_rt.engine.calibrate import measured_costs
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SamplingParams, SpeculativeParams
from eagle_rt.speculate import copies, copy_policy
from eagle_rt.speculate.copy_policy import Copying, CopyStep, FixedCopies, PayingCopies
from eagle_rt.speculate.host_verifier import Confirmed, HostOutcome
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape

GREEDY = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
SETTINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=1, max_new_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.2, seed=2, top_k=5, repetition_penalty=1.1, max_new_tokens=60, ignore_eos=True),
]


@pytest.fixture(autouse=True)
def time_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for copies is never left out, as it is beside short steps where nothing came of it."""
    for name in ("MOST_AHEAD", "MOST_EARNED"):
        monkeypatch.setattr(copies, name, 1e9)


def copying(target_dir: Path, **options: Any) -> EngineCore:
    return make_core(target_dir, speculative_algorithm="NGRAM", **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative_tree": "adaptive"},
        {"page_size": 1, "attention_backend": "torch"},
        {"chunked_prefill_size": 8, "page_size": 4, "max_total_tokens": 280},  # of which someone has to give way
    ],
    ids=str,
)
def test_no_text_is_changed_and_fewer_steps_are_made(target_dir: Path, options: dict[str, Any]) -> None:
    prompts = [[5, 6, 7, 8] * 10, *random_prompts(4, seed=1), [9] * 30]
    settings = SETTINGS * 2
    core = copying(target_dir, max_running_requests=4, **options)
    assert run(core, prompts, settings) == run(make_core(target_dir, max_running_requests=4), prompts, settings)
    if "speculative_tree" not in options:  # what pays is decided by the clock
        assert core.current_metrics().num_accepted_tokens > 20
    if "max_total_tokens" in options:
        assert core.scheduler.num_preemptions > 0
    assert not core.runner.headless.copying.book._texts  # nobody is left


def test_a_request_may_want_less_or_nothing(target_dir: Path) -> None:
    """And is told of what was copied."""
    core, told = copying(target_dir, speculative_num_draft_tokens=9), {}
    wanted = [SpeculativeParams(trace=True), SpeculativeParams(trace=True, num_draft_tokens=3)]
    wanted.append(SpeculativeParams(trace=True, enabled=False))
    for index, speculative in enumerate(wanted):
        core.submit(str(index), [5, 6, 7, 8] * 10, replace(GREEDY, speculative=speculative))
    while core.has_work:
        for event in core.step():
            if event.trace:
                told.setdefault(event.request_id, []).append(event.trace)
    sizes = {name: max(len(trace.tokens) for trace in traces) for name, traces in told.items()}
    assert sizes == {"0": 9, "1": 3, "2": 1}
    assert any(len(trace.path) > 1 for trace in told["0"])
    for trace in told["0"]:
        assert trace.parents == list(range(-1, len(trace.tokens) - 1))
        assert trace.copied == list(range(1, len(trace.tokens)))
        assert len(trace.tokens) == 1 or all(0 < chance < 1 for chance in trace.chances[1:])


def test_nothing_is_copied_in_larger_batches_than_allowed(target_dir: Path) -> None:
    prompts = [[5, 6, 7, 8] * 10] * 3
    for tree in ("fixed", "adaptive"):
        core = copying(target_dir, speculative_disable_by_batch_size=2, speculative_tree=tree)
        run(core, prompts, GREEDY)
        assert core.current_metrics().num_draft_tokens == 0
        if tree == "fixed":
            run(core, prompts[:2], GREEDY)
            assert core.current_metrics().num_draft_tokens > 0


def test_what_is_copied_is_what_pays_unless_all_is_asked_for(target_dir: Path) -> None:
    assert isinstance(copying(target_dir).runner.headless.copying.policy, FixedCopies)
    core = copying(target_dir, speculative_tree="auto")
    assert isinstance(core.runner.headless.copying.policy, PayingCopies)
    assert make_core(target_dir).runner.headless.copying is None


@pytest.mark.parametrize("jump_after", [None, 5])
def test_costs_are_those_of_verifying_alone(target_dir: Path, monkeypatch: pytest.MonkeyPatch, jump_after: int | None) -> None:
    """Steps of one request, of a few, and of as many as may run; both sides of a jump."""
    core, timed = copying(target_dir, max_running_requests=6, speculative_num_draft_tokens=10), []

    def step_ms(verifier: object, core: EngineCore, batch_size: int, num_copied: int) -> float:
        timed.append((batch_size, num_copied + 1))
        return 10.0 + batch_size * num_copied + (jump_after is not None and num_copied >= jump_after)

    monkeypatch.setattr(calibrate, "copy_step_ms", step_ms)
    monkeypatch.setattr(calibrate, "tiling_of", lambda verifier: (calibrate.NO_TILES, jump_after))
    costs = measured_costs(core)
    assert {size for size, _ in timed} == {1, 4, 6}
    assert ({(1, 5), (1, 6)} <= set(timed)) == (jump_after is not None)
    assert max(count for _, count in timed) == 10
    verify = costs.parts["verify"]
    assert verify.values[0] + verify.per_sequence == pytest.approx(10.0, rel=0.1)
    assert all(costs.parts[name].values == [1e-6] for name in ("start", "level"))


@torch.inference_mode()
@pytest.mark.parametrize("num_copied", [0, 3])
def test_a_timed_step_is_a_real_one(target_dir: Path, num_copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core = copying(target_dir)
    verifier, passes = core.runner.headless.verifier, []
    forward = verifier.target.forward
    verifier.target.forward = lambda batch, *rest: passes.append(len(batch.tokens)) or forward(batch, *rest)  # type: ignore[method-assign]
    monkeypatch.setattr(calibrate, "num_cold", lambda ms: 2)  # the first of several plain ones say little
    assert calibrate.copy_step_ms(verifier, core, 2, num_copied) > 0
    assert passes == [2 * (1 + num_copied)] * (1 if num_copied else 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_draft_model_path": "head"}, "--speculative-draft-model-path is head.*drafts without a head"),
        ({"speculative_simulate_accept_length": 2.0}, "--speculative-simulate-accept-length is 2.0"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk is 4, but must be 1"),
        ({"speculative_ngram": "off"}, "--speculative-ngram is off, but must be auto"),
        ({"speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens is 1, but must be at least 2"),
    ],
    ids=str,
)
def test_what_needs_a_head_is_refused(target_dir: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        copying(target_dir, **options)


@pytest.mark.parametrize(
    ("options", "longest"),
    [({}, 24), ({"speculative_num_draft_tokens": 7}, 7), ({"speculative_num_steps": 7}, 8)],
    ids=str,
)
def test_copies_are_as_long_as_is_asked_for(target_dir: Path, options: dict[str, Any], longest: int) -> None:
    shape = copying(target_dir, **options).runner.tree_shape
    assert shape == TreeShape(0, 0, 1, num_copied=longest - 1)
    assert shape.of_a_request == TreeShape(longest - 1, 1, longest)


class Noting(FixedCopies):
    """Notes every step, and what it was told of it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.steps: list[CopyStep | None] = []

    def add_rest(self, batch_size: int, ms: float) -> None:
        self.steps.append(None)

    def learn(self, sequences: Sequence[HostSequence], num_gained: int, step: CopyStep) -> None:
        self.steps.append(step)


def test_a_step_is_warm_after_one_with_copies(target_dir: Path) -> None:
    core, policy = copying(target_dir, speculative_num_draft_tokens=5), Noting()
    core.runner.headless.copying = Copying(policy)
    run(core, random_prompts(1, seed=1), GREEDY)
    assert {step is None for step in policy.steps} == {True, False}
    for before, step in pairwise([None, *policy.steps]):
        if step:
            assert step.is_warm == (before is not None)
            assert 2 <= step.num_rows <= 5


def test_what_passes_after_copies_longer_than_after_plain_steps_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both are known; and no step takes nothing."""
    now, policy = [7.0], Noting()
    monkeypatch.setattr(copy_policy.time, "perf_counter", lambda: now[0])
    made, texts = Copying(policy), [HostSequence("a", [1, 2, 1], range(40), 0.0, TreeShape(3, 1, 4))]
    drafted = made.alone(texts, made.of(texts), 0.0)
    assert drafted
    now[0] += 0.010
    confirmed = Confirmed([[0]], [[2]], torch.zeros(4, 1), None)
    for between in ((0.5, 0.75), (0.5, 0.0), (0.0, 0.75), (30.0, 1.0)):
        made.learn(texts, drafted, confirmed, between, is_warm=True)
    assert [round(step.ms, 6) for step in policy.steps] == [10.25, 10.0, 10.0, 0.001]
    assert [step.between_ms for step in policy.steps] == [0.5, 0.5, 0.0, 30.0]


def test_what_copies_save() -> None:
    """Beside as many plain steps as would have gained their tokens: three of a sequence on average."""
    made = Copying(PayingCopies(costs(0.0, 0.0, 0.1), None))
    texts = [HostSequence(name, [1, 2, 1], range(40), 0.0, TreeShape(3, 1, 4)) for name in "ab"]
    assert made.policy.plain_ms == 0.0  # nothing was decided yet
    made.alone(texts, made.of(texts), 0.0)
    outcome = HostOutcome([[1, 2, 3, 4], [1, 2]], [3, 3], [False] * 2, False, torch.zeros(0), [[0], [4]])
    assert made.policy.plain_ms == pytest.approx(10.1)  # of two rows
    assert made.saved(outcome, 0.020) == pytest.approx(3 * 0.0101 - 0.020)
