"""What adaptive trees draft, and what is learned from it."""

import numpy as np
import pytest
from served import FREE, ONE, Served, begun, level, start_that_nearly_pays, step
from step_costs import costs, without_nodes

from eagle_rt.speculate.adaptive import NUM_FIRST_LESSONS, NUM_UNSETTLED, AdaptivePlan
from eagle_rt.speculate.compiled import CHILD_PRICES
from eagle_rt.speculate.costs import Conditions, Observation
from eagle_rt.speculate.drafters import LEVELS_OF_A_LESSON
from eagle_rt.speculate.policy import Rests, StepRecord
from eagle_rt.speculate.prices import BEYOND_HELD_BY, IDLE_MS, Pace, Price, RecentSteps
from eagle_rt.speculate.promises import FIRST_PROMISES


def test_trials_say_too_what_drafts_gain_beyond_their_promise() -> None:
    """Those that are made because drafts promise much would say that all gain less than they promise."""
    start = start_that_nearly_pays(FREE)
    nearly = Served(costs(start=start, level=50.0, node=0.1))
    nearly.num_drafted_steps, nearly.choice.allowance_ms = NUM_UNSETTLED, 1e3
    price, plan = nearly.prices.at(ONE), step(nearly)
    assert isinstance(plan, AdaptivePlan)
    decision = plan._decision
    assert decision.is_trial
    worth = price.utility(FIRST_PROMISES, LEVELS_OF_A_LESSON).mean() - price.starts[1]
    assert decision.worth == pytest.approx(worth, rel=0.05)
    assert worth < price.utility(FIRST_PROMISES).mean() - price.starts[1] - 0.1
    assert decision.worth < 0
    before = nearly.prices.steps(ONE).beyond
    parts = [Observation("start", 1, 3, start), Observation("verify", 1, 2, 10.0)]
    plan.learn(without_nodes(5, parts))
    assert nearly.prices.steps(ONE).beyond > before + 0.1
    assert step(nearly).drafters == [0]
    assert nearly.choice._last
    assert nearly.choice._last.worth == decision.worth, "until it ends"


def test_drafts_that_gain_less_than_they_promise_are_worth_less() -> None:
    """And are trusted again after a while without any."""
    steps = RecentSteps(Pace(), 1)
    for _ in range(100):
        steps.add_worth(-0.4)
    assert steps.pace.beyond == pytest.approx(-0.4, abs=0.05)
    promises = FIRST_PROMISES[6]
    worth, less = (Price(FREE, Pace(beyond=beyond), ONE).utility(promises) for beyond in (0.0, -0.4))
    assert less == pytest.approx(worth - 0.4)
    assert Price(FREE, Pace(beyond=0.4), ONE).utility(np.zeros_like(promises)) == 0.0, "there is nothing to be better"
    steps.add_rests(1000, ms=0.1 * IDLE_MS)
    assert steps.pace.beyond < -0.3, "however many steps that are"
    steps.add_rests(10, ms=1000.0 * IDLE_MS)
    assert steps.pace.beyond < -0.3, "however long they take"
    steps.add_rests(1000, ms=6.0 * IDLE_MS)
    assert abs(steps.pace.beyond) < 0.01
    steps.add_worth(-1e9)
    assert steps.pace.beyond > -1.0, "the machine stood still"


def test_what_drafts_gain_beyond_their_promise_is_what_the_target_said_and_the_clock() -> None:
    adaptive = Served(costs(start=1.0, level=50.0, node=0.1))
    adaptive.num_drafted_steps = NUM_UNSETTLED
    plan = step(adaptive)
    assert plan.drafters == [0]
    price = adaptive.prices.at(ONE)
    worth = price.utility(FIRST_PROMISES).mean() - price.starts[1]
    parts = [Observation("start", 1, 3, 1.0), Observation("verify", 1, 2, 11.0)]
    plan.learn(without_nodes(2, parts))
    real = 2 - 1 - price.rate * (12.0 - price.plain_ms)
    beyond = adaptive.prices.steps(ONE).pace.beyond
    assert beyond == pytest.approx((real - worth) / (1.0 + BEYOND_HELD_BY), abs=0.02)


def test_steps_that_read_much_say_nothing_of_drafts() -> None:
    adaptive = Served(costs(start=1.0, level=50.0, node=0.1))
    start = adaptive.costs.parts["start"]
    start.knots, start.values = [1.0, 101.0], [1.0, 101.0]
    for num_rows, is_learned_from in ((200, False), (3, True)):
        before = [float(adaptive.costs.ms(part, 1, 3, ONE)) for part in ("start", "verify")]
        plan = step(adaptive)
        assert plan.drafters
        parts = [Observation("start", 1, num_rows, 3.0 * (num_rows + before[0])), Observation("verify", 1, 2, 1.1 * before[1])]
        plan.learn(without_nodes(1, parts))
        after = [float(adaptive.costs.ms(part, 1, 3, ONE)) for part in ("start", "verify")]
        assert after[1] > before[1]
        # All parts share the machine's factor.
        assert (after[0] / before[0] > 1.01 * after[1] / before[1]) == is_learned_from


def test_all_that_a_step_takes_counts() -> None:
    for between_ms in (0.0, 5.0):
        adaptive = Served(costs(start=50.0, level=50.0, node=20.0))
        adaptive.learn_rests(Rests([], between_ms))
        assert adaptive.prices.at(ONE).plain_ms == pytest.approx(10.0 + between_ms)
        parts = [Observation("start", 1, 3, 7.0), Observation("verify", 1, 2, 11.0)]
        record = without_nodes(1, parts, between_ms=between_ms)
        assert record.total_ms == 18.0 + between_ms


def test_resting_steps_count_as_plain_ones() -> None:
    """Otherwise the rate would remain that of the last drafts, and nothing would be worth drafting at it."""
    adaptive = Served(costs(start=50.0, level=50.0, node=20.0))
    conditions = Conditions(1, 64.0, is_sampled=False)
    steps, one_by_one = adaptive.prices.steps(conditions), RecentSteps(Pace(), 1)
    for own in (steps, one_by_one):
        for _ in range(200):
            own.add(3.0, 1.0, read=0.1, share_drafted=1.0, verified=None)
    steps.add_rests(3, ms=0.0)
    for _ in range(3):
        one_by_one.add_rests(1, ms=0.0)
    assert steps.pace.speed == pytest.approx(one_by_one.pace.speed)
    assert steps.pace.speed_of_trees == pytest.approx(one_by_one.pace.speed_of_trees)
    for _ in range(200):
        step(adaptive)
    assert adaptive.prices.steps(conditions).pace.speed < 1.1


@pytest.mark.parametrize(("children", "is_worth_it"), [((0.9, 0.1), True), ((0.5, 0.5), False)])
def test_a_level_is_worth_its_good_children(children: tuple[float, float], is_worth_it: bool) -> None:
    """At a price of 0.4, children of a node with a chance of 0.5 are worth something if some of them are sure, but not if all have
    the same mean."""
    adaptive = Served(costs(start=0.01, level=0.01, node=4.0))
    adaptive.children[:] = np.maximum(0.0, np.array(children)[:, None] - CHILD_PRICES).mean(axis=0)
    adaptive.num_drafted_steps = NUM_FIRST_LESSONS  # so that nothing is drafted to learn from
    plan = begun(adaptive, [0.0])
    nodes = level(np.zeros(1, dtype=np.int64), np.full(1, -1), 1, np.array([0.5]))
    assert len(plan.expand(nodes)) == is_worth_it


def test_what_the_verified_nodes_take_is_remembered() -> None:
    """In milliseconds beyond a plain step: two of three nodes are worth theirs, at 2 ms each."""
    plan = begun(Served(costs(start=0.01, level=50.0, node=2.0)), [0.0])
    nodes = level(np.zeros(3, dtype=np.int64), np.full(3, -1), 1, np.array([0.9, 0.05, 0.8]))
    plan.expand(nodes)
    assert plan.keep(nodes).tolist() == [0, 2]
    assert isinstance(plan, AdaptivePlan)
    assert plan._verified
    assert (plan._verified.num_nodes, plan._verified.more_ms) == (2, pytest.approx(2 * 2.0))


def test_nodes_are_believed_less_where_fewer_are_accepted() -> None:
    """By what every step has gained, whether it teaches or not, and of greedy sequences if those draft."""
    chances = []
    for num_gained in (1, 3):
        adaptive = Served(costs(start=0.01, level=50.0, node=0.1))
        decision = begun(adaptive, [0.0])._decision
        for _ in range(100):
            adaptive.num_drafted_steps = NUM_FIRST_LESSONS
            plan = AdaptivePlan(adaptive, decision)
            assert not plan.teaches
            nodes = level(np.zeros(3, dtype=np.int64), np.full(3, -1), 1, np.array([0.5, 0.3, 0.2]))
            plan.expand(nodes)
            parts = [Observation("start", 1, 1, 0.01), Observation("verify", 1, 3, 10.2)]
            plan.learn(StepRecord(nodes, plan.keep(nodes), lambda: np.zeros(0), num_gained, parts))
        chances.append(nodes.values[0])
        assert adaptive.drifts[True].logits == 0.0
    assert chances[0] < 0.2
    assert chances[1] > 0.7
