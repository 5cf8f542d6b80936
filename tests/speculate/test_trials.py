"""Trials: where nothing drafts, some requests do for a few steps now and then."""

from dataclasses import replace
from itertools import pairwise
from operator import gt

import numpy as np
import pytest
from served import FREE, ONE, Served, level, start_that_nearly_pays, step
from step_costs import costs, without_nodes

from eagle_rt.speculate.adaptive import MOST_LOST
from eagle_rt.speculate.costs import Observation, PartCost, StepCosts
from eagle_rt.speculate.drafters import (
    LEVELS_OF_A_LESSON,
    LONGEST_REST_MS,
    MOST_IN_A_TRIAL,
    MOST_STEPS_ALLOWED_FOR,
    STEPS_BETWEEN_TRIALS,
    STEPS_OF_A_TRIAL,
    TRY_SHARE,
    num_plain_steps,
    trial_of,
)
from eagle_rt.speculate.prices import Pace, Price
from eagle_rt.speculate.promises import FIRST_PROMISES
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape


def test_few_draft_in_a_trial_and_the_same_ones_in_all_of_it() -> None:
    """Those for whom heads have the least to read."""
    choice = Served(FREE).choice
    sequences = [HostSequence(f"{number}", [0] * 64, range(0), 0.0, TreeShape(2, 2, 4)) for number in range(3 * MOST_IN_A_TRIAL)]
    num_missing = np.random.default_rng(0).permutation(len(sequences)) + 20
    drafters = trial_of(choice._begun(sequences), num_missing.tolist()).drafters
    assert sorted(num_missing[drafters]) == list(range(20, 20 + MOST_IN_A_TRIAL))
    num_missing[drafters] = 0
    assert trial_of(choice._begun(sequences), (num_missing + 1).tolist()).drafters == drafters
    few = [replace(own, bounds=None) for own in sequences[2:]]
    assert trial_of(choice._begun(sequences[:2] + few), num_missing.tolist()).drafters == [0, 1]


def test_where_nothing_drafts_all_do_for_some_steps_now_and_then() -> None:
    """Where an allowance is enough for what that is expected to lose; what it comes to is spent from it. Where not even good drafts
    would pay none do."""
    start = start_that_nearly_pays(costs(start=0.0, level=13.0, node=0.1))
    nearly = Served(costs(start=start, level=13.0, node=0.1))
    while not nearly.choice.num_unasked:
        assert not step(nearly).drafters
    while nearly.choice.num_unasked:
        step(nearly)
    price = nearly.prices.at(ONE)
    shortfall = price.starts[1] - price.utility(FIRST_PROMISES, LEVELS_OF_A_LESSON).mean()
    expected_ms = STEPS_OF_A_TRIAL * shortfall / price.rate
    assert expected_ms < 0.5 * MOST_STEPS_ALLOWED_FOR * TRY_SHARE * 10.0
    nearly.choice.allowance_ms, nearly.rested = 0.9 * expected_ms, []
    assert not step(nearly).drafters
    while nearly.choice.num_unasked:
        step(nearly)
    nearly.choice.allowance_ms, nearly.rested = (before := 1.1 * expected_ms), []
    plans = [step(nearly, f"{number}") for number in range(STEPS_OF_A_TRIAL)]
    assert [plan.drafters for plan in plans] == [[0]] * STEPS_OF_A_TRIAL
    assert nearly.choice.allowance_ms == before, "nothing of what it came to is known yet"
    parts = [Observation("verify", 1, 1, 17.0)]
    lost = without_nodes(1, parts, teaching_ms=0.5)
    plans[0].learn(lost)
    saved_up = before + TRY_SHARE * 17.0
    assert saved_up - nearly.choice.allowance_ms == pytest.approx(17.0 - 10.0 + 0.5)
    hopeless = Served(costs(start=50.0 * start, level=50.0, node=0.1))
    hopeless.choice.allowance_ms = 1e9
    assert not step(hopeless).drafters


def test_a_standstill_in_a_trial_is_not_all_paid_for_but_what_heads_read_is(monkeypatch: pytest.MonkeyPatch) -> None:
    start = start_that_nearly_pays(FREE)
    served = Served(StepCosts({**FREE.parts, "start": PartCost([1.0, 8.0, 108.0], [start, start + 1e-6, start + 100.0], 0.0)}))
    served.choice.allowance_ms = 1e6
    plan, paid = step(served), []
    monkeypatch.setattr(served.choice, "add_trial", lambda gain, num_drafts, lost_ms: paid.append(lost_ms))
    parts = [Observation("start", 1, 64, 64.0), Observation("verify", 1, 1, 1000.0)]
    record = without_nodes(1, parts)
    plan.learn(record)
    reading_ms = plan._reading_ms(record)
    assert reading_ms > 30.0
    assert paid == [pytest.approx(MOST_LOST * 10.0 + reading_ms)]


def test_a_trial_that_leaves_no_hope_ends_early() -> None:
    """Many drafts say more than one does; and what was good so far counts too."""
    for num_drafts, before, ends in ((16, None, True), (1, None, False), (16, 3.0, False)):
        choice = Served(FREE).choice
        choice.num_unasked = STEPS_OF_A_TRIAL - 1
        if before:
            choice.add_trial(before, num_drafts, 0.0)
        choice.add_trial(-0.4 * num_drafts, num_drafts, 0.0)
        assert (choice.num_unasked == 0) == ends


def test_trials_are_some_steps_apart() -> None:
    """However much time is left for tries; and after one in vain nobody is asked until a plain step has been measured."""
    start = start_that_nearly_pays(costs(start=0.0, level=15.0, node=0.1))
    nearly = Served(costs(start=start, level=15.0, node=0.1))
    drafts, unasked = [], []
    for _ in range(4 * STEPS_BETWEEN_TRIALS):
        nearly.choice.allowance_ms = 1e6
        drafts.append(bool(step(nearly).drafters))
        unasked.append(nearly.choice.num_unasked)
    trials = [index for index, is_first in enumerate(map(gt, drafts, [False, *drafts])) if is_first]
    assert trials[0] == 0, "the first need not wait"
    longest_rest = int(LONGEST_REST_MS / 10.0) + 1
    assert len(trials) > 2
    num_rests = 1 + 2 * (num_plain_steps(Price(nearly.costs, Pace(), ONE)) // 2)
    for one, following in pairwise(trials):
        assert drafts[one : one + STEPS_OF_A_TRIAL + 1] == [True] * STEPS_OF_A_TRIAL + [False]
        assert unasked[one + STEPS_OF_A_TRIAL] == num_rests
        assert STEPS_BETWEEN_TRIALS <= following - one - STEPS_OF_A_TRIAL <= STEPS_BETWEEN_TRIALS + longest_rest


def test_what_a_trial_seems_to_gain_does_not_pay_for_the_next() -> None:
    start = start_that_nearly_pays(FREE)
    nearly = Served(costs(start=start, level=50.0, node=0.1))
    choice = nearly.choice
    choice.allowance_ms = 1000.0
    assert step(nearly).drafters
    for lost_ms, left_ms in ((-30.0, 1000.0), (20.0, 980.0), (-10.0, 990.0)):
        choice.add_trial(-0.1, 1, lost_ms)
        assert choice.allowance_ms == left_ms


def test_a_trial_is_deep_enough() -> None:
    """Whatever children gained in other texts."""
    start = start_that_nearly_pays(FREE)
    nearly = Served(costs(start=start, level=50.0, node=0.1))
    nearly.children[:] = 0.0
    nearly.choice.allowance_ms = 1e3
    plan = step(nearly)
    assert plan.drafters == [0]
    zeros = np.zeros(2, dtype=np.int64)
    assert plan.expand(level(zeros, zeros - 1, 1, np.array([0.2, 0.6]))).tolist() == [1]
    assert not len(plan.expand(level(zeros, zeros + 1, LEVELS_OF_A_LESSON, np.array([0.2, 0.1]))))
    nearly.children[:] = 20.0
    assert plan.expand(level(zeros, zeros - 1, 1, np.array([0.2, 0.6]))).tolist() == [0, 1], "no less than any other draft"
    two = [
        HostSequence(name, [0] * 64, range(0), 0.0, shape) for name, shape in (("x", TreeShape(1, 2, 3)), ("y", TreeShape(2, 2, 4)))
    ]
    nearly = Served(nearly.costs)
    nearly.children[:], nearly.choice.allowance_ms = 0.0, 1e3
    plan = nearly.begin(two, [1, 1])
    assert plan.drafters == [0, 1]
    assert plan.expand(level(np.array([0, 1]), zeros - 1, 1, np.array([0.9, 0.1]))).tolist() == [1], "the other may go no deeper"
