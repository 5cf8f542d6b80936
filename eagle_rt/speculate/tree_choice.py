"""Which of a few trees a whole batch drafts, where every tree is a step of its own that has been captured, and the host knows no
more than what the last step but one has gained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from eagle_rt.tree_shape import NO_SPECULATION, TreeShape, num_tree_nodes

# How many steps are remembered: a second or two of short ones.
STEPS_REMEMBERED, NEARLY_NONE = 512.0, 1e-3
# What a single tree's tokens are believed to vary by, in units of its depth, as if so many had been seen to.
VARIANCE_A_LEVEL, NUM_BELIEVED = 0.5, 1.0
# Texts have changed where the mean of a tree's latest steps, of which each moves it so far, is so many standard deviations from
# that of all: then all that was seen of trees counts for so little more. No step counts as farther off than so many of its own.
RECENT_RATE, A_CHANGE, LEFT_AFTER_A_CHANGE, FARTHEST = 0.25, 4.0, 0.02, 3.0
# How fast costs follow what is measured after the first few times, how far off a single step is believed to be at most, at first
# and then, in logarithms: machines stand still at times; and how fast is forgotten that a tree has its own ratio.
COST_RATE, FIRST_SURPRISE, MOST_SURPRISE, NUM_FIRST, OWN_FADES = 0.05, 2.0, 0.4, 4, 1 / 4096

# Tokens of the shorter of two copies.
SHORT_COPY = 4


class TreeChoice(Protocol):
    """batch_size: of requests that decode together; is_sampled: whether the temperature of any is above 0."""

    def best(self, batch_size: int, *, is_sampled: bool) -> TreeShape: ...

    def learn(self, tree: TreeShape, gains: Sequence[int], ms: float, *, is_sampled: bool) -> None:
        """A step of len(gains) requests with this tree has gained so many tokens of each, and taken so long."""
        ...


class FixedTree:
    """Always the same."""

    def __init__(self, tree: TreeShape) -> None:
        self._tree = tree

    def best(self, batch_size: int, *, is_sampled: bool) -> TreeShape:
        return self._tree

    def learn(self, tree: TreeShape, gains: Sequence[int], ms: float, *, is_sampled: bool) -> None:
        pass


@dataclass
class Gain:
    """Of one tree: the sums over what it has gained of each request in each step, fading."""

    tree: TreeShape
    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    recent: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Of what it gains of one request."""
        believed = NUM_BELIEVED * VARIANCE_A_LEVEL * self.tree.max_depth
        return (believed + max(0.0, self.squares - self.total * self.mean)) / (NUM_BELIEVED + self.count)

    def fade(self, factor: float) -> None:
        self.count, self.total, self.squares = factor * self.count, factor * self.total, factor * self.squares

    def add(self, gains: Sequence[int]) -> bool:
        """What a step has gained; whether that shows that texts have changed."""
        own, has_changed = sum(gains) / len(gains), False
        if self.count:
            deviation = math.sqrt(self.variance / len(gains))
            own = min(max(own, self.mean - FARTHEST * deviation), self.mean + FARTHEST * deviation)
            self.recent += RECENT_RATE * (own - self.recent)
            of_recent = deviation * math.sqrt(RECENT_RATE / (2.0 - RECENT_RATE))
            has_changed = abs(self.recent - self.mean) > A_CHANGE * of_recent
        else:
            self.recent = own
        self.count += len(gains)
        self.total += sum(gains)
        self.squares += sum(gain * gain for gain in gains)
        return has_changed

    def range(self, num_seen: float) -> tuple[float, float]:
        """Tokens that it gains at least and at most, as far as can be told where all trees have been seen num_seen times."""
        most = self.tree.max_depth + 1.0
        if self.tree == NO_SPECULATION or self.count < NEARLY_NONE:
            return 1.0, most
        width = math.sqrt(self.variance * math.log(1.0 + num_seen) / self.count)
        return max(1.0, self.mean - width), min(most, self.mean + width)


@dataclass
class TreeCosts:
    """Milliseconds of a step with each tree, for batches of one size: measured at start, times a ratio that all share and one of
    each tree, which follow what steps really take."""

    measured: dict[TreeShape, float]
    shared: float = 0.0
    own: dict[TreeShape, float] = field(default_factory=dict)
    counts: dict[TreeShape, int] = field(default_factory=dict)

    def ms(self, tree: TreeShape) -> float:
        return self.measured[tree] * math.exp(self.shared + self.own.get(tree, 0.0))

    def correct(self, tree: TreeShape, ms: float) -> None:
        count = self.counts.get(tree, 0)
        most = FIRST_SURPRISE if count < NUM_FIRST else MOST_SURPRISE
        surprise = min(most, max(-most, math.log(max(ms, 1e-6) / self.ms(tree))))
        # What is not met is believed less and less to be different, else a standstill could speak against a tree for ever.
        self.own = {other: ratio * (1.0 - OWN_FADES) for other, ratio in self.own.items()}
        self.own[tree] = self.own.get(tree, 0.0) + max(COST_RATE, 1.0 / (1.0 + count) - COST_RATE) * surprise
        self.shared += COST_RATE * surprise
        self.counts[tree] = count + 1


class PayingTree:
    """The tree that may well gain the most tokens a millisecond, plain decoding among them.

    What a tree gains is the same for any batch size, and is learned for greedy and for sampled batches; what is not known well is
    tried, the more rarely the less it can gain; and since larger trees gain no less, each says something of the others. Source:
    discounted upper confidence bounds (Garivier and Moulines, "On Upper-Confidence Bound Policies for Switching Bandit Problems",
    2011, section 2.1), with the variance estimated.

    measured: milliseconds of each tree's step by batch size, of those that there are; larger batches are believed to take what the
    largest of these do, until they are met.
    """

    def __init__(self, measured: dict[int, dict[TreeShape, float]]) -> None:
        self._sizes, self._costs = sorted(measured), {size: TreeCosts(own) for size, own in measured.items()}
        trees = {tree for own in measured.values() for tree in own}
        ascending = sorted(trees, key=lambda tree: tree.num_nodes)
        self._gains = {is_sampled: [Gain(tree) for tree in ascending] for is_sampled in (False, True)}

    def best(self, batch_size: int, *, is_sampled: bool) -> TreeShape:
        costs = self._costs_of(batch_size)
        gains = [gain for gain in self._gains[is_sampled] if gain.tree in costs.measured]
        num_seen = sum(gain.count for gain in gains)
        uppers = [gain.range(num_seen)[1] for gain in gains]
        # None gains more than a larger one may.
        uppers = list(accumulate(reversed(uppers), min))[::-1]
        values = [upper / costs.ms(gain.tree) for upper, gain in zip(uppers, gains, strict=True)]
        return gains[values.index(max(values))].tree

    def learn(self, tree: TreeShape, gains: Sequence[int], ms: float, *, is_sampled: bool) -> None:
        self._costs_of(len(gains)).correct(tree, ms)
        own = next(gain for gain in self._gains[is_sampled] if gain.tree == tree)
        left = LEFT_AFTER_A_CHANGE if own.add(gains) else 1.0 - 1.0 / STEPS_REMEMBERED
        num_seen = sum(gain.count for gain in self._gains[is_sampled])
        least, most = own.range(num_seen)
        for gain in self._gains[is_sampled]:
            its_least, its_most = gain.range(num_seen)
            is_larger = gain.tree.num_nodes > tree.num_nodes
            # What cannot be true any more is of other texts.
            is_outdated = its_most < least if is_larger else its_least > most
            gain.fade(0.0 if is_outdated else left)

    def _costs_of(self, batch_size: int) -> TreeCosts:
        """Of the smallest size that holds the batch; of the next power of two where all that were measured are smaller."""
        size = next((size for size in self._sizes if size >= batch_size), 1 << (batch_size - 1).bit_length())
        if size not in self._costs:
            known = self._costs[max(other for other in self._costs if other < size)]
            self._costs[size] = TreeCosts({tree: known.ms(tree) for tree in known.measured})
        return self._costs[size]


def trees_within(bounds: TreeShape) -> list[TreeShape]:
    """Trees to choose from, the largest last: none, a short chain, one of half the size, and the largest with copies and without;
    where all is copied a short copy and the longest. As few as are worth capturing."""
    if not bounds.num_steps:
        short = replace(bounds, num_copied=min(SHORT_COPY, bounds.num_copied))
        return sorted({NO_SPECULATION, short, bounds}, key=lambda tree: tree.num_nodes)
    chain_steps, half_steps = min(3, bounds.num_steps), (bounds.num_steps + 1) // 2
    supply = num_tree_nodes(half_steps, bounds.top_k)
    chain = TreeShape(chain_steps, 1, chain_steps + 1)
    half = TreeShape(half_steps, bounds.top_k, min(supply, max(2, bounds.num_draft_tokens // 2)))
    drafted = replace(bounds, num_copied=0)
    return sorted({NO_SPECULATION, chain, half, drafted, bounds}, key=lambda tree: (tree.num_nodes, tree.num_steps))
