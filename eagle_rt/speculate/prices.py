"""What time costs in tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from eagle_rt.speculate.compiled import worth_of_drafts
from eagle_rt.speculate.corrections import Moving
from eagle_rt.speculate.costs import Conditions, StepCosts
from eagle_rt.speculate.forest import Floats

# Speeds over plain decoding: of how many plain steps the first one is a mean; and how many steps are remembered of a single
# sequence, and at least: steps of many sequences say more, and while the speed rises prices lag behind.
FIRST_STEPS, STEPS_OF_ONE, LEAST_STEPS = 1.0, 50.0, 8.0
# The rows of a typical step with drafts.
ROWS_OF_A_SEQUENCE, MORE_ROWS = 4.0, 8.0
# The rows of a sequence that a head reads before it drafts are what the step before has gained; so many, until that is known.
FIRST_ROWS_READ = 3.0
# What drafts gain beyond what they promise: a single one says no more than so many tokens; it is held to nothing by so many steps;
# so many are remembered at least, since drafts that stop by chance are long in coming back; and while nothing drafts it is
# remembered for so many steps, and so many milliseconds.
MOST_BEYOND, BEYOND_HELD_BY, STEPS_OF_WORTH, IDLE_STEPS, IDLE_MS = 4.0, 4.0, 32.0, 100.0, 1000.0
# What heads take to read many rows: over how many readings that is a mean, and no one differs by more than so many times.
READING_MEMORY, MOST_READING_RATIO = 0.9, 4.0
# Prices are worked out anew after some steps, or when that has moved by so many tokens.
MUCH_BEYOND = 0.2
# No step with drafts counts as longer than so many times those before; in plain ones, what is believed of them before the first.
LONGEST_STEP, FIRST_LENGTH = 1.5, 2.0
# What a sequence costs once is spread over the steps for which it still stays: this share of the mean stay, which begins as that of
# a few sequences with so many steps, and remembers so many of the latest.
SHARE_LEFT, FIRST_STAY, NUM_FIRST_STAYS, STAY_MEMORY = 0.5, 32.0, 4.0, 0.98

# Of up to so many nodes the least that one costs is looked for.
NODES_OF_LEAST = 64


@dataclass(frozen=True)
class Verified:
    """The nodes that a step verifies: how many, what that costs beyond a plain step, in milliseconds, and the chance of the last
    one that is worth it."""

    num_nodes: float
    more_ms: float
    last_chance: float


def typical_rows(costs: StepCosts, batch_size: int) -> Floats:
    """[3] of a step without drafts, of one with a draft for each sequence, and of a typical one."""
    rows = np.array([batch_size, 2.0 * batch_size, ROWS_OF_A_SEQUENCE * batch_size + MORE_ROWS])
    rows[1:] = costs.filled_up(rows[1:])
    return rows


def first_verified(rate: float, rows: Floats, verify: list[float]) -> Verified:
    """Where nothing was verified yet, by what `typical_rows` take: what one more row costs is a mean over as many as a step has,
    that of the very next one would be lost in noise. But the first of all may cost more than all others."""
    means = [(verify[2] - verify[place]) / (rows[2] - rows[place]) for place in (0, 1) if rows[place] < rows[2]]
    return Verified(float(rows[2] - rows[0]), verify[2] - verify[0], rate * min(means))


@dataclass(frozen=True)
class Pace:
    """What similar steps have come to lately. speed: over that of plain decoding; speed_of_trees: without what heads read once,
    above all prompts; rows_read: tokens that a sequence gains from a draft, which its head has to read before the next one;
    verified: in steps with drafts, None before the first; beyond: tokens that a draft has really gained beyond its price, less what
    it was said to be worth."""

    speed: float = 1.0
    speed_of_trees: float = 1.0
    rows_read: float = FIRST_ROWS_READ
    verified: Verified | None = None
    beyond: float = 0.0


def steps_of(batch_size: float) -> float:
    """How many steps of such batches say enough."""
    return max(LEAST_STEPS, STEPS_OF_ONE / batch_size**0.5)


class RecentSteps:
    """Moving means over the steps of similar batches. begin: what is believed before the first."""

    def __init__(self, begin: Pace, batch_size: float) -> None:
        self._memory = 1.0 - 1.0 / steps_of(batch_size)
        self._gained, self._plain = begin.speed * FIRST_STEPS, FIRST_STEPS
        self._read = FIRST_STEPS * (1.0 - begin.speed / begin.speed_of_trees)
        self._rows, self._drafted = begin.rows_read * FIRST_STEPS, FIRST_STEPS
        self._verified = [0.0] * 4  # sums of its three numbers, and of their weights
        self._beyond = self._num_beyond = 0.0
        self._worth_memory = 1.0 - 1.0 / max(STEPS_OF_WORTH, steps_of(batch_size))
        self._length = FIRST_LENGTH

    def counted(self, length: float) -> float:
        """As how long a step with drafts counts, in plain ones, beside those before: machines stand still now and then."""
        length = min(length, LONGEST_STEP * self._length)
        self._length = self._memory * self._length + (1.0 - self._memory) * length
        return length

    def add_worth(self, beyond: float) -> None:
        """Of a step: what `Pace.beyond` was of its drafts."""
        memory = self._worth_memory
        self._beyond = memory * self._beyond + min(MOST_BEYOND, max(-MOST_BEYOND, beyond))
        self._num_beyond = memory * self._num_beyond + 1.0

    def add_rests(self, count: int, ms: float) -> None:
        """So many steps without drafts, which took so long in all: after long, drafts are trusted again."""
        memory = self._memory**count
        num_plain = (1.0 - memory) / (1.0 - self._memory)
        self._gained, self._plain = memory * self._gained + num_plain, memory * self._plain + num_plain
        self._read *= memory
        memory = math.exp(-min(count / IDLE_STEPS, ms / IDLE_MS))
        self._beyond, self._num_beyond = memory * self._beyond, memory * self._num_beyond

    def add(self, gained: float, plain: float, read: float, share_drafted: float, verified: Verified | None) -> None:
        """A step with drafts gained so many tokens a sequence, where plain decoding would have gained the others in its time,
        `read` of them while heads read what they read once. share_drafted: of its sequences; the others gained one token each."""
        self._gained = self._memory * self._gained + gained
        self._plain = self._memory * self._plain + plain
        self._read = self._memory * self._read + read
        self._rows = self._memory * self._rows + gained - (1.0 - share_drafted)
        self._drafted = self._memory * self._drafted + share_drafted
        if verified:
            new = verified.num_nodes, verified.more_ms, verified.last_chance, 1.0
            self._verified = [self._memory * own + more for own, more in zip(self._verified, new, strict=True)]

    @property
    def pace(self) -> Pace:
        *sums, num_steps = self._verified
        verified = Verified(*(value / num_steps for value in sums)) if num_steps else None
        speeds = self._gained / self._plain, self._gained / (self._plain - self._read)
        return Pace(*speeds, self._rows / self._drafted, verified, self.beyond)

    @property
    def beyond(self) -> float:
        """See `Pace.beyond`."""
        return self._beyond / (self._num_beyond + BEYOND_HELD_BY)


class PriceLists:
    """What a pass of the target with 0, 1, 2, ... nodes costs, and one of the head, worked out as far as is asked for. prices_of:
    [2, N] what any numbers [N] cost."""

    def __init__(self, prices_of: Callable[[Floats], Floats]) -> None:
        self._prices_of, self._prices = prices_of, np.zeros((2, 0))

    def up_to(self, count: int) -> Floats:
        """[2, N] of 0 to `count` nodes at least."""
        if count >= self._prices.shape[1]:
            self._prices = self._prices_of(np.arange(2.0 * count + 1))
        return self._prices


class Price:
    """What time costs in tokens, for the steps of one batch size: `rate` tokens a millisecond, `speed` times as many as plain
    decoding gives; verifying anything at all, and each node; a node that is fed to the head, and a further level for each sequence.

    lists: of what passes cost, at a `rate_of_trees`: what heads read once counts where it is asked who drafts at all, but it is the
    same whatever is drafted then.

    The costs of verifying are no line: products are made with whole tiles of rows, or a second row costs as much as the first. So
    the price of a node is the chance of the last one that was worth verifying: a node that is verified takes its place. What all
    nodes together cost beyond that is `any_node`; what they cost less is given back to each of them, which leaves `node_paid`.
    """

    def __init__(self, costs: StepCosts, pace: Pace, conditions: Conditions, between_ms: float = 0.0, reading: float = 1.0) -> None:
        batch_size = conditions.batch_size
        rows = typical_rows(costs, batch_size)
        verify = costs.ms("verify", batch_size, rows, conditions).tolist()
        level = costs.ms("level", batch_size, rows, conditions).tolist()
        self.plain_ms = verify[0] + between_ms
        # No tree is worth less than plain decoding.
        self.speed = max(1.0, pace.speed)
        self.rate = self.speed * batch_size / self.plain_ms
        self.rate_of_trees = rate = max(1.0, pace.speed_of_trees) * batch_size / self.plain_ms
        self._price_nodes(pace.verified or first_verified(self.rate, rows, verify))
        self.level_row = self.rate * (level[2] - level[0]) / (rows[2] - rows[0])
        self.level_sequence = self.rate * level[0] / batch_size
        self.batch_size = batch_size
        self.rows_read, self.beyond, self.reading = pace.rows_read, pace.beyond, reading

        # Lists that knew their price would keep it alive.
        def prices_of(counts: Floats) -> Floats:
            verify = costs.ms("verify", batch_size, batch_size + counts, conditions)
            # The rows of a level belong to as many sequences as there are.
            return rate * np.stack((verify, costs.ms("level", np.minimum(counts, batch_size), counts, conditions)))

        self.lists = PriceLists(prices_of)
        # Of the first level of 0, 1, ... sequences, by itself, and with what verifying anything costs beyond the shares in
        # `utility`; and of a row that the head has missed before.
        numbers = [*range(1, batch_size + 1)]
        start_rows = [*(pace.rows_read * number for number in numbers), batch_size, 33 * batch_size]
        starts = self.rate * costs.ms("start", np.array([*numbers, batch_size, batch_size]), np.array(start_rows), conditions)
        *levels, read_once, read_more = starts.tolist()
        self.first_levels: list[float] = [0.0, *levels]
        shares = (1.0 - number / batch_size for number in numbers)
        self.starts: list[float] = [0.0, *(level + self.any_node * share for level, share in zip(levels, shares, strict=True))]
        self.missed_row = reading * (read_more - read_once) / (32 * batch_size)

    def _price_nodes(self, verified: Verified) -> None:
        self.node = self.node_paid = verified.last_chance
        beyond = self.rate * verified.more_ms - self.node * verified.num_nodes
        self.any_node = max(0.0, beyond)
        if beyond < 0.0:
            self.node_paid += beyond / verified.num_nodes

    def verify(self, count: int) -> Floats:
        """[count + 1] of verifying 0, 1, ... nodes."""
        return self.lists.up_to(count)[0, : count + 1]

    @cached_property
    def least_node(self) -> float:
        """The least that a node costs, of any number of them."""
        prices = self.verify(NODES_OF_LEAST)
        return float(((prices[1:] - prices[0]) / np.arange(1, len(prices))).min())

    def level(self, count: int) -> Floats:
        """[count + 1] of another level below 0, 1, ... nodes."""
        return self.lists.up_to(count)[1, : count + 1]

    def pays(self, utility: float) -> bool:
        """Whether it would pay to draft for a whole batch of sequences whose drafts are worth so much each."""
        return bool(self.batch_size * utility > self.starts[-1])

    def utility(self, promises: Floats, least_levels: int = 1) -> Floats:
        """Expected tokens of drafts of such promise [..., D, R] beyond the price of their nodes and of levels past the first, and
        what such drafts have gained beyond that. least_levels: so deep they go in any case."""
        any_node = self.any_node / self.batch_size
        drafts = promises.reshape(-1, *promises.shape[-2:])
        prices = self.node, self.node_paid, self.level_row, self.level_sequence, any_node
        utilities = worth_of_drafts(drafts, *prices, self.beyond, least_levels)
        return utilities.reshape(promises.shape[:-2])


class PriceBook:
    """The paces and prices of every batch size. between_ms: what passes between plain steps lately."""

    def __init__(self, costs: StepCosts) -> None:
        self.between_ms = 0.0
        # As a logarithm how many times as long as costs say heads have taken to read many rows, which are measured nowhere else.
        self._reading = Moving(0.0, READING_MEMORY)
        self._costs = costs
        self._steps: dict[tuple[int, bool], RecentSteps] = {}
        # For each batch size and kind, with the number of steps at which it is worked out anew, and after which.
        self._prices: dict[tuple[int, bool], tuple[Price, int, int]] = {}
        self._num_steps = 0

    def steps(self, conditions: Conditions) -> RecentSteps:
        """Of batches of about this size; they begin at the pace of the most similar ones."""
        if conditions.kind not in self._steps:
            size, is_sampled = conditions.kind
            known = sorted(self._steps, key=lambda other: (other[1] != is_sampled, abs(other[0] - size)))
            nearest = self._steps[known[0]].pace if known else Pace()
            self._steps[conditions.kind] = RecentSteps(replace(nearest, verified=None), 2.0**size)
        return self._steps[conditions.kind]

    def add_steps(self, count: int) -> None:
        """What time costs may have changed since."""
        self._num_steps += count

    def at(self, conditions: Conditions) -> Price:
        """Of a step in such conditions."""
        price, due, num_steps = self._prices.get(conditions.load, (None, 0, 0))
        if price is None or self._num_steps >= due or self.is_wrong(price, conditions):
            pace, reading = self.steps(conditions).pace, math.exp(self._reading.mean)
            price = Price(self._costs, pace, conditions, self.between_ms, reading)
            num_steps = min(int(steps_of(conditions.batch_size)), max(1, 2 * num_steps))
            self._prices[conditions.load] = price, self._num_steps + num_steps, num_steps
        return price

    def forget(self, conditions: Conditions) -> None:
        """Time costs something else than was said."""
        self._prices.pop(conditions.load, None)

    def add_reading(self, price: Price, num_drafters: int, num_missed: float, ms: float) -> None:
        """A first level of so many sequences, whose heads had missed so many rows, took that long."""
        expected = price.missed_row * num_missed
        ratio = (price.rate * ms - price.first_levels[num_drafters]) / expected
        ratio = price.reading * min(MOST_READING_RATIO, max(1.0 / MOST_READING_RATIO, ratio))
        self._reading.move(math.log(ratio) - self._reading.mean)

    def is_wrong(self, price: Price, conditions: Conditions) -> bool:
        """Whether drafts have come to gain much more or less than it says."""
        return abs(self.steps(conditions).beyond - price.beyond) > MUCH_BEYOND

    def last(self, conditions: Conditions) -> Price:
        """Of such a batch, though its texts may have been others; for who asks beside the steps."""
        known = self._prices.get(conditions.load)
        return known[0] if known else self.at(conditions)


class Stay:
    """For how many steps sequences are there."""

    def __init__(self) -> None:
        self._num_steps, self._num_ends = FIRST_STAY * NUM_FIRST_STAYS, NUM_FIRST_STAYS

    @property
    def num_steps(self) -> float:
        """For which a new sequence will probably stay."""
        return self._num_steps / self._num_ends

    def steps_left(self, num_idle: int) -> float:
        """For which one will that has been there for so many steps at least."""
        return max(1.0, self.num_steps - num_idle, SHARE_LEFT * self.num_steps)

    def add_steps(self, count: int) -> None:
        """So many of one sequence each, or one of so many."""
        self._num_steps += count

    def add_end(self) -> None:
        """A sequence has left."""
        self._num_steps, self._num_ends = STAY_MEMORY * self._num_steps, STAY_MEMORY * self._num_ends + 1.0
