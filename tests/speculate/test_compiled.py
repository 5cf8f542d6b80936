"""What is compiled, against brute force; and as it is written against as it is compiled."""

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from eagle_rt.speculate import compiled
from eagle_rt.speculate.compiled import CHILD_PRICES, MORE_NODES
from eagle_rt.speculate.forest import Floats

MODULE = compiled
NAMES = [
    "descending",
    "chances_of_level",
    "learn_children",
    "gain_below",
    "best_places",
    "worth_of",
    "worth_expanding",
    "grown",
    "worth_verifying",
    "worth_of_drafts",
    "best_of_levels",
    "surprises_of",
]


def test_everything_is_compiled() -> None:
    pytest.importorskip("numba")
    own = [name for name, value in vars(compiled).items() if hasattr(value, "py_func")]
    assert own == NAMES


def worth(chances: Floats, prices: Floats) -> float:
    return max(sum(sorted(chances, reverse=True)[:count]) - prices[count] for count in range(len(chances) + 1))


def tiled_prices(rng: np.random.Generator, count: int) -> Floats:
    """Of 0, 1, ... nodes: jumps after every few."""
    tile, jump, each = int(rng.integers(1, 9)), rng.uniform(0.0, 1.0), rng.uniform(0.0, 0.1)
    return np.ceil(np.arange(count + 1) / tile) * jump + np.arange(count + 1) * each


def test_what_is_expanded_is_nearly_the_best(functions: Any) -> None:
    """Where all children of a node have known chances, against all sets of nodes: with prices that are no line, a level that does
    not pay for any node alone may pay for several, and nodes may be free or very dear."""
    rng = np.random.default_rng(0)
    lost, lost_by_none, lost_by_all = [], [], []
    for _ in range(200):
        num_nodes = int(rng.integers(1, 6))
        chances, others = rng.uniform(0.0, 1.0, num_nodes), rng.uniform(0.0, 1.0, int(rng.integers(0, 6)))
        of_children = rng.dirichlet(np.ones(4))[:3]
        children = np.tile(np.maximum(0.0, of_children[:, None] - CHILD_PRICES).sum(axis=0), (2, 1))
        so_far = np.concatenate((others, chances))
        verify = tiled_prices(rng, len(so_far) + 3 * num_nodes)
        level = rng.uniform(0.0, 0.4) + rng.uniform(0.0, 0.1) * np.arange(num_nodes + 1)
        net = {
            nodes: worth(np.concatenate([so_far, *(chances[node] * of_children for node in nodes)]), verify)
            - (level[size] if size else 0.0)
            for size in range(num_nodes + 1)
            for nodes in combinations(range(num_nodes), size)
        }
        owners, kinds = np.zeros(num_nodes, dtype=np.int64), np.zeros(1, dtype=np.int64)
        limits = np.full(1, num_nodes)
        chosen = functions.worth_expanding(chances, owners, kinds, limits, children, so_far, verify, level)
        best = max(net.values())
        lost.append(best - net[tuple(chosen.tolist())])
        lost_by_none.append(best - net[()])
        lost_by_all.append(best - net[tuple(range(num_nodes))])
    assert np.mean(lost) < 0.01
    assert np.quantile(lost, 0.9) < 0.02
    assert min(np.mean(lost_by_none), np.mean(lost_by_all)) > 0.05


def test_only_those_nodes_are_expanded_that_pay_for_their_rows(functions: Any) -> None:
    """Nodes whose only child is sure: a row costs 0.2, which those of 0.1 would pay for only together."""
    children, owners = np.tile(1.0 - CHILD_PRICES, (2, 1)), np.zeros(5, dtype=np.int64)
    chances, kinds, limits = np.array([0.9, 0.1, 0.1, 0.1, 0.8]), np.zeros(1, dtype=np.int64), np.full(1, 5)
    verify, level = 0.01 * np.arange(20.0), np.array([0.0, 0.3, 0.5, 0.7, 0.9, 1.1])
    chosen = functions.worth_expanding(chances, owners, kinds, limits, children, chances, verify, level)
    assert chosen.tolist() == [0, 4]


def test_what_children_gain_is_learned_at_every_price(functions: Any) -> None:
    """Against loops over parents, after so many times that nothing is left of before: those of roots count for each root, below
    others for as much as these are likely; greedy and sampled sequences, and depths, each by themselves."""
    owners = np.array([0, 0, 1, 2, 2, 0, 0, 1, 1, 2])
    parents = np.array([-1, -1, -1, -1, -1, 0, 0, 2, 2, 4])
    depths, kinds = np.array([1] * 5 + [2] * 5), np.array([0, 0, 1])
    conditional = np.array([0.6, 0.2, 0.9, 0.5, 0.4, 0.7, 0.1, 0.5, 0.4, 0.8])
    weights = np.ones(10)
    weights[5:] = conditional[parents[5:]]
    children, num_seen = np.full((4, 2, len(CHILD_PRICES)), 0.3), np.zeros((4, 2))
    for _ in range(800):
        functions.learn_children(children, num_seen, conditional * weights, owners, parents, depths, kinds)
    assert num_seen.tolist() == [[800, 800], [800, 800], [0, 0], [0, 0]]
    assert (children[2:] == 0.3).all(), "of what was not drafted"
    for depth in (0, 1):
        for kind in (0, 1):
            own = [node for node in range(10) if depths[node] == depth + 1 and kinds[owners[node]] == kind]
            by_parent = {(owners[node], parents[node]): weights[node] for node in own}
            gains = sum(weights[node] * np.maximum(0.0, conditional[node] - CHILD_PRICES) for node in own)
            assert children[depth, kind] == pytest.approx(gains / sum(by_parent.values()), abs=1e-5)


def test_a_level_grows_where_it_pays_and_where_it_teaches(functions: Any) -> None:
    """The two steps of it one by one; a lesson goes on below the best node of each, if its sequence may."""
    rng = np.random.default_rng(4)
    lines, kinds, num_steps, top_ks = rng.standard_normal((2, 3)), np.array([0, 1, 0]), np.array([2, 4, 4]), np.array([2, 1, 2])
    children = np.tile(np.maximum(0.0, 0.6 - CHILD_PRICES), (2, 1))
    verify, level = 0.1 * np.arange(11.0 + MORE_NODES + 1), 0.05 + 0.05 * np.arange(9.0)
    prices = np.full((2, 200), -1e9)  # further ones are of no interest
    prices[0, : len(verify)], prices[1, : len(level)] = verify, level
    members = np.stack((*lines, kinds, num_steps, top_ks))
    any_more = set()
    # The second depth is the last that anything is known of.
    path_and_biases = {1: np.array([0.1, 0.2, 9.0]), 2: np.array([0.1, 9.0, 0.2]), 4: np.array([0.1, 9.0, 0.2])}
    for depth in (1, 2, 4):
        for _ in range(30):
            log_probs, above, so_far = -rng.exponential(1.0, 8), -rng.exponential(1.0, 8), rng.uniform(size=3)
            owners, parent_values = np.sort(rng.integers(0, 3, 8)), rng.uniform(size=8)
            expected = functions.chances_of_level(log_probs, above, owners, lines, 0.1, 0.2, parent_values)
            all_expected = np.concatenate((so_far, expected))
            may_grow = np.where(depth < num_steps[owners], expected, 0.0)
            paying = functions.worth_expanding(may_grow, owners, kinds, top_ks, children, all_expected, verify, level)
            paying = {place for place in paying.tolist() if may_grow[place]}
            bests = {max(np.flatnonzero(owners == owner), key=lambda node: expected[node]) for owner in set(owners.tolist())}
            for is_lesson, wanted in ((False, paying), (True, paying | {best for best in bests if may_grow[best]})):
                values = parent_values.copy()
                own = log_probs, above, owners, values, so_far, depth, path_and_biases[depth]
                of_depth = np.zeros((depth + 1, *children.shape))
                of_depth[depth] = children
                places, chances = functions.grown(*own, members, is_lesson, of_depth, prices)
                assert (values.tolist(), chances.tolist()) == (expected.tolist(), all_expected.tolist())
                assert places.tolist() == sorted(wanted)
            any_more.add(len(wanted) > len(paying) > 0)
    assert any_more == {False, True}


def test_nothing_is_expanded_where_no_more_may_be_drafted(functions: Any) -> None:
    """And no more of a sequence than its top-k."""
    children = np.tile(np.maximum(0.0, 0.9 - CHILD_PRICES), (2, 1))
    chances, owners = np.array([0.9, 0.8, 0.7, 0.0]), np.array([0, 0, 1, 1])
    verify, level = 0.01 * np.arange(20.0), 0.01 * np.arange(5.0)
    chosen = functions.worth_expanding(chances, owners, np.array([0, 1]), np.array([1, 2]), children, chances, verify, level)
    assert chosen.tolist() == [0, 2]
    nothing = np.zeros(0)
    none = functions.worth_expanding(nothing, owners[:0], np.array([0]), np.array([1]), children, chances, verify, level)
    assert none.tolist() == []


def test_what_is_verified_is_worth_most(functions: Any) -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        chances, owners = rng.uniform(0.0, 1.0, 12).round(1), rng.integers(0, 3, 12)
        prices, limits = tiled_prices(rng, 12), rng.integers(0, 6, 3)
        for is_halved in (False, True):
            kept, count, _, said, variance = functions.worth_verifying(chances, owners, limits, prices, is_halved)
            ranked = sorted(range(12), key=lambda node: -chances[node])
            assert sum(chances[ranked[:count]]) - prices[count] == pytest.approx(worth(chances, prices))
            best = ranked[: math.ceil(count / 2)] if is_halved else ranked[:count]
            expected = [node for owner in range(3) for node in [node for node in best if owners[node] == owner][: limits[owner]]]
            assert kept.tolist() == sorted(expected)
            assert said == pytest.approx(chances[kept].sum())
            assert variance == pytest.approx((chances[kept] * (1 - chances[kept])).sum())
    nothing, nobody = np.zeros(0), np.zeros(0, dtype=np.int64)
    assert functions.worth_verifying(nothing, nobody, np.ones(3, dtype=np.int64), np.zeros(1), False)[1] == 0


@pytest.mark.parametrize(
    ("prices", "count", "last_chance"),
    [
        ([0.0, 0.25, 0.5, 0.75, 1.0], 3, 0.25),  # a line: what the next one costs
        ([0.0, 0.5, 0.5, 0.5, 2.0], 3, 0.26),  # the next tile is dear: the last one would give way
        ([0.0, 0.5, 0.5, 0.5, 0.5], 4, 0.1),  # more would cost nothing
        ([5.0, 6.0, 7.0, 8.0, 9.0], 0, 1.0),
        ([5.0, 5.95, 6.9, 7.85, 8.8], 0, 0.95),
    ],
)
def test_the_last_node_that_is_worth_it(functions: Any, prices: list[float], count: int, last_chance: float) -> None:
    """Its chance lies between those of the last one that is verified and of the best one that is not."""
    nobody, chances = np.zeros(4, dtype=np.int64), np.array([0.6, 0.9, 0.1, 0.26])
    _, found, last, _, _ = functions.worth_verifying(chances, nobody, nobody[:1] + 9, np.array(prices), False)
    assert (found, last) == (count, pytest.approx(last_chance))


def test_the_best_chances_of_each_level(functions: Any) -> None:
    rng = np.random.default_rng(2)
    owners, depths, chances = rng.integers(0, 3, 60), rng.integers(1, 6, 60), rng.uniform(0.0, 1.0, 60)
    best = functions.best_of_levels(owners, depths, chances, 3, 4, 2)
    for owner in range(3):
        for level in range(4):
            is_there = (owners == owner) & (np.minimum(depths, 4) == level + 1)
            expected = [*sorted(chances[is_there], reverse=True), 0.0, 0.0][:2]
            assert best[owner, level].tolist() == expected


def test_drafts_go_as_deep_as_pays(functions: Any) -> None:
    """Against sums over arrays."""
    rng = np.random.default_rng(3)
    promises = -np.sort(-rng.uniform(0.0, 1.0, (50, 4, 3)), axis=-1)
    node, paid, row, sequence, any_node = 0.7, 0.6, 0.05, 0.4, 0.3
    gains = promises - node
    gains[:, 1:] -= row
    gains = np.where(gains > 0, gains + node - paid, 0.0).sum(axis=-1)
    gains[:, 1:] -= sequence
    for least_levels in (1, 2):
        most = gains.cumsum(axis=-1)[:, least_levels - 1 :].max(axis=-1)
        assert 0 < (most <= any_node).sum() < 50
        assert (most.min() < 0) == (least_levels > 1)
        for beyond in (0.0, 0.2, -0.2):
            expected = np.where(most > any_node, np.maximum(0.0, most - any_node + beyond), np.minimum(0.0, most))
            utilities = functions.worth_of_drafts(promises, node, paid, row, sequence, any_node, beyond, least_levels)
            assert np.allclose(utilities, expected)


def test_surprises_count_where_the_parent_was_accepted(functions: Any) -> None:
    """Nodes 2, 3 and 5 of a draft: 3 is below 2, 5 below 3; 7 and 8 are of another sequence."""
    numbers, parents = np.array([2, 3, 5, 7, 8]), np.array([-1, 2, 3, -1, 7])
    owners, chances = np.array([0, 0, 0, 1, 1]), np.array([0.8, 0.6, 0.3, 0.4, 0.2])
    labels = np.array([1.0, 0.0, 0.0, 0.0, 0.0])
    is_asked, surprises = functions.surprises_of(chances, owners, parents, numbers, labels, 3)
    assert is_asked.tolist() == [True, True, False, True, False]
    assert surprises == pytest.approx([(1 - 0.8) - 0.6 / 0.8, -0.4, 0.0])


def test_of_equals_the_earlier_goes_first(functions: Any) -> None:
    assert functions.descending(np.array([0.1, 0.5, 0.5])).tolist() == [1, 2, 0]
