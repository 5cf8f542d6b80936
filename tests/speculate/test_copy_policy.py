"""Which copies pay where no head drafts: by what one more row costs, and by what steps have taken."""

import numpy as np
import pytest
from step_costs import costs

from eagle_rt.speculate.copy_policy import STEPS_OF_A_PRICE, CopyStep, FixedCopies, PayingCopies
from eagle_rt.speculate.costs import CopyCosts, Observation, PartCost, fitted_copy_costs
from eagle_rt.speculate.forest import Ints
from eagle_rt.speculate.members import conditions_of
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape

TREE = TreeShape(7, 1, 8)


def sequence(name: str = "a", bounds: TreeShape | None = TREE) -> HostSequence:
    return HostSequence(name, list(range(40)), range(80), 0.0, bounds)


def kept(
    policy: PayingCopies | FixedCopies, chances: list[float], owners: list[int] | None = None, between_ms: float = 0.0
) -> list[int]:
    of_each = np.array(owners or [0] * len(chances))
    sequences = [sequence(str(owner)) for owner in range(1 + int(of_each.max()))]
    return policy.keep(sequences, np.array(chances), of_each, between_ms).tolist()


def rest(policy: PayingCopies, ms: float, count: int = 10) -> None:
    for _ in range(count):
        policy.add_rest(1, ms)


def paying(node_ms: float, max_batch_size: int | None = None) -> PayingCopies:
    """Where a plain step takes 10 ms, and each further row so many."""
    return PayingCopies(costs(0.0, 0.0, node_ms), max_batch_size)


@pytest.mark.parametrize(("node_ms", "count"), [(0.5, 4), (3.0, 2), (6.0, 1), (9.5, 0)])
def test_a_token_is_verified_where_it_is_likelier_than_its_row_is_dear(node_ms: float, count: int) -> None:
    """A row of 3 ms costs 0.3 tokens, at the speed of plain decoding."""
    assert kept(paying(node_ms), [0.9, 0.5, 0.2, 0.1]) == list(range(count))


def test_copies_of_several_sequences_compete() -> None:
    """And none has more nodes than its tree may have."""
    policy = paying(3.0)
    assert kept(policy, [0.95, 0.2, 0.9, 0.7], [0, 0, 1, 1]) == [0, 2, 3]
    assert kept(paying(0.01), [0.9] * 9 + [0.8], [0] * 9 + [1]) == [*range(7), 9]


def test_larger_batches_than_allowed_copy_nothing() -> None:
    for policy in (paying(0.1, 1), FixedCopies(1)):
        assert kept(policy, [0.9], [0]) == [0]
        assert kept(policy, [0.9, 0.9], [0, 1]) == []


def test_the_least_chance_is_known_once_something_was_decided() -> None:
    """No copy that begins with less is worth its rows, so that nobody need be asked about it: in batches of that size, and not for
    ever, since prices fall again."""
    policy = paying(3.0)
    assert policy.least_chance(1) == 0.0
    kept(policy, [0.1])
    assert policy.least_chance(1) == pytest.approx(0.3, rel=0.01)
    assert policy.least_chance(2) == 0.0
    rest(policy, 10.0, STEPS_OF_A_PRICE - 1)
    assert policy.least_chance(1) > 0.0
    rest(policy, 10.0, 1)
    assert policy.least_chance(1) == 0.0
    assert FixedCopies(None).least_chance(1) == 0.0


def test_costs_that_are_stairs_hide_no_copy() -> None:
    """The first node costs two tokens, the next six nothing: seven at 0.29 each pay."""
    policy = PayingCopies(CopyCosts.of(PartCost([1.0, 2.0, 8.0, 101.0], [10.0, 30.0, 30.0, 123.0], 0.0)), None)
    kept(policy, [0.5])
    assert 0.1 < policy.least_chance(1) < 0.29
    assert kept(policy, [0.29] * 7) == list(range(7))


def test_what_rows_cost_is_learned_from_steps() -> None:
    """Three rows beside the root that take much longer than was believed are verified no more; plain ones in between show that it
    is not the machine."""
    policy, own, chances = paying(0.1), [sequence("0")], [0.5, 0.4, 0.3]
    assert kept(policy, chances) == [0, 1, 2]
    for _ in range(40):
        rest(policy, 10.0)
        if not kept(policy, chances):
            break
        policy.learn(own, 2, CopyStep(4, 40.0))
    assert kept(policy, chances) == []


def test_plain_steps_say_what_all_steps_take() -> None:
    """And what passes between them: where they take twice as long as was believed, a millisecond is worth half as much."""
    policy, conditions = paying(3.0), conditions_of([sequence("0")])
    kept(policy, [0.5])
    before = policy.prices.at(conditions)
    for _ in range(40):
        rest(policy, 20.0)
        kept(policy, [0.5], between_ms=1.5)
    price = policy.prices.at(conditions)
    assert price.plain_ms == pytest.approx(21.5, rel=0.02)
    assert before.plain_ms == pytest.approx(10.0)
    assert price.rate == pytest.approx(before.rate * 10 / 21.5, rel=0.02)


def test_time_is_dearer_while_much_is_gained_in_it() -> None:
    """A row of 3 ms costs 0.3 tokens in plain decoding, and at twice the speed 0.6."""
    policy, own = paying(3.0), [sequence("0")]
    assert kept(policy, [0.5]) == [0]
    for _ in range(200):
        kept(policy, [0.99, 0.98, 0.97])
        policy.learn(own, 4, CopyStep(4, 19.0))
    assert policy.prices.at(conditions_of(own)).speed == pytest.approx(4 / 1.9, rel=0.05)
    assert kept(policy, [0.5]) == []
    assert kept(policy, [0.7]) == [0]


def test_plain_steps_are_made_where_all_have_copies() -> None:
    """As many in a row as show what they take, here two; after 16 steps with copies, then after 32, ... up to 256, if drafts gain
    so much that more would cost too much; and after 16 again where they took much more or less than was believed."""
    policy, own, steps = paying(0.01), [sequence("0")], []

    def step(plain_ms: float) -> None:
        if places := kept(policy, [0.9, 0.8, 0.7]):
            policy.learn(own, 3, CopyStep(1 + len(places), 10.1))
        else:
            policy.add_rest(1, plain_ms)
        steps.append(bool(places))

    def distances() -> list[int]:
        return [len(run) for run in "".join("+" if step else "-" for step in steps).split("--")]

    for _ in range(900):
        step(10.0)
    assert distances()[:5] == [15, 31, 63, 127, 255]
    assert steps.count(False) % 2 == 0
    steps.clear()
    for _ in range(600):
        step(7.0)
    assert 15 in distances()[1:3]


def test_plain_steps_show_that_copies_do_not_pay() -> None:
    """Which had been believed to take less beside them than a machine in a fast second lets them take."""
    policy, own, num_copied = PayingCopies(costs(0.0, 0.0, 0.3), None), [sequence("0")], 0
    for number in range(300):
        if places := kept(policy, [0.5, 0.3]):
            policy.learn(own, 2, CopyStep(1 + len(places), 9.0))
            num_copied += number >= 150
        else:
            policy.add_rest(1, 4.0)
    assert num_copied < 15


def test_it_is_as_dear_while_a_head_gains_as_much() -> None:
    policy, own = paying(3.0), [sequence("0")]
    for _ in range(200):
        kept(policy, [0.2])
        policy.add_drafted(own, 3, 15.0)
    assert policy.prices.at(conditions_of(own)).speed == pytest.approx(2.0, rel=0.05)
    assert kept(policy, [0.5]) == []
    assert policy.costs.ms("verify", 1, 1, conditions_of(own)) == pytest.approx(10.0)  # of which it says nothing


def test_what_is_learned_of_copies_says_nothing_of_a_heads_trees() -> None:
    theirs, own = costs(2.0, 1.0, 0.1), [sequence("0")]
    policy = PayingCopies(theirs.of_verifying(), None)
    kept(policy, [0.9])
    for _ in range(50):
        policy.learn(own, 2, CopyStep(2, 30.0))
    one = conditions_of(own)
    assert policy.costs.ms("verify", 1, 2, one) == pytest.approx(30.0, rel=0.05)
    assert theirs.ms("verify", 1, 2, one) == pytest.approx(10.1, rel=0.01)


def test_what_is_learned_of_copies_says_nothing_of_plain_steps() -> None:
    policy, own = PayingCopies(costs(0.0, 0.0, 0.1).of_verifying(), None), [sequence("0")]
    one = conditions_of(own)
    kept(policy, [0.9])
    for _ in range(200):
        policy.learn(own, 2, CopyStep(2, 15.0))
    assert policy.costs.ms("verify", 1, np.array([1, 2]), one) == pytest.approx([10.0, 15.0], rel=0.05)
    for _ in range(40):
        rest(policy, 7.0)
        kept(policy, [0.9])
    assert policy.costs.ms("verify", 1, np.array([1, 2]), one) == pytest.approx([7.0, 15.0], rel=0.05)


def test_costs_without_a_head() -> None:
    """Only verifying takes time."""
    measured = [Observation("verify", 1, count, 10.0 + count) for count in (1, 2, 4, 8)]
    found, one = fitted_copy_costs(measured), conditions_of([sequence()])
    assert found.ms("verify", 1, np.array([1.0, 6.0]), one) == pytest.approx([11.0, 16.0], rel=0.02)
    for part in ("start", "level"):
        assert float(found.ms(part, 1, 3, one)) < 1e-5


def test_a_step_after_one_without_drafts_says_nothing_of_what_rows_cost() -> None:
    policy, own = paying(0.1), [sequence("0")]
    kept(policy, [0.9])
    for _ in range(50):
        policy.learn(own, 2, CopyStep(2, 30.0, is_warm=False))
    one = conditions_of(own)
    assert policy.costs.ms("verify", 1, 2, one) == pytest.approx(10.1)
    assert policy.prices.steps(one).pace.speed < 1.0  # but of how fast all goes


def test_all_of_a_copy_is_verified_where_that_is_asked_for() -> None:
    everything: Ints = np.arange(3)
    assert kept(FixedCopies(None), [0.9, 0.01, 0.001]) == everything.tolist()
