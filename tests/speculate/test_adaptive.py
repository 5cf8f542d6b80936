"""The decisions of adaptive trees, one by one."""

import numpy as np
import pytest

from eagle_rt.speculate.acceptance import AcceptanceEstimator
from eagle_rt.speculate.adaptive import (
    CHILD_PRICES,
    MOST_RESTING_STEPS,
    MOST_RESTING_STEPS_WHERE_NEARLY,
    RESTING_STEPS_A_LESSON,
    AdaptivePolicy,
    RestingPlan,
    num_best,
    num_different,
)
from eagle_rt.speculate.costs import Conditions, Observation, PartCost, StepCosts
from eagle_rt.speculate.forest import Candidates, no_candidates
from eagle_rt.speculate.guard import DRAFTS_A_PLAIN_STEP, FIRST_BAN, Guard
from eagle_rt.speculate.policy import DraftPlan, StepRecord
from eagle_rt.speculate.prices import Price
from eagle_rt.speculate.promises import (
    FIRST_PROMISES,
    LIKELY_CHANCE,
    NUM_COMMON,
    NUM_OF_A_TRY,
    NUM_RECENT,
    CommonPromises,
    DraftHistory,
    held_to,
    utilities_at,
)
from eagle_rt.speculate.sequences import HostSequence, SequenceRows
from eagle_rt.tree_shape import TreeShape


def costs(start: float, level: float, node: float) -> StepCosts:
    """Milliseconds of a first level, of a further one and of each verified node; a plain step takes 10."""
    parts = {name: PartCost([1.0, 2.0], [ms, ms + 1e-6], 0.0) for name, ms in (("start", start), ("level", level))}
    return StepCosts({**parts, "verify": PartCost([1.0, 101.0], [10.0, 10.0 + 100 * node], 0.0)})


def policy(step_costs: StepCosts) -> AdaptivePolicy:
    return AdaptivePolicy(step_costs, AcceptanceEstimator(4), None)


def drive(guard: Guard, speed_with: float, speed_without: float, num_steps: int) -> list[bool]:
    """Which of the steps draft, where those gain so much in the same time."""
    drafted = []
    for _ in range(num_steps):
        drafts = guard.allows_drafts()
        guard.saw(drafts, speed_with if drafts else speed_without, 1.0)
        drafted.append(drafts)
    return drafted


def test_drafts_that_do_not_gain_are_stopped_whatever_the_estimates_say() -> None:
    drafted = drive(Guard(), 0.5, 1.0, 2000)
    assert not any(drafted[24 : 24 + FIRST_BAN - 12])
    assert sum(drafted) < 0.1 * len(drafted)
    assert any(drafted[1000:]), "they are tried again"


def test_drafts_that_gain_go_on() -> None:
    assert sum(drive(Guard(), 2.0, 1.0, 1000)) > 0.97 * 1000
    little = drive(Guard(), 1.05, 1.0, 1000)
    assert sum(little) == pytest.approx(1000 * DRAFTS_A_PLAIN_STEP / (DRAFTS_A_PLAIN_STEP + 1), rel=0.02)


def test_the_guard_follows_a_change() -> None:
    guard = Guard()
    assert sum(drive(guard, 2.0, 1.0, 300)) > 280
    assert sum(drive(guard, 0.5, 1.0, 300)) < 120
    assert sum(drive(guard, 2.0, 1.0, 2000)[1000:]) > 900


@pytest.mark.parametrize(("node", "expected"), [(0.001, 4), (2.0, 2), (6.0, 1), (9.5, 0)])
def test_as_many_nodes_are_verified_as_are_worth_their_row(node: float, expected: int) -> None:
    """At 10 ms a plain step, a node of x ms has to be accepted with a probability of x / 10."""
    price = Price(costs(0.1, 0.1, node), 1.0, Conditions(1, 64.0, is_sampled=False))
    promises = np.array([0.9, 0.5, 0.1, 0.05])
    assert np.count_nonzero(promises > price.node) == expected
    assert price.node == pytest.approx(node / 10, rel=1e-3)


def test_a_first_level_is_the_cheaper_the_more_share_it() -> None:
    """Of promises too small for one of the batch to pay for a level, all together do."""
    shared = policy(costs(start=3.0, level=50.0, node=0.1))
    price = shared.price(Conditions(8, 64.0, is_sampled=False))
    promises = np.array([[0.5], [0.0]])
    assert price.utility(promises) < price.starts[1]
    assert shared.pays(price, promises)


def step(adaptive: AdaptivePolicy, name: str = "a") -> DraftPlan:
    """One step of a sequence for which nothing is drafted, or whose drafts are not recorded."""
    rows = SequenceRows.__new__(SequenceRows)  # nothing is cached
    plan = adaptive.begin([HostSequence(name, [0] * 64, rows, 0.0, TreeShape(2, 2, 4))], [1])
    if not plan.drafters:
        nothing = np.zeros(0, dtype=np.int64)
        plan.learn(StepRecord(no_candidates(), nothing, np.zeros(0), 1, [Observation("verify", 1, 1, 10.0)]))
    return plan


def test_where_nothing_pays_steps_rest_until_a_request_leaves() -> None:
    hopeless = policy(costs(start=50.0, level=50.0, node=20.0))
    asked = [isinstance(step(hopeless), RestingPlan) for _ in range(200)]
    assert asked.count(False) < 40
    assert asked[-40:].count(False) >= 40 // RESTING_STEPS_A_LESSON, "some are learned from"
    while not hopeless.num_resting:
        step(hopeless)
    hopeless.forget("a")
    assert not isinstance(step(hopeless, "b"), RestingPlan)


def test_steps_rest_for_longer_where_nothing_nearly_pays() -> None:
    """What drafts promise is known only so well."""
    for share, most in ((0.9, MOST_RESTING_STEPS_WHERE_NEARLY), (0.7, MOST_RESTING_STEPS)):
        common = CommonPromises()
        free = Price(costs(start=0.0, level=50.0, node=0.1), 1.0, Conditions(1, 64.0, is_sampled=False))
        nearly = policy(costs(start=10.0 * common.utility(free)[0] / share, level=50.0, node=0.1))
        rests = []
        for _ in range(100):
            nearly.allowance_ms = 0.0
            assert not step(nearly).drafters
            rests.append(nearly.num_rested)
        assert max(rests) == most


def test_drafts_that_nearly_pay_are_tried_in_little_of_the_time() -> None:
    """What that is expected to lose is spent from an allowance."""
    common = CommonPromises()
    free = Price(costs(start=0.0, level=50.0, node=0.1), 1.0, Conditions(1, 64.0, is_sampled=False))
    start = 10.0 * common.utility(free)[0] / 0.9
    nearly = policy(costs(start=start, level=50.0, node=0.1))
    assert not step(nearly).drafters
    nearly.forget("a")  # the rest after that
    nearly.allowance_ms = before = 0.2 * start
    assert step(nearly).drafters == [0]
    assert before - nearly.allowance_ms == pytest.approx(0.1 * start, rel=0.1)
    hopeless = policy(costs(start=2 * start, level=50.0, node=0.1))
    hopeless.allowance_ms = start
    assert not step(hopeless).drafters


def test_resting_steps_count_as_plain_ones() -> None:
    """Otherwise the rate would remain that of the last drafts, and nothing would be worth drafting at it."""
    adaptive = policy(costs(start=50.0, level=50.0, node=20.0))
    conditions = Conditions(1, 64.0, is_sampled=False)
    for _ in range(200):
        adaptive.prices.speed(conditions).add(3.0, 1.0)
    for _ in range(200):
        step(adaptive)
    assert adaptive.prices.speed(conditions).value < 1.1


def promise(chance: float) -> np.ndarray:
    """Of a single node."""
    promises = np.zeros(FIRST_PROMISES.shape[1:])
    promises[0, 0] = chance
    return promises


def test_what_few_have_promised_is_held_to_what_all_have() -> None:
    """As far as chance explains the difference."""
    assert held_to(0.5, 0.04, 0.9, count=0) == 0.5
    assert held_to(0.5, 0.04, 0.5, count=8) == 0.5
    assert held_to(0.5, 0.0, 0.9, count=1) == 0.9
    for mean in (0.1, 0.9):
        values = [held_to(0.5, 0.04, mean, count) for count in (1, 2, 8, 1000)]
        assert values[0] == pytest.approx(0.5), "no more than two standard errors away"
        assert abs(values[2] - 0.5) == pytest.approx(0.4 * (1 - LIKELY_CHANCE * 0.04 / (8 * 0.16)))
        assert values[3] == pytest.approx(mean, abs=0.01)


def test_sequences_are_believed_to_be_like_the_others() -> None:
    """Until they have made drafts of their own that are clearly others; a try after a pause counts as several."""
    price = Price(costs(start=0.1, level=50.0, node=0.1), 1.0, Conditions(1, 64.0, is_sampled=False))
    rng = np.random.default_rng(0)
    common = CommonPromises()
    one, other = DraftHistory(common), DraftHistory(common)
    for _ in range(NUM_COMMON):
        one.add(promise(rng.uniform(0.4, 0.8)))
    of_all = price.utility(common.latest).mean()
    assert utilities_at(price, [one, other]) == pytest.approx([of_all, of_all])
    other.own.add(promise(0.5))
    other.price = None
    assert utilities_at(price, [other]) == pytest.approx([of_all]), "one says little"
    other.own.add(promise(0.0), 8)
    other.price = None
    assert utilities_at(price, [other])[0] < 0.1 * of_all
    other.num_idle = 1
    other.add(promise(1.0))
    assert utilities_at(price, [other])[0] == pytest.approx((price.utility(promise(1.0)) * NUM_OF_A_TRY) / 8, rel=0.3)


def test_beliefs_follow_a_change() -> None:
    """The latest drafts of all are believed where they are clearly others than those before."""
    price = Price(costs(start=0.1, level=50.0, node=0.1), 1.0, Conditions(1, 64.0, is_sampled=False))
    common = CommonPromises()
    for _ in range(NUM_COMMON):
        common.add(promise(0.0))
    other = DraftHistory(common)
    assert utilities_at(price, [other]) == [common.utility(price)[0]] == [0.0]
    for _ in range(NUM_RECENT - 1):
        common.add(promise(0.8))
    assert utilities_at(price, [other]) == [common.utility(price)[0]] == [0.0], "looked at now and then only"
    common.add(promise(0.8))
    assert common.utility(price)[0] == pytest.approx(0.79, abs=0.1)
    assert utilities_at(price, [other]) == [common.utility(price)[0]]


def test_beliefs_are_worked_out_once_for_each_price() -> None:
    """And anew for another price, or after a draft."""
    conditions = Conditions(1, 64.0, is_sampled=False)
    cheap, dear = (Price(costs(start=0.1, level=50.0, node=node), 1.0, conditions) for node in (0.1, 5.0))
    history = DraftHistory(CommonPromises())
    first = utilities_at(cheap, [history])
    history.own.add(promise(0.0), 8)  # unseen
    assert utilities_at(cheap, [history]) == first
    seen = utilities_at(dear, [history])
    assert seen[0] < first[0]
    history.add(np.ones(FIRST_PROMISES.shape[1:]))
    assert utilities_at(dear, [history])[0] > seen[0]


def test_lists_of_prices_are_what_the_costs_say() -> None:
    """However far they are asked for, and in whatever order."""
    step_costs = costs(start=3.0, level=2.0, node=0.5)
    step_costs.parts["level"].per_sequence = 0.7
    conditions = Conditions(4, 64.0, is_sampled=False)
    price = Price(step_costs, 1.5, conditions)
    for count in (3, 1, 40, 12):
        nodes = price.rate * step_costs.ms("verify", 4, 4 + np.arange(count + 1.0), conditions)
        assert price.verify.up_to(count) == pytest.approx(nodes)
        owners = np.random.default_rng(count).integers(0, 4, count)
        num_sequences = np.array([len(set(owners[: place + 1].tolist())) for place in range(count)])
        assert num_different(owners, 4).tolist() == num_sequences.tolist()
        expected = price.rate * step_costs.ms("level", num_sequences, np.arange(1.0, count + 1), conditions)
        assert price.level(num_sequences) == pytest.approx(expected)


def test_rows_that_fill_one_tile_have_a_price() -> None:
    """In half precision the second row costs what the tenth does."""
    tiled = costs(start=0.1, level=0.1, node=0.1)
    tiled.parts["verify"].is_tiled = True
    with np.errstate(all="raise"):
        prices = [Price(tiled, 1.0, Conditions(batch_size, 64.0, is_sampled=False)) for batch_size in range(1, 40)]
    assert all(0 < price.node < 0.5 for price in prices)


def test_the_number_that_is_worth_most() -> None:
    assert num_best(np.array([1.0, 3.0, 2.0, 3.0]), 0.0) == 2
    assert num_best(np.array([1.0, 3.0]), 3.0) == 0
    assert num_best(np.zeros(0), -1.0) == 0


def test_every_level_has_its_price() -> None:
    """A draft is worth its levels down to where they stop paying, each for itself."""
    price = Price(costs(start=0.1, level=3.0, node=0.1), 1.0, Conditions(1, 64.0, is_sampled=False))
    promises = np.array([[0.9, 0.3], [0.8, 0.1], [0.25, 0.0]])
    node, deeper = price.node, price.node + price.level_row
    expected = 0.9 + 0.3 - 2 * node + 0.8 + 0.1 - 2 * deeper - price.level_sequence
    assert price.utility(promises) == pytest.approx(expected)
    assert deeper + price.level_sequence > 0.25


def test_the_first_verified_row_may_cost_more_than_all_others() -> None:
    """Drafts that promise less than that are worth nothing, those that promise more are worth the rest; where all draft they share
    it, and where few do they pay it all."""
    conditions = Conditions(4, 64.0, is_sampled=False)
    jump = costs(start=0.1, level=50.0, node=0.1)
    verify = jump.parts["verify"]
    verify.knots, verify.values = [4.0, 8.0, 24.0], [10.0, 18.4, 20.0]
    price = Price(jump, 1.0, conditions)
    assert (price.node, price.any_node) == (pytest.approx(0.04), pytest.approx(3.2))
    assert price.utility(np.array([[0.8]])) == 0.0
    assert price.utility(np.array([[0.9]])) == pytest.approx(0.9 - 0.04 - 3.2 / 4)
    assert price.starts[2] - price.starts[4] == pytest.approx(3.2 / 2, abs=0.05)


def begun(adaptive: AdaptivePolicy, temperatures: list[float]) -> DraftPlan:
    rows = SequenceRows.__new__(SequenceRows)  # nothing is cached
    names = [f"{number}" for number in range(len(temperatures))]
    sequences = [
        HostSequence(name, [0] * 64, rows, own, TreeShape(4, 3, 24)) for name, own in zip(names, temperatures, strict=True)
    ]
    plan = adaptive.begin(sequences, [1] * len(sequences))
    assert plan.drafters == list(range(len(sequences)))
    return plan


def level(owners: np.ndarray, parents: np.ndarray, depth: int, chances: np.ndarray) -> Candidates:
    logs = np.log(chances)
    return Candidates(owners, parents, parents, np.full(len(owners), depth), logs, logs, logs.copy())


@pytest.mark.parametrize(("children", "is_worth_it"), [((0.9, 0.1), True), ((0.5, 0.5), False)])
def test_a_level_is_worth_its_good_children(children: tuple[float, float], is_worth_it: bool) -> None:
    """At a price of 0.4, children of a node with a chance of 0.5 are worth something if some of them are sure, but not if all have
    the same mean."""
    adaptive = policy(costs(start=0.01, level=0.01, node=4.0))
    adaptive.children[:] = np.maximum(0.0, np.array(children)[:, None] - CHILD_PRICES).mean(axis=0)
    plan = begun(adaptive, [0.0])
    nodes = level(np.zeros(1, dtype=np.int64), np.full(1, -1), 1, np.array([0.5]))
    assert len(plan.expand(nodes, 0)) == is_worth_it


def test_what_children_gain_is_learned_at_every_price() -> None:
    """Against loops over nodes; for greedy and for sampled sequences, and for each depth, by itself."""
    rng = np.random.default_rng(0)
    adaptive = policy(costs(start=0.01, level=0.01, node=1.0))
    before = adaptive.children.copy()
    plan = begun(adaptive, [0.0, 1.0, 0.0])
    owners = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    parents = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    chances_of_parents = np.array([0.9, 0.3, 0.7, 0.5])
    deeper = level(owners, parents, 2, rng.uniform(0.05, 0.95, 8))
    values = plan.values(deeper, np.log(chances_of_parents[parents]))
    for _ in range(200):
        plan.values(deeper, np.log(chances_of_parents[parents]))
    conditional = np.exp(values) / chances_of_parents[parents]
    for kind, own in ((0, [0, 1, 3]), (1, [2])):
        for place, price in enumerate(CHILD_PRICES):
            gains = [
                chances_of_parents[parent] * sum(max(0.0, chance - price) for chance in conditional[parents == parent])
                for parent in own
            ]
            expected = sum(gains) / chances_of_parents[own].sum()
            assert adaptive.children[kind, 1, place] == pytest.approx(expected, abs=1e-4)
    np.testing.assert_array_equal(np.delete(adaptive.children, 1, axis=1), np.delete(before, 1, axis=1))
