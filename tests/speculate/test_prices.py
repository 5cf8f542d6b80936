"""What time costs in tokens."""

from itertools import groupby

import numpy as np
import pytest
from step_costs import costs

from eagle_rt.kernels.packed_linear import AMX_TILES
from eagle_rt.speculate.costs import Conditions
from eagle_rt.speculate.prices import FIRST_STAY, LONGEST_STEP, Pace, Price, PriceBook, RecentSteps, Stay, Verified


@pytest.mark.parametrize(("node", "expected"), [(0.001, 4), (2.0, 2), (6.0, 1), (9.5, 0)])
def test_as_many_nodes_are_verified_as_are_worth_their_row(node: float, expected: int) -> None:
    """At 10 ms a plain step, a node of x ms has to be accepted with a probability of x / 10."""
    price = Price(costs(0.1, 0.1, node), Pace(), Conditions(1, 64.0, is_sampled=False))
    promises = np.array([0.9, 0.5, 0.1, 0.05])
    assert np.count_nonzero(promises > price.node) == expected
    assert price.node == pytest.approx(node / 10, rel=1e-3)


def test_lists_of_prices_are_what_the_costs_say() -> None:
    """However far they are asked for, and in whatever order."""
    step_costs = costs(start=3.0, level=2.0, node=0.5)
    step_costs.parts["level"].per_sequence = 0.7
    conditions = Conditions(4, 64.0, is_sampled=False)
    price = Price(step_costs, Pace(1.2, 1.5), conditions)
    for count in (3, 1, 40, 12):
        nodes = price.rate_of_trees * step_costs.ms("verify", 4, 4 + np.arange(count + 1.0), conditions)
        assert price.verify(count) == pytest.approx(nodes)
        levels = [price.rate_of_trees * float(step_costs.ms("level", min(rows, 4), rows, conditions)) for rows in range(count + 1)]
        assert price.level(count).tolist() == pytest.approx(levels)


def test_rows_that_fill_one_tile_have_a_price() -> None:
    """In half precision the second row costs what the tenth does."""
    tiled = costs(start=0.1, level=0.1, node=0.1)
    tiled.parts["verify"].tiles = AMX_TILES
    with np.errstate(all="raise"):
        prices = [Price(tiled, Pace(), Conditions(batch_size, 64.0, is_sampled=False)) for batch_size in range(1, 40)]
    assert all(0 < price.node < 0.5 for price in prices)


def test_every_level_has_its_price() -> None:
    """A draft is worth its levels down to where they stop paying, each for itself."""
    price = Price(costs(start=0.1, level=3.0, node=0.1), Pace(), Conditions(1, 64.0, is_sampled=False))
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
    price = Price(jump, Pace(), conditions)
    assert (price.node, price.any_node) == (pytest.approx(0.04), pytest.approx(3.2))
    assert price.utility(np.array([[0.8]])) == 0.0
    assert price.utility(np.array([[0.9]])) == pytest.approx(0.9 - 0.04 - 3.2 / 4)
    assert price.starts[2] - price.starts[4] == pytest.approx(3.2 / 2, abs=0.05)


def test_nodes_that_cost_less_than_the_last_one_is_worth_are_worth_the_rest() -> None:
    """Three nodes for 0.6 tokens, of which the last has a chance of 0.3: others must have more than that, and then pay 0.2."""
    step_costs, conditions = costs(start=0.1, level=50.0, node=0.1), Conditions(1, 64.0, is_sampled=False)
    cheap = Price(step_costs, Pace(verified=Verified(3.0, 6.0, 0.3)), conditions)
    assert (cheap.node, cheap.node_paid, cheap.any_node) == (0.3, pytest.approx(0.2), 0.0)
    assert cheap.utility(np.array([[0.5, 0.4, 0.25]])) == pytest.approx(0.3 + 0.2)
    dear = Price(step_costs, Pace(verified=Verified(3.0, 15.0, 0.3)), conditions)
    assert (dear.node, dear.node_paid, dear.any_node) == (0.3, 0.3, pytest.approx(0.6))
    assert dear.utility(np.array([[0.9, 0.6, 0.25]])) == pytest.approx(0.6 + 0.3 - 0.6)


def test_a_first_level_costs_what_its_head_reads() -> None:
    step_costs = costs(start=1.0, level=50.0, node=0.1)
    start = step_costs.parts["start"]
    start.knots, start.values = [1.0, 101.0], [1.0, 11.0]
    for rows_read in (1.0, 4.5):
        price = Price(step_costs, Pace(rows_read=rows_read), Conditions(4, 64.0, is_sampled=False))
        assert price.starts[4] == pytest.approx(price.rate * (1.0 + 0.1 * (4 * rows_read - 1.0)))


def test_the_pace_is_that_of_the_latest_steps() -> None:
    """What a sequence gains from a draft is asked of those that draft."""
    steps = RecentSteps(Pace(), batch_size=1)
    for _ in range(300):
        steps.add(gained=1.5, plain=1.2, read=0.2, share_drafted=0.25, verified=Verified(6.0, 3.0, 0.2))
        steps.add_rests(1, ms=1.0)
    assert steps.pace.speed == pytest.approx(2.5 / 2.2, rel=0.01)
    assert steps.pace.speed_of_trees == pytest.approx(2.5 / 2.0, rel=0.01)
    assert steps.pace.rows_read == pytest.approx(3.0, rel=0.01)
    assert steps.pace.verified == Verified(pytest.approx(6.0), pytest.approx(3.0), pytest.approx(0.2))
    book = PriceBook(costs(start=1.0, level=1.0, node=0.1))
    book.steps(Conditions(4, 64.0, is_sampled=False)).add(1.5, 1.2, 0.0, 1.0, Verified(6.0, 3.0, 0.2))
    known, other = (book.steps(Conditions(size, 64.0, is_sampled=False)).pace for size in (4, 32))
    assert (other.speed, other.rows_read) == (known.speed, known.rows_read)
    assert known.verified is not None
    assert other.verified is None, "of a batch of another size"


def test_a_step_counts_as_long_as_others_take() -> None:
    """For a machine that stands still; but if all take that long, they count as that."""
    steps = RecentSteps(Pace(), batch_size=16)
    for _ in range(50):
        assert steps.counted(3.0) == 3.0
    assert steps.counted(100.0) == pytest.approx(3.0 * LONGEST_STEP, rel=0.02)
    assert steps.counted(2.5) == 2.5
    assert [steps.counted(9.0) for _ in range(50)][-1] == 9.0


def test_what_passes_between_steps_belongs_to_a_plain_one() -> None:
    """Steps with drafts save it."""
    book = PriceBook(costs(start=1.0, level=50.0, node=0.1))
    conditions = Conditions(4, 64.0, is_sampled=False)
    alone = book.at(conditions)
    book.between_ms = 2.0
    book.add_steps(1)
    with_others = book.at(conditions)
    assert with_others.plain_ms == alone.plain_ms + 2.0
    assert with_others.rate == pytest.approx(alone.rate * alone.plain_ms / with_others.plain_ms)


def test_what_reading_many_rows_takes_is_learned() -> None:
    """It may take several times as long as was believed; one reading alone says nothing unheard of."""
    step_costs = costs(start=1.0, level=50.0, node=0.1)
    step_costs.parts["start"].knots, step_costs.parts["start"].values = [1.0, 101.0], [1.0, 2.0]
    book, conditions = PriceBook(step_costs), Conditions(4, 64.0, is_sampled=False)
    first = book.at(conditions)
    assert first.missed_row / first.rate == pytest.approx(0.01)
    for ms_a_row, expected in ((0.03, 0.03), (0.015, 0.015), (-9.0, None)):
        for _ in range(60 if expected else 1):
            price = book.at(conditions)
            before = price.missed_row / price.rate
            book.add_reading(price, 4, 500.0, price.first_levels[4] / price.rate + 500.0 * ms_a_row)
            for _ in range(60):
                book.add_steps(1)
        now = book.at(conditions)
        assert now.missed_row / now.rate == pytest.approx(expected or before, rel=0.03 if expected else 0.2)


def test_how_long_sequences_stay() -> None:
    stay = Stay()
    assert stay.steps_left(0) == FIRST_STAY
    assert stay.steps_left(10) == FIRST_STAY - 10
    assert stay.steps_left(1000) == FIRST_STAY / 2, "some stay for longer"
    for _ in range(300):
        for _ in range(25):
            stay.add_steps(4)
        stay.add_end()
    assert stay.num_steps == pytest.approx(100.0, rel=0.05)
    for _ in range(100_000):
        stay.add_steps(4)
    assert stay.steps_left(100) > 1000, "nobody leaves any more"


def test_prices_are_worked_out_anew_now_and_then() -> None:
    """However long their batch size was not met, and however often they are asked for in a step."""
    book = PriceBook(costs(start=1.0, level=1.0, node=0.1))
    four, five = (Conditions(size, 64.0, is_sampled=False) for size in (4, 5))

    def at_next_step(conditions: Conditions) -> Price:
        book.add_steps(1)
        assert book.at(conditions) is book.at(conditions)
        return book.at(conditions)

    prices = [at_next_step(four) for _ in range(200)]
    runs = [len(list(run)) for _, run in groupby(prices, key=id)]
    assert runs[:6] == [1, 2, 4, 8, 16, 25]
    kept = at_next_step(four)
    assert at_next_step(five) is not kept
    assert at_next_step(four) is kept
    for _ in range(40):
        at_next_step(five)
    assert book.last(four) is kept
    renewed = at_next_step(four)
    assert renewed is not kept
    for _ in range(8):
        book.steps(four).add_worth(-1.0)
    assert book.at(four) is not renewed, "drafts gain much less than it says"
