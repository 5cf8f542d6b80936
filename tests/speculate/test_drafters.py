"""Who drafts, and when nobody does."""

from dataclasses import replace

import numpy as np
import pytest
from served import ONE, Served, begun, level, plan_for, step
from step_costs import costs

from eagle_rt.speculate import drafters
from eagle_rt.speculate.costs import Conditions, Observation
from eagle_rt.speculate.drafters import (
    LONGEST_REST_MS,
    NUM_UNASKED,
    NUM_UNASKED_WHERE_CLEAR,
    SHORTER_RESTS,
    TRY_SHARE,
    num_plain_steps,
)
from eagle_rt.speculate.policy import Rests
from eagle_rt.speculate.prices import Pace, Price
from eagle_rt.speculate.promises import FIRST_PROMISES, FIRST_WAIT, NUM_OWN, CommonPromises
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape


def test_a_first_level_is_the_cheaper_the_more_share_it() -> None:
    """Of promises too small for one of the batch to pay for a level, all together do."""
    shared = Served(costs(start=3.0, level=50.0, node=0.1))
    price = shared.prices.at(Conditions(8, 64.0, is_sampled=False))
    promises = np.array([[0.5], [0.0]])
    assert price.utility(promises) < price.starts[1]
    assert price.pays(price.utility(promises).mean())


def test_new_requests_would_draft_where_the_drafts_to_come_pay_for_reading_their_prompts() -> None:
    """Long ones only where replies are long."""
    step_costs = costs(start=1.0, level=50.0, node=0.1)
    start = step_costs.parts["start"]
    start.knots, start.values = [1.0, 101.0], [1.0, 101.0]
    adaptive = Served(step_costs)
    assert adaptive.wants_drafts(1, 10, is_sampled=False)
    assert not adaptive.wants_drafts(1, 1000, is_sampled=False)
    for _ in range(20000):
        adaptive.choice.stay.add_steps(1)
    assert adaptive.wants_drafts(1, 1000, is_sampled=False)


def test_where_nothing_pays_steps_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    hopeless, asked = Served(costs(start=50.0, level=50.0, node=20.0)), []
    monkeypatch.setattr(hopeless, "learn_rests", lambda rests: asked.append(len(rests.steps)))
    for _ in range(200):
        assert not step(hopeless).drafters
    assert asked[:5] == [0, 2, 4, 8, 16]
    assert set(asked[5:]) == {LONGEST_REST_MS / 10.0 + 1}


def test_steps_that_rest_are_counted_when_one_is_looked_at() -> None:
    hopeless = Served(costs(start=50.0, level=50.0, node=20.0))
    while hopeless.choice.num_unasked < 12:
        step(hopeless)
    choice, before, num_rested = hopeless.choice, hopeless.choice.allowance_ms, len(hopeless.rested)
    while choice.num_unasked:
        step(hopeless, plain_ms=7.0)
        num_rested += 1
        assert choice.allowance_ms == before
    step(hopeless)
    assert num_rested > 12
    assert choice.allowance_ms - before == pytest.approx(TRY_SHARE * num_rested * 10.0), "as long as was believed before"
    assert float(hopeless.costs.ms("verify", 1, 1, ONE)) < 9.5, "they are learned from"


@pytest.mark.parametrize(("step_ms", "num_cold", "seen"), [(0.5, 6, [9, 16, 20]), (5.0, 2, [3, 6, 9]), (20.0, 0, [0, 1, 2])])
def test_the_first_steps_that_rest_say_nothing_of_what_a_plain_step_takes_and_short_ones_together_what_most_do(
    step_ms: float, num_cold: int, seen: list[int]
) -> None:
    steps = [(2, float(ms)) for ms in range(21)]
    assert Rests(steps, 0.0).observations(2, step_ms)[:3] == [Observation("verify", 2, 2, ms) for ms in seen]
    assert len(Rests(steps[: num_cold + 1], 0.0).observations(2, step_ms)) == 1
    assert not Rests(steps[:num_cold], 0.0).observations(2, step_ms)


def test_one_short_step_that_takes_long_is_not_believed() -> None:
    steps = [(2, 2.0)] * 20
    steps[8] = 2, 50.0
    assert {observation.ms for observation in Rests(steps, 0.0).observations(2, 2.0)} == {2.0}


def test_a_batch_that_grows_rests_until_all_have_come() -> None:
    """Reading prompts pays for few and not for many; what has been read goes on to be drafted for."""
    cheap = Served(costs(start=1.0, level=50.0, node=0.1))
    prompts = [HostSequence(f"{number}", [0] * 64, range(0), 0.0, TreeShape(2, 2, 4)) for number in range(8)]
    for num_missing, count, drafts in (
        ([64] * 4, 4, False),
        ([64] * 8, 8, False),
        ([64] * 8, 8, True),
        ([3], 1, True),
        ([3, 64], 2, True),
    ):
        assert bool(cheap.begin(prompts[:count], num_missing).drafters) == drafts
    for _ in range(2):
        cheap.choice.num_unasked = 0
        assert cheap.begin([replace(own, id=own.id + " next") for own in prompts[:2]], [64] * 2).drafters, "others, but not more"


def test_a_batch_that_grows_while_it_rests_is_not_asked_until_all_have_come() -> None:
    for drafts in (False, True):
        asked = Served(costs(start=0.1 if drafts else 50.0, level=50.0, node=0.01 if drafts else 20.0))
        assert not asked.choice.rests(4)
        assert bool(plan_for(asked, [0.0] * 4).drafters) == drafts
        asked.choice.num_unasked = 0
        assert [asked.choice.rests(size) for size in (8, 12, 16, 20, 20)] == [not drafts] * 3 + [False] * 2


def test_only_steps_of_as_many_sequences_say_what_a_plain_step_takes() -> None:
    """Those of others are few, and slower than they would be by themselves."""
    step_costs = costs(start=50.0, level=50.0, node=20.0)
    resting = Served(step_costs)
    plan_for(resting, [0.0] * 2)
    two = Conditions(2, 64.0, is_sampled=False)
    before = float(step_costs.ms("verify", 2, 2, two))
    for num_sequences, ratio, is_learned in ((1, 3.0, False), (2, 1.5, True)):
        resting.learn_rests(Rests([(num_sequences, ratio * before)] * 20, between_ms=0.0))
        assert (float(step_costs.ms("verify", 2, 2, two)) > 1.2 * before) == is_learned


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("next_may_draft", [False, True])
def test_a_request_that_leaves_makes_the_rest_shorter_where_the_next_one_may_draft(size: int, next_may_draft: bool) -> None:
    """By its share of the batch: where all have left it is a quarter."""
    resting = Served(costs(start=50.0, level=50.0, node=20.0))
    while resting.choice.num_rested < 20:
        plan_for(resting, [0.0] * size)
    choice = resting.choice
    choice.unknown_may_draft, before = next_may_draft, choice.num_rested
    for number in range(size):
        resting.forget(f"{number}")
        share = (number + 1) / size if next_may_draft else 0.0
        assert choice.num_rested == pytest.approx(before / SHORTER_RESTS**share)
        assert choice.num_unasked == int(choice.num_rested)


def test_all_are_asked_anew_where_a_plain_step_took_much_more_or_less_than_was_believed() -> None:
    for ratio, is_asked in ((1.01, False), (0.8, True), (1.25, True)):
        clear = Served(costs(start=0.1, level=50.0, node=0.01))
        assert begun(clear, [0.0]).drafters
        price = clear.prices.at(ONE)
        clear.learn_rests(Rests([(1, ratio * price.plain_ms)] * num_plain_steps(price), between_ms=0.0))
        assert (clear.choice.num_unasked == 0) == is_asked


def test_clear_decisions_hold_while_the_batch_is_about_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that rests, and one that drafts, if new sequences would: while one leaves and the next one's prompt is read."""
    monkeypatch.setattr(drafters, "LONGEST_REST_MS", 1e9)
    common = CommonPromises()
    free = Price(costs(start=0.0, level=50.0, node=0.01), Pace(), Conditions(4, 64.0, is_sampled=False))
    worth = 10.0 * common.utility(free)[0]
    for start, num_unasked in ((0.9 * worth, NUM_UNASKED), (0.1 * worth, NUM_UNASKED_WHERE_CLEAR)):
        clear = Served(costs(start=start, level=50.0, node=0.01))
        for count, num_held in ((4, 0), (4, 1), (3, 2)):
            begun(clear, [0.0] * count)
            assert clear.choice.num_unasked == num_unasked - num_held
        clear.choice.unknown_may_draft = False
        begun(clear, [0.0] * 4)
        assert clear.choice.num_unasked == num_unasked, "it was asked"
        begun(clear, [0.0] * 4)
        assert clear.choice.num_unasked == num_unasked - 1
        clear.prices.steps(Conditions(4, 64.0, is_sampled=False)).add_worth(2.0)
        begun(clear, [0.0] * 4)
        assert clear.choice.num_unasked >= num_unasked, "drafts gain more than was said"
    assert plan_for(clear, [0.0] * 4, may_draft=False).drafters == [0, 1, 2], "whose head has lost its rows meanwhile"
    for size, others in ((8, ((7, True), (6, True), (7, True), (9, False), (5, False))), (2, ((1, True), (4, False)))):
        hopeless = Served(costs(start=50.0, level=50.0, node=20.0))
        while hopeless.choice.num_unasked < 20:
            plan_for(hopeless, [0.0] * size)
        for count, rests in others:
            before = hopeless.choice.num_unasked
            plan_for(hopeless, [0.0] * count)
            assert (hopeless.choice.num_unasked == before - 1) == rests


def test_the_longest_rest_is_the_same_where_drafts_nearly_pay_and_where_they_do_not() -> None:
    """Where steps are long few are a long time."""
    for share in (0.9, 0.7):
        common = CommonPromises()
        free = Price(costs(start=0.0, level=50.0, node=0.1), Pace(), Conditions(1, 64.0, is_sampled=False))
        nearly = Served(costs(start=10.0 * common.utility(free)[0] / share, level=50.0, node=0.1))
        rests = []
        for _ in range(100):
            nearly.choice.allowance_ms = 0.0
            assert not step(nearly).drafters
            rests.append(nearly.choice.num_rested)
        assert max(rests) == LONGEST_REST_MS / 10.0


def test_one_of_many_is_tried_beside_the_others() -> None:
    """When it has been idle for long, and so much is left for tries."""
    step_costs = costs(start=1.0, level=50.0, node=0.1)
    step_costs.parts["start"].per_sequence = 0.3
    adaptive = Served(step_costs)
    sequences = [HostSequence(f"{number}", [0] * 64, range(0), 0.0, TreeShape(2, 2, 4)) for number in range(8)]
    adaptive.begin(sequences, [1] * 8)
    idle = adaptive.book._histories["3"]
    idle.own.add(np.zeros_like(FIRST_PROMISES[0]), NUM_OWN)
    idle.price = None
    for num_idle, allowance, is_tried in ((FIRST_WAIT, 0.0, False), (1, 1e3, False), (FIRST_WAIT, 1e3, True)):
        adaptive.choice.num_unasked, adaptive.choice.allowance_ms, idle.num_idle = 0, allowance, num_idle
        assert (3 in adaptive.begin(sequences, [1] * 8).drafters) == is_tried


def test_who_ends_without_ever_having_decoded_has_not_left() -> None:
    """Requests are ended twice, or while they wait."""
    adaptive = Served(costs(start=1.0, level=50.0, node=0.1))
    step(adaptive, "a")
    before = adaptive.choice.stay.num_steps
    adaptive.forget("b")
    assert adaptive.choice.stay.num_steps == before
    adaptive.forget("a")
    adaptive.forget("a")
    after = adaptive.choice.stay.num_steps
    assert after < before
    adaptive.forget("a")
    assert adaptive.choice.stay.num_steps == after


@pytest.mark.parametrize(
    ("plain_ms", "count", "speed", "distances"),
    [
        *((plain_ms, count, 1.0, [16] * 3) for plain_ms, count in ((20.0, 1), (10.0, 2), (1.0, 7))),
        *((plain_ms, count, 5.0, [64, 128, 256]) for plain_ms, count in ((20.0, 1), (10.0, 2), (1.0, 7))),
        (20.0, 1, 1.15, [30] * 3),
        (10.0, 2, 1.15, [60] * 3),
        (1.0, 7, 1.15, [64, 128, 160]),  # those that rest make it look slower
    ],
)
def test_plain_steps_are_measured_between_drafts(plain_ms: float, count: int, speed: float, distances: list[int]) -> None:
    """The more of them, the shorter they are; and the more seldom, the more they lose against drafts."""
    adaptive = Served(costs(start=0.1, level=50.0, node=0.1))
    adaptive.costs.parts["verify"].values = [plain_ms, 2 * plain_ms]
    for _ in range(300):
        adaptive.prices.steps(ONE).add(speed, 1.0, 0.0, 1.0, None)
    drafts = [bool(step(adaptive, "a", plain_ms).drafters) for _ in range(sum(distances) + 4 * count)]
    starts = np.flatnonzero(np.diff(drafts, prepend=False))  # of drafts and of plain steps
    assert np.diff(starts)[1::2].tolist()[:3] == [count] * 3
    assert np.diff(starts)[::2].tolist()[:3] == pytest.approx(distances, rel=0.1)


def test_after_plain_steps_half_a_tree_is_verified() -> None:
    """Once, and the likeliest half: fewer rows than usual are measured nowhere else."""
    adaptive, num_halved = Served(costs(start=0.1, level=50.0, node=0.1)), 0
    for _ in range(300):
        adaptive.prices.steps(ONE).add(5.0, 1.0, 0.0, 1.0, None)
    was_plain = False
    for _ in range(200):
        plan = step(adaptive, "a", 20.0)
        if plan.drafters:
            nodes = level(np.zeros(3, dtype=np.int64), np.full(3, -1), 1, np.array([0.9, 0.8, 0.7]))
            plan.expand(nodes)
            assert plan.keep(nodes).tolist() == ([0, 1] if was_plain else [0, 1, 2])
            num_halved += was_plain
        was_plain = not plan.drafters
    assert num_halved >= 2


@pytest.mark.parametrize(("speed", "are_measured_again"), [(1.2, True), (3.0, False)])
def test_plain_steps_are_a_surprise_where_drafts_may_not_pay_after_all(speed: float, are_measured_again: bool) -> None:
    """A third more or less matters little where drafts are three times as fast, and plain steps cost the more there."""
    adaptive = Served(costs(start=0.1, level=50.0, node=0.1))
    for _ in range(100):
        adaptive.prices.steps(ONE).add(speed, 1.0, 0.0, 1.0, None)
    while step(adaptive, "a", 13.0).drafters:
        pass
    count = num_plain_steps(adaptive.prices.at(ONE))
    drafts = [bool(step(adaptive, "a", 13.0).drafters) for _ in range(count)]
    assert drafts == [False] * (count - 1) + [not are_measured_again]


def test_plain_steps_that_are_a_surprise_are_measured_again() -> None:
    """At once, until they are none any more, and soon after."""
    adaptive = Served(costs(start=0.1, level=50.0, node=0.1))
    for _ in range(100):
        adaptive.prices.steps(ONE).add(2.0, 1.0, 0.0, 1.0, None)
    while step(adaptive, "a", 20.0).drafters:
        pass
    drafts = [bool(step(adaptive, "a", 20.0).drafters) for _ in range(500)]
    num_again = drafts.index(True)
    assert 3 <= num_again <= 20
    assert float(adaptive.costs.ms("verify", 1, 1, ONE)) == pytest.approx(20.0, rel=0.15)
    starts = np.flatnonzero(np.diff(drafts, prepend=False)).tolist()
    assert np.diff(starts).tolist()[:6:2] == [16, 32, 64]
