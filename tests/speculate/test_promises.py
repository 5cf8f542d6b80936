"""What the drafts of sequences have promised."""

import numpy as np
import pytest
from step_costs import costs

from eagle_rt.speculate.costs import Conditions
from eagle_rt.speculate.prices import Pace, Price
from eagle_rt.speculate.promises import (
    DRAFTS_OF_A_TRY,
    FIRST_PROMISES,
    FIRST_WAIT,
    LIKELY_CHANCE,
    NUM_COMMON,
    NUM_RECENT,
    CommonPromises,
    DraftHistory,
    held_to,
    utilities_at,
)


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
    for mean in (0.25, 0.75):
        values = [held_to(0.5, 0.04, mean, count) for count in (1, 2, 8, 1000)]
        assert values[0] == pytest.approx(0.5), "chance explains it"
        assert abs(values[2] - 0.5) == pytest.approx(0.25 * (1 - LIKELY_CHANCE * 0.04 / (8 * 0.0625)))
        assert values[3] == pytest.approx(mean, abs=0.01)


def test_sequences_are_believed_to_be_like_the_others() -> None:
    """Until they have made drafts of their own that are clearly others."""
    price = Price(costs(start=0.1, level=50.0, node=0.1), Pace(), Conditions(1, 64.0, is_sampled=False))
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


def test_a_try_lasts_for_some_steps_and_comes_again_after_a_wait_that_doubles_while_it_fails() -> None:
    """What the head has to read first is read once."""
    history, waits = DraftHistory(CommonPromises()), []
    for has_failed in (True, True, False):
        for _ in range(DRAFTS_OF_A_TRY):
            history.tried(has_failed)
            waits.append(history.wait)
    assert waits == [1, 1, 1, 2 * FIRST_WAIT, 1, 1, 1, 4 * FIRST_WAIT, 1, 1, 1, FIRST_WAIT]


def test_beliefs_follow_a_change() -> None:
    """The latest drafts of all are believed where they are clearly others than those before."""
    price = Price(costs(start=0.1, level=50.0, node=0.1), Pace(), Conditions(1, 64.0, is_sampled=False))
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
    cheap, dear = (Price(costs(start=0.1, level=50.0, node=node), Pace(), conditions) for node in (0.1, 5.0))
    history = DraftHistory(CommonPromises())
    first = utilities_at(cheap, [history])
    history.own.add(promise(0.0), 8)  # unseen
    assert utilities_at(cheap, [history]) == first
    seen = utilities_at(dear, [history])
    assert seen[0] < first[0]
    history.add(np.ones(FIRST_PROMISES.shape[1:]))
    assert utilities_at(dear, [history])[0] > seen[0]
