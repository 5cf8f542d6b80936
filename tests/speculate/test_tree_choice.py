"""Which tree a captured step has: against made-up texts and times, of which the best tree is known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from eagle_rt.speculate.tree_choice import FixedTree, Gain, PayingTree, TreeCosts, trees_within
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape, num_tree_nodes

CHAIN, HALF, LARGEST = TreeShape(2, 1, 3), TreeShape(3, 4, 8), TreeShape(5, 4, 16)
TREES = [LARGEST, HALF, CHAIN, NO_SPECULATION]
# Of an 8B model on a large GPU, roughly: by batch size, so that small batches want large trees and large ones none.
MS = {
    1: {NO_SPECULATION: 4.0, CHAIN: 4.6, HALF: 5.0, LARGEST: 5.8},
    8: {NO_SPECULATION: 4.4, CHAIN: 5.4, HALF: 6.6, LARGEST: 9.0},
    64: {NO_SPECULATION: 6.0, CHAIN: 10.0, HALF: 20.0, LARGEST: 40.0},
}
# The largest with copies as well.
COPIES = replace(LARGEST, num_copied=16)
COPIES_MS = {1: 6.0, 8: 11.0, 64: 65.0}
# The chance that a tree's path goes on by one level, where it has any; how many siblings help.
SIBLINGS = {CHAIN: 1, HALF: 3, LARGEST: 4}


def tokens(tree: TreeShape, ease: float, count: int, rng: np.random.Generator) -> list[int]:
    """What a step gains of so many requests. ease: the chance that a single child is the target's token."""
    if tree == NO_SPECULATION:
        return [1] * count
    goes_on = rng.uniform(size=(count, tree.max_depth)) < 1 - (1 - ease) ** SIBLINGS[tree]
    return (1 + goes_on.cumprod(axis=1).sum(axis=1)).tolist()


def with_copies(ease: float, repeated: float, count: int, rng: np.random.Generator) -> list[int]:
    """Of the largest tree, and where the text repeats itself, which so often it does, more tokens."""
    own, is_repeated = np.array(tokens(LARGEST, ease, count, rng)), rng.uniform(size=count) < repeated
    return (own + is_repeated * rng.integers(4, 17, size=count)).tolist()


def speed(
    choice: PayingTree | FixedTree,
    batch_size: int,
    ease: float,
    num_steps: int,
    rng: np.random.Generator,
    *,
    repeated: float = 0.0,
) -> float:
    """Tokens a millisecond over so many steps."""
    total, total_ms = 0, 0.0
    for _ in range(num_steps):
        tree = choice.best(batch_size, is_sampled=False)
        if tree == COPIES:
            gains, ms = with_copies(ease, repeated, batch_size, rng), COPIES_MS[batch_size]
        else:
            gains, ms = tokens(tree, ease, batch_size, rng), MS[batch_size][tree]
        ms *= rng.lognormal(0, 0.03)
        choice.learn(tree, gains, ms, is_sampled=False)
        total, total_ms = total + sum(gains), total_ms + ms
    return total / total_ms


def best_fixed(batch_size: int, ease: float, rng: np.random.Generator) -> float:
    return max(speed(FixedTree(tree), batch_size, ease, 3000, rng) for tree in TREES)


@pytest.mark.parametrize("ease", [0.02, 0.2, 0.45, 0.75])
@pytest.mark.parametrize("batch_size", list(MS))
def test_it_comes_near_the_best_tree(batch_size: int, ease: float) -> None:
    """And so near plain decoding, where that is best, from the first step on."""
    rng = np.random.default_rng(0)
    speeds = [speed(PayingTree(MS), batch_size, ease, 1500, rng) for _ in range(6)]
    assert np.mean(speeds) > 0.96 * best_fixed(batch_size, ease, rng)


@pytest.mark.parametrize("ease", [0.02, 0.45])
@pytest.mark.parametrize("batch_size", list(MS))
def test_copies_are_found_where_texts_repeat_themselves(batch_size: int, ease: float) -> None:
    """And cost little where they do not."""
    rng, measured = np.random.default_rng(0), {size: {COPIES: COPIES_MS[size], **own} for size, own in MS.items()}
    ratios, best = [], [best_fixed(batch_size, ease, rng)]
    best.append(max(best[0], speed(FixedTree(COPIES), batch_size, ease, 3000, rng, repeated=0.3)))
    for repeated, most in zip((0.0, 0.3), best, strict=True):
        speeds = [speed(PayingTree(measured), batch_size, ease, 1500, rng, repeated=repeated) for _ in range(6)]
        ratios.append(np.mean(speeds) / most)
    assert ratios[0] > 0.94
    assert ratios[1] > 0.97


@pytest.mark.parametrize(("before", "after"), [(0.02, 0.75), (0.75, 0.02)])
def test_it_follows_other_texts(before: float, after: float) -> None:
    """In a few of the first 500 steps, which take two to three seconds."""
    rng, speeds = np.random.default_rng(0), []
    for _ in range(6):
        choice = PayingTree(MS)
        speed(choice, 1, before, 3000, rng)
        speeds.append(speed(choice, 1, after, 500, rng))
    assert np.mean(speeds) > 0.93 * best_fixed(1, after, rng)


def test_what_is_learned_at_one_batch_size_holds_at_another() -> None:
    """A load that switches every hundred steps: better than any single tree at both."""
    rng, choice = np.random.default_rng(0), PayingTree(MS)
    own, fixed = 1.0, dict.fromkeys(TREES, 1.0)
    for phase in range(10):
        batch_size = (1, 64)[phase % 2]
        own *= speed(choice, batch_size, 0.45, 100, rng)
        for tree in TREES:
            fixed[tree] *= speed(FixedTree(tree), batch_size, 0.45, 100, rng)
    assert own > max(fixed.values())


def test_costs_that_were_measured_wrongly_are_put_right() -> None:
    """Every tree as dear as plain decoding, as it is said; that they are not shows as soon as they are tried."""
    said = {size: dict.fromkeys(own, own[NO_SPECULATION]) for size, own in MS.items()}
    rng, choice = np.random.default_rng(0), PayingTree(said)
    speed(choice, 64, 0.2, 300, rng)
    assert speed(choice, 64, 0.2, 1500, rng) > 0.95 * best_fixed(64, 0.2, rng)


def test_greedy_and_sampled_batches_are_told_apart() -> None:
    choice, rng = PayingTree(MS), np.random.default_rng(0)
    for _ in range(800):
        for is_sampled, ease in ((False, 0.8), (True, 0.02)):
            tree = choice.best(1, is_sampled=is_sampled)
            choice.learn(tree, tokens(tree, ease, 1, rng), MS[1][tree], is_sampled=is_sampled)
    assert choice.best(1, is_sampled=False) == LARGEST
    chosen = []
    for _ in range(400):
        chosen.append(choice.best(1, is_sampled=True))
        choice.learn(chosen[-1], tokens(chosen[-1], 0.02, 1, rng), MS[1][chosen[-1]], is_sampled=True)
    assert chosen.count(NO_SPECULATION) > 300


def test_a_batch_larger_than_was_measured_begins_as_the_largest() -> None:
    choice = PayingTree({2: MS[1], 4: MS[8]})
    choice.learn(HALF, [1] * 100, 50.0, is_sampled=False)
    known = choice._costs[128]
    assert known.measured == MS[8]
    assert choice._costs_of(70) is known
    assert choice._costs_of(3) is choice._costs[4]
    assert choice._costs_of(33).measured == MS[8], "and not what a larger one has shown"


def test_a_standstill_moves_costs_by_no_more_than_a_surprise() -> None:
    costs = TreeCosts({HALF: 5.0, CHAIN: 4.0})
    for _ in range(10):
        costs.correct(HALF, 5.0)
    costs.correct(HALF, 5000.0)
    assert 5.0 < costs.ms(HALF) < 5.4
    assert 4.0 < costs.ms(CHAIN) < 4.1
    for _ in range(200):
        costs.correct(HALF, 7.5)
    assert costs.ms(HALF) == pytest.approx(7.5, rel=0.01)
    costs.correct(HALF, 0.0)
    assert math.isfinite(costs.ms(HALF))


def test_a_tree_may_gain_no_more_than_its_depth() -> None:
    gain = Gain(HALF)
    assert gain.range(10.0) == (1.0, 4.0)
    gain.add([1])
    assert gain.range(1e9) == (1.0, 4.0)
    gain.add([2] * 10_000)
    least, most = gain.range(10_001)
    assert 1.95 < least < 2.0 < most < 2.05
    assert Gain(NO_SPECULATION).range(5.0) == (1.0, 1.0)


def test_a_tree_says_something_of_larger_and_smaller_ones() -> None:
    """Those gain no less, and no more."""
    choice = PayingTree(MS)
    for _ in range(300):
        choice.learn(HALF, [1] * 8, MS[8][HALF], is_sampled=False)
    assert choice.best(1, is_sampled=False) == LARGEST, "which may still gain a lot, and a chain can't"
    for _ in range(300):
        choice.learn(LARGEST, [1] * 8, MS[8][LARGEST], is_sampled=False)
    assert choice.best(1, is_sampled=False) == NO_SPECULATION
    for _ in range(30):
        choice.learn(CHAIN, [3] * 8, MS[8][CHAIN], is_sampled=False)
    assert choice.best(1, is_sampled=False) in (HALF, LARGEST), "what was known of them is outdated"


def test_a_change_shows_after_a_few_steps_and_not_after_one() -> None:
    gain, rng = Gain(LARGEST), np.random.default_rng(0)
    assert not any(gain.add(tokens(LARGEST, 0.6, 1, rng)) for _ in range(200))
    assert not gain.add([1])
    assert any(gain.add([1]) for _ in range(12))


def test_copies_to_choose_from() -> None:
    """The largest tree with them and without; where they are all that is drafted long ones and short ones."""
    assert trees_within(replace(LARGEST, num_copied=9))[-2:] == [LARGEST, replace(LARGEST, num_copied=9)]
    assert trees_within(TreeShape(0, 0, 1, 9)) == [NO_SPECULATION, TreeShape(0, 0, 1, 4), TreeShape(0, 0, 1, 9)]
    assert trees_within(TreeShape(0, 0, 1, 3)) == [NO_SPECULATION, TreeShape(0, 0, 1, 3)]


@pytest.mark.parametrize("bounds", [(1, 1, 2), (2, 1, 3), (5, 1, 6), (1, 4, 5), (3, 2, 8), (5, 8, 32), (8, 10, 60)], ids=str)
def test_the_trees_to_choose_from_can_be_drafted(bounds: tuple[int, int, int]) -> None:
    trees = trees_within(TreeShape(*bounds))
    assert trees[0] == NO_SPECULATION
    assert trees[-1] == TreeShape(*bounds)
    assert len(set(trees)) == len(trees) <= 4
    for tree in trees[1:]:
        assert 2 <= tree.num_draft_tokens <= num_tree_nodes(tree.num_steps, tree.top_k)
        assert tree.num_steps <= bounds[0]
        assert tree.top_k <= bounds[1]
