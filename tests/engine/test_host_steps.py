"""Steps that the host decides on: whatever it decides, the text is the target's, and the head reads what it should."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import make_core, random_prompts, run
from step_costs import costs

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SamplingParams, SpeculativeParams
from eagle_rt.speculate import drafters, head_rows, host_step
from eagle_rt.speculate.acceptance import AcceptanceEstimator
from eagle_rt.speculate.adaptive import AdaptivePolicy
from eagle_rt.speculate.compiled import best_places, descending
from eagle_rt.speculate.copy_policy import Copying, CopyStep, FixedCopies
from eagle_rt.speculate.costs import StepCosts
from eagle_rt.speculate.forest import Candidates, Floats, Ints
from eagle_rt.speculate.policy import DraftPlan, FixedPlan, FixedPolicy, StepRecord, best_of_each, bounds_of, can_grow
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape

TREE = (4, 3, 12)


def params(count: int, **changes: object) -> list[SamplingParams]:
    """Greedy, sampled and filtered requests in turns."""
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}]
    settings = {"max_new_tokens": 24, "ignore_eos": True, **changes}
    return [SamplingParams(seed=index, **{**kinds[index % 3], **settings}) for index in range(count)]


class AnyPlan:
    """Decides by dice, within what the stepper asks of a plan."""

    teaches = False

    def __init__(self, sequences: Sequence[HostSequence], rng: random.Random) -> None:
        self._shapes = [sequence.bounds for sequence in sequences]
        self._rng = rng
        self.drafters = [index for index, shape in enumerate(self._shapes) if shape and rng.random() < 0.7]

    def expand(self, newest: Candidates) -> Ints:
        newest.values[:] = newest.scores
        places = can_grow(newest, bounds_of(tuple(self._shapes)))
        places = places[[self._rng.random() < 0.6 for _ in places]]
        return best_of_each(newest, places, np.array([self._rng.randrange(4) for _ in self._shapes]))

    def keep(self, candidates: Candidates) -> Ints:
        kept: set[int] = set()
        for number, parent in enumerate(candidates.parents.tolist()):
            if (parent < 0 or parent in kept) and self._rng.random() < 0.6:
                kept.add(number)
        return best_of_each(candidates, np.array(sorted(kept), dtype=np.int64), np.full(len(self._shapes), TREE[2] - 1))

    def learn(self, record: StepRecord) -> None:
        assert set(record.is_accepted().tolist()) <= {0.0, 1.0}


class AnyPolicy(FixedPolicy):
    def __init__(self, seed: int) -> None:
        super().__init__(None)
        self.rng = random.Random(seed)

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        return AnyPlan(sequences, self.rng)

    def wants_drafts(self, batch_size: int, num_rows: int, is_sampled: bool) -> bool:
        return self.rng.random() < 0.5

    def leaves_to_copies(self, sequences: Sequence[HostSequence], misses: Floats) -> bool:
        return self.rng.random() < 0.3

    def keep_copies(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, kept: Ints) -> Ints:
        left = [self.rng.randrange(TREE[2] - count) for count in np.bincount(kept, minlength=len(sequences)).tolist()]
        return best_places(descending(chances), owners, np.array(left))


class AnyCopies(FixedCopies):
    """Verified by dice where no head drafts."""

    def __init__(self, seed: int) -> None:
        super().__init__(None)
        self.rng = random.Random(seed)

    def keep(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, between_ms: float) -> Ints:
        return best_places(descending(chances), owners, np.array([self.rng.randrange(TREE[2]) for _ in sequences]))


class NotingCopies(FixedCopies):
    """All are verified while it `is_on`. Notes what it is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.is_on, self.chances, self.rests, self.drafted, self.learned = True, np.zeros(0), [], [], []

    def keep(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, between_ms: float) -> Ints:
        self.chances = chances
        return np.arange(len(chances) if self.is_on else 0)

    def add_rest(self, batch_size: int, ms: float) -> None:
        self.rests.append((batch_size, ms))

    def add_drafted(self, sequences: Sequence[HostSequence], num_gained: int, ms: float) -> None:
        self.drafted.append((num_gained, ms))

    def learn(self, sequences: Sequence[HostSequence], num_gained: int, step: CopyStep) -> None:
        self.learned.append((num_gained, step.num_rows, step.ms))


def with_policy(core: EngineCore, policy: FixedPolicy | AdaptivePolicy) -> EngineCore:
    assert core.runner.host_stepper
    core.runner.host_stepper.policy = policy
    return core


def adaptive(step_costs: StepCosts, max_batch_size: int | None = None) -> AdaptivePolicy:
    return AdaptivePolicy(step_costs, AcceptanceEstimator(TREE[0]), max_batch_size)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", [{}, {"attention_backend": "triton", "page_size": 1}], ids=["torch", "triton"])
def test_no_decision_changes_a_text(target_dir: Path, head_dir: Path, seed: int, options: dict) -> None:
    if options and seed > 1:
        pytest.skip("the interpreter is slow")
    prompts = random_prompts(7, seed=seed) + random_prompts(2, seed=seed)
    settings = params(9, max_new_tokens=12 if options else 24)
    plain = run(make_core(target_dir, max_running_requests=4), prompts, settings)
    core = make_core(target_dir, head_dir, TREE, max_running_requests=4, chunked_prefill_size=32, **options)
    core.runner.host_stepper.copying = Copying(AnyCopies(seed)) if seed % 2 else None
    assert run(with_policy(core, AnyPolicy(seed)), prompts, settings) == plain


class NotingPolicy(FixedPolicy):
    """Drafts a small tree of the head's in every other step, and in all what copies say; notes what it is told of either."""

    def __init__(self) -> None:
        super().__init__(None)
        self.records: list[tuple[int, StepRecord]] = []
        self.num_steps = self.num_copied = self.num_alone = 0

    def rests(self, num_sequences: int) -> bool:
        self.num_steps += 1
        return self.num_steps % 2 == 0

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        plan, place = FixedPlan([replace(own, bounds=TreeShape(2, 2, 4)) for own in sequences]), sequences[0].num_cached
        plan.learn = lambda record: self.records.append((place, record))  # type: ignore[method-assign]
        return plan

    def keep_copies(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, kept: Ints) -> Ints:
        self.num_copied += len(owners)
        return np.arange(min(len(owners), TREE[2] - 4))

    def add_copied(self, sequences: Sequence[HostSequence]) -> None:
        self.num_alone += 1


def test_copies_gain_tokens_and_teach_nothing_of_the_head(target_dir: Path, head_dir: Path) -> None:
    """A text that repeats itself. What a head is told of its nodes is what it would be without copies beside them."""
    prompts, settings = [[5, 6, 7, 8] * 10], [SamplingParams(temperature=0, max_new_tokens=120, ignore_eos=True)]
    plain = run(make_core(target_dir), prompts, settings)
    measuring, policy = NotingPolicy(), NotingPolicy()
    measuring.is_measuring = True  # whenever no head drafts
    for own in (measuring, policy):
        core, copies = with_policy(make_core(target_dir, head_dir, TREE), own), NotingCopies()
        core.runner.host_stepper.copying = Copying(copies)
        assert run(core, prompts, settings) == plain
        assert not core.runner.host_stepper.copying.book._texts  # nobody is left
        # And those that they are verified alone by are told of all steps, of which the first token came with the prompt.
        assert len(copies.learned) == own.num_alone
        assert len(copies.drafted) == len(own.records)
        told = [*copies.learned, *copies.drafted, *((1, ms) for _, ms in copies.rests)]
        assert 119 <= sum(gained for gained, *_ in told) <= 119 + TREE[2]
        assert all(ms > 0 for *_, ms in told)
    assert measuring.num_alone == 0
    assert policy.num_copied > 0
    assert policy.num_alone > 0
    text, gained, num_copied = prompts[0] + plain[0], core.current_metrics().num_accepted_tokens, []
    for place, record in policy.records:
        nodes, kept, following = record.candidates, record.kept.tolist(), text[place + 1 :]
        assert max(kept) < len(nodes)
        num_copied.append(record.num_copied)
        path, parent = [], -1
        while below := [
            n for n in kept if nodes.parents[n] == parent and [nodes.tokens[n]] == following[len(path) : len(path) + 1]
        ]:
            path.append(parent := below[0])
        assert record.is_accepted().tolist() == [float(number in path) for number in kept]
        assert record.num_gained == 1 + len(path) or place + 1 + record.num_gained >= len(text)
    assert sum(num_copied) > 0
    assert gained > sum(record.num_gained - 1 for _, record in policy.records)


def test_a_cache_too_small_and_prompts_shared(target_dir: Path, head_dir: Path) -> None:
    """Requests that give way, and pages with and without the head's rows, beside drafts that come and go."""
    start = random_prompts(1, seed=5, longest=50)[0] * 2
    prompts = [start + prompt for prompt in random_prompts(8, seed=6, longest=20)]
    settings = params(8)
    plain = run(make_core(target_dir), prompts, settings)
    for seed in range(3):
        core = make_core(target_dir, head_dir, TREE, page_size=4, max_total_tokens=280)
        with_policy(core, AnyPolicy(seed))
        assert run(core, prompts, settings) == plain
        assert run(core, prompts, settings) == plain
        assert core.scheduler.num_preemptions > 0
        assert core.current_metrics().num_cached_prompt_tokens > 0


class CopyingPolicy(FixedPolicy):
    """No head drafts where anything is copied. Notes what it is told of that."""

    def __init__(self) -> None:
        super().__init__(None)
        self.is_on, self.num_alone = True, 0

    def rests(self, num_sequences: int) -> bool:
        return not self.is_on

    def leaves_to_copies(self, sequences: Sequence[HostSequence], misses: Floats) -> bool:
        self.misses = misses
        return True

    def add_copied(self, sequences: Sequence[HostSequence]) -> None:
        self.num_alone += 1


def test_plain_steps_right_after_copies_say_nothing(target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_step, "num_cold", lambda step_ms: 3)
    core, policy = make_core(target_dir, head_dir, TREE), CopyingPolicy()
    stepper = with_policy(core, policy).runner.host_stepper
    copies = NotingCopies()
    stepper.copying = Copying(copies)
    core.submit("a", [5, 6, 7, 8] * 10, SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True))
    while not policy.num_alone:
        core.step()
    assert policy.misses[0] == pytest.approx(1 - copies.chances[2])  # that one of the first three tokens is wrong
    policy.is_on = copies.is_on = False
    counts, before = [], len(stepper._rests)
    for _ in range(6):
        core.step()
        counts.append(len(stepper._rests) - before)
    assert counts == [0, 0, 0, 1, 2, 3]


class PausingPolicy(FixedPolicy):
    """Drafts only in steps of which `drafts(step)` says so, and notes the trees."""

    def __init__(self, drafts: list[bool]) -> None:
        super().__init__(None)
        self.drafts, self.kept, self.num_steps = drafts, {}, 0

    def wants_drafts(self, batch_size: int, num_rows: int, is_sampled: bool) -> bool:
        return self.num_steps < len(self.drafts) and self.drafts[self.num_steps]

    def rests(self, num_sequences: int) -> bool:
        self.num_steps += 1
        return not self.drafts[self.num_steps - 1]

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        plan = super().begin(sequences, num_missing)
        place = sequences[0].num_cached
        plan.learn = lambda record: self.kept.__setitem__(place, record.candidates[record.kept])  # type: ignore[method-assign]
        return plan


@pytest.mark.parametrize("pause", [[False] * 12, [True, False, True, False, False, False]])
def test_a_head_that_was_left_behind_catches_up(target_dir: Path, head_dir: Path, pause: list[bool]) -> None:
    """After a pause, its first one at the prompt included, it drafts what it would have drafted without it."""
    prompts, settings = random_prompts(1, seed=3), SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    always, paused = PausingPolicy([True] * 100), PausingPolicy(pause + [True] * 100)
    texts = [run(with_policy(make_core(target_dir, head_dir, TREE), policy), prompts, settings) for policy in (always, paused)]
    assert texts[0] == texts[1]
    both = [place for place in always.kept if place in paused.kept and len(paused.kept[place]) > 0]
    assert len(both) > 5
    for place in both:
        for name in ("tokens", "parents", "depths"):
            assert np.array_equal(getattr(always.kept[place], name), getattr(paused.kept[place], name)), place
        assert np.allclose(always.kept[place].scores, paused.kept[place].scores, atol=1e-4)


def test_pages_without_the_heads_rows_are_of_no_use_to_who_drafts(target_dir: Path, head_dir: Path) -> None:
    prompt, settings = random_prompts(1, seed=8, longest=59)[0] + [9] * 30, SamplingParams(temperature=0, max_new_tokens=8)
    core = make_core(target_dir, head_dir, TREE, page_size=4)
    fast, slow = FixedPolicy(None), FixedPolicy(0)

    def num_cached(policy: FixedPolicy) -> int:
        with_policy(core, policy)
        before = core.metrics.num_cached_prompt_tokens
        run(core, [prompt], settings)
        return core.metrics.num_cached_prompt_tokens - before

    assert num_cached(slow) == 0
    assert num_cached(slow) > 0  # nor does it draft, so it needs no rows of the head
    assert num_cached(fast) == 0  # it makes them, and hands over its pages in place of the others
    assert num_cached(fast) > 0
    assert num_cached(slow) > 0
    drafted = core.metrics.num_draft_tokens
    with_policy(core, fast)
    run(core, [prompt], settings)
    assert core.metrics.num_draft_tokens > drafted


def test_prompts_are_read_along_for_all_that_were_let_in(target_dir: Path, head_dir: Path) -> None:
    """Though a pass reads the prompts of few of them, what pays is asked for the batch that they will be."""

    class Asked(FixedPolicy):
        sizes: list[int] = []

        def wants_drafts(self, batch_size: int, num_rows: int, is_sampled: bool) -> bool:
            self.sizes.append(batch_size)
            return batch_size < 4

    core = with_policy(make_core(target_dir, head_dir, TREE, chunked_prefill_size=16), policy := Asked(None))
    for index in range(4):
        core.submit(f"{index}", [*range(5, 17), index], SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True))
    core.step()
    assert core.runner.host_stepper
    assert set(policy.sizes) == {4}
    assert core.runner.host_stepper.drafter.rows["0"].num_made == 0


@pytest.mark.parametrize("is_short_of_memory", [False, True])
def test_a_head_reads_on_where_too_much_waits(
    target_dir: Path, head_dir: Path, is_short_of_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a long prompt, and what comes after it, though nothing drafts: all if memory is short, else what is long."""
    monkeypatch.setattr(head_rows, "MOST_UNSORTED", 0)
    monkeypatch.setattr(host_step, "MOST_WAITING_BYTES" if is_short_of_memory else "MOST_WAITING_ROWS", 20)
    settings = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    core = with_policy(make_core(target_dir, head_dir, TREE, chunked_prefill_size=16), FixedPolicy(0))
    core.submit("long", list(range(5, 57)), settings)
    core.submit("short", [5, 6], replace(settings, max_new_tokens=12))
    assert core.runner.host_stepper
    rows, made, waited = core.runner.host_stepper.drafter.rows, [], []
    while core.has_work:
        core.step()
        if running := [request for request in core.scheduler.running if request.id == "long"]:
            made.append(rows["long"].num_made)
            waited.append(rows["long"].num_waiting)
            assert made[-1] + waited[-1] == running[0].num_cached
    assert made[1] > 0
    assert made[-1] > 52
    assert max(waited) <= (1 if is_short_of_memory else 20 + 1)


def test_a_head_that_cannot_catch_up_does_not_draft(target_dir: Path, head_dir: Path) -> None:
    """The features of pages that were found in the cache without the head's rows are gone."""
    prompt, settings = random_prompts(1, seed=8, longest=59)[0] + [9] * 30, SamplingParams(temperature=0, max_new_tokens=8)
    core = with_policy(make_core(target_dir, head_dir, TREE, page_size=4), FixedPolicy(0))
    run(core, [prompt], settings)
    core.submit("again", prompt, settings)
    core.step()
    with_policy(core, FixedPolicy(None))
    while core.has_work:
        core.step()
    assert core.metrics.num_cached_prompt_tokens > 0
    assert core.metrics.num_draft_tokens == 0


def test_drafts_that_cannot_pay_are_not_made(target_dir: Path, head_dir: Path) -> None:
    prompts, settings = random_prompts(2, seed=1), SamplingParams(temperature=0, max_new_tokens=100, ignore_eos=True)
    core = with_policy(make_core(target_dir, head_dir, TREE), adaptive(costs(start=50.0, level=50.0, node=20.0)))
    run(core, prompts, settings)
    metrics = core.current_metrics()
    assert metrics.num_undrafted == metrics.num_drafts
    assert core.runner.host_stepper
    assert core.runner.host_stepper.drafter.rows.num_waiting == 0  # and what waits for the head is dropped with the request


def test_drafts_that_cost_nothing_are_as_large_as_they_may_be(built_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_BETWEEN", "FIRST_MOST_BETWEEN"):
        monkeypatch.setattr(drafters, name, 1000)
    settings = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    core = make_core(built_in / "target", built_in / "eagle3", TREE)
    policy = adaptive(costs(start=1e-6, level=1e-6, node=1e-6))
    policy.costs.correct = lambda observation, context: None  # type: ignore[method-assign]
    run(with_policy(core, policy), [[5, 6, 7, 8]], settings)
    metrics = core.current_metrics()
    assert metrics.num_undrafted == 0
    assert metrics.num_draft_tokens > 0.95 * (TREE[2] - 1) * metrics.num_drafts


def test_hopeless_drafts_are_given_up_and_tried_again(target_dir: Path, head_dir: Path) -> None:
    """A head of random weights: nothing it drafts is accepted, and trying it again takes a small share of the steps."""
    core = make_core(target_dir, head_dir, TREE)
    policy = adaptive(costs(start=1.0, level=1.0, node=0.5))
    policy.costs.correct = lambda observation, context: None  # type: ignore[method-assign]
    run(with_policy(core, policy), random_prompts(1, seed=2), SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True))
    metrics = core.current_metrics()
    assert 0.6 * metrics.num_drafts < metrics.num_undrafted < metrics.num_drafts


def test_a_batch_too_large_is_not_drafted_for(target_dir: Path, head_dir: Path) -> None:
    prompts, settings = random_prompts(3, seed=4), SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True)
    plain = run(make_core(target_dir), prompts, settings)
    for policy in ("fixed", "adaptive"):
        core = make_core(target_dir, head_dir, TREE, speculative_tree=policy, speculative_disable_by_batch_size=2)
        assert run(core, prompts, settings) == plain
        assert core.current_metrics().num_draft_tokens == 0
        assert run(core, prompts[:1], settings) == plain[:1]
        assert policy == "adaptive" or core.current_metrics().num_draft_tokens > 0


def test_a_request_may_ask_for_less(target_dir: Path, head_dir: Path) -> None:
    prompts = random_prompts(3, seed=4)
    wishes = [SpeculativeParams(enabled=False), SpeculativeParams(num_steps=2, num_draft_tokens=4), SpeculativeParams()]
    settings = [SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True, speculative=wish) for wish in wishes]
    core = make_core(target_dir, head_dir, TREE)
    events = {}
    for index, (prompt, setting) in enumerate(zip(prompts, settings, strict=True)):
        core.submit(str(index), prompt, setting)
    while core.has_work:
        for event in core.step():
            events[event.request_id] = event.stats
    drafted = [events[str(index)].num_drafted / events[str(index)].num_steps for index in range(3)]
    assert drafted == [0, 3, 11]
    for wish, message in (
        (SpeculativeParams(num_steps=9), "speculative.num_steps is 9, but this server drafts at most 4"),
        (
            SpeculativeParams(num_steps=1, eagle_topk=2, num_draft_tokens=5),
            "1 steps of top-k 2 supply at most 3, the root included",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            core.submit("more", prompts[0], SamplingParams(speculative=wish))


def test_a_head_that_gives_no_numbers(target_dir: Path, head_dir: Path) -> None:
    """Its sequences go on without drafts, and the metrics say how often."""
    prompts, settings = random_prompts(2, seed=4), SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    plain = run(make_core(target_dir), prompts, settings)
    for tree in ("fixed", "adaptive"):
        core = make_core(target_dir, head_dir, TREE)
        stepper = core.runner.host_stepper
        assert stepper
        if tree == "adaptive":
            with_policy(core, adaptive(costs(start=0.1, level=0.1, node=0.1)))
        stepper.drafter.head.logits = lambda states: torch.full((len(states), 262), torch.nan)  # type: ignore[method-assign]
        assert run(core, prompts, settings) == plain
        metrics = core.current_metrics()
        assert metrics.num_broken_drafts > 0
        assert metrics.num_draft_tokens == 0


@pytest.mark.parametrize("temperature", [1e-6, 100.0])
def test_extreme_temperatures(target_dir: Path, head_dir: Path, temperature: float) -> None:
    prompts = random_prompts(2, seed=4)
    settings = [
        SamplingParams(temperature=temperature, seed=seed, max_new_tokens=20, ignore_eos=True) for seed in (-(2**63), 2**63 - 1)
    ]
    plain = run(make_core(target_dir), prompts, settings)
    for tree in ("fixed", "adaptive"):
        assert run(make_core(target_dir, head_dir, TREE, speculative_tree=tree), prompts, settings) == plain
