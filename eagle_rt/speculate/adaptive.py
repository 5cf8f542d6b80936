"""Trees that pay: the draft of each step is sized for the most tokens per millisecond over the whole batch.

The price of time is the rate at which the engine has been gaining tokens, `rate` tokens/ms: whatever costs x ms must be expected
to gain more than rate * x tokens. With that price every choice of a step can be made by itself (Dinkelbach's method for
fractions), and all requests' candidates compete for the same time:

- whether a sequence drafts at all, by what its last drafts promised, against catching its head up and drafting a first level;
- under which nodes another level is drafted, and whether it is drafted at all, against its rows;
- how many nodes are verified, the likeliest first, against what each more row costs the target.

Sequences that do not draft are tried again now and then, in a small share of the time.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from eagle_rt.speculate.acceptance import AcceptanceEstimator, Calibration, VerifiedNodes
from eagle_rt.speculate.costs import Conditions, StepCosts
from eagle_rt.speculate.forest import Candidates, Floats, Ints
from eagle_rt.speculate.guard import Guard
from eagle_rt.speculate.members import Members, conditions_of
from eagle_rt.speculate.policy import DraftPlan, FixedPlan, StepRecord, best_of_each
from eagle_rt.speculate.prices import Price, PriceBook, Stay, Verified, verified
from eagle_rt.speculate.promises import (
    FIRST_CHANCES,
    FIRST_WAIT,
    HOPED_FOR,
    CommonPromises,
    DraftHistory,
    promises_of,
    utilities_at,
)
from eagle_rt.speculate.sequences import HostSequence

# After a step in which nothing was worth drafting some go without asking: the more, the longer that lasts, but only a few where
# drafts would have been worth it at such a share of their price. One in so many is learned from, since such steps are short.
HOPELESS = 0.8
MOST_RESTING_STEPS, MOST_RESTING_STEPS_WHERE_NEARLY, RESTING_STEPS_A_LESSON = 31, 3, 8
# After one in which all drafted, which was worth so many times its price, some do so without asking.
CLEARLY_WORTH_IT, NUM_UNASKED = 1.25, 7
# Of the steps with drafts, after the first ones, one in so many teaches what nodes and time are worth: that takes time itself.
NUM_FIRST_LESSONS, STEPS_A_LESSON = 64, 4
# Prices of a node, in units of its parent's chance, for which the gain from children is remembered; and how fast it is forgotten.
CHILD_PRICES, CHILD_RATE = np.linspace(0.0, 1.0, 33), 0.05
CORRECTION_STEP, CORRECTION_DECAY, MAX_CORRECTION = 0.15, 0.98, 2.0
# A head that has more rows to read than this, for each sequence, was left behind.
MOST_ROWS_OF_A_STEP = 12
# Tries of sequences that do not draft: their share of the time, and the steps between them, which double while they fail.
TRY_SHARE, LONGEST_WAIT = 0.01, 512


class AdaptivePolicy:
    """costs and estimator may come from a profile. max_batch_size: larger batches are not drafted for."""

    def __init__(self, costs: StepCosts, estimator: AcceptanceEstimator, max_batch_size: int | None) -> None:
        self.costs, self.estimator, self.prices, self.stay = costs, estimator, PriceBook(costs), Stay()
        self.allowance_ms, self.num_drafted_steps = 0.0, 0
        # For how many steps the last decision holds without asking, which was that all of these sequences draft or that none of
        # about so many does; how many rested after the one before; and whether one of which nothing is known would draft.
        self.num_unasked = self.num_resting_sequences = self.num_rested = 0
        self.all_draft: Members | None = None
        self.unknown_may_draft = True
        self._members: Members | None = None
        self._max_batch_size = max_batch_size
        self._histories: dict[str, DraftHistory] = {}
        self._guards: dict[tuple[int, bool], Guard] = {}
        # What drafts have promised lately, for greedy and for sampled sequences.
        self._common = {is_sampled: CommonPromises() for is_sampled in (False, True)}
        # [2, D, P] for greedy and for sampled sequences, below a node of depth d, at each of CHILD_PRICES: the expected sum of what
        # its children's chances are above the price. Not what the mean child is above it: those that are below it are left out.
        first = np.maximum(0.0, FIRST_CHANCES[:, None] - CHILD_PRICES).mean(axis=0)
        self.children = np.tile(first, (2, estimator.max_depth + 1, 1))
        self.num_levels_seen = np.zeros((2, estimator.max_depth + 1))

    @property
    def calibration(self) -> Calibration:
        return self.estimator.calibration

    def wants_drafts(self, batch_size: int, num_rows: int, is_sampled: bool) -> bool:
        if self._max_batch_size is not None and batch_size > self._max_batch_size:
            return False
        return self.unknown_pays(self.prices.at(Conditions(max(1, batch_size), 64, is_sampled)), num_rows, is_sampled)

    def unknown_pays(self, price: Price, num_rows: float, is_sampled: bool) -> bool:
        """Whether sequences of which nothing is known would draft, where a head has to read so many rows of each first."""
        return price.pays(self._common[is_sampled].utility(price)[0] - price.missed_row * num_rows / self.stay.steps_left)

    def guard(self, conditions: Conditions) -> Guard:
        """Of batches of about this size."""
        return self._guards.setdefault((conditions.batch_size.bit_length(), conditions.is_sampled), Guard())

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        self.stay.add_step(len(sequences))
        is_too_large = self._max_batch_size is not None and len(sequences) > self._max_batch_size
        if is_too_large or not any(sequence.bounds for sequence in sequences):
            return RestingPlan(self, sequences)
        if self.num_unasked == 0 or not self._is_as_asked(sequences):
            return AdaptivePlan(self, sequences, num_missing, None)
        self.num_unasked -= 1
        if self.all_draft:
            return AdaptivePlan(self, sequences, num_missing, list(range(len(sequences))))
        if self.num_unasked % RESTING_STEPS_A_LESSON:
            return RestingPlan(self, sequences)
        return AdaptivePlan(self, sequences, num_missing, [])

    def _is_as_asked(self, sequences: Sequence[HostSequence]) -> bool:
        """A rest goes on while one leaves and the next one's prompt is read: there are a few less, of which no more will pay."""
        if self.all_draft:
            return self.members(sequences) is self.all_draft
        return 4 * abs(len(sequences) - self.num_resting_sequences) <= self.num_resting_sequences

    def allow_tries(self, step_ms: float) -> None:
        """Some of the time goes into drafts of sequences that do not draft otherwise."""
        self.allowance_ms = min(self.allowance_ms + TRY_SHARE * step_ms, TRY_SHARE * 256 * step_ms)

    def affords(self, ms: float) -> bool:
        """Spends that on a try, if there is so much left for tries."""
        if ms > self.allowance_ms:
            return False
        self.allowance_ms -= ms
        return True

    def forget(self, sequence_id: str) -> None:
        self._histories.pop(sequence_id, None)
        self.stay.add_end()
        if self.all_draft or self.unknown_may_draft:
            self.num_unasked = self.num_rested = 0  # another may take its place

    def history(self, sequence: HostSequence) -> DraftHistory:
        history = self._histories.get(sequence.id)
        if history is None:
            history = self._histories[sequence.id] = DraftHistory(self._common[sequence.temperature > 0])
        return history

    def members(self, sequences: Sequence[HostSequence]) -> Members:
        """The same ones from step to step, until one leaves."""
        key = [(sequence.id, sequence.bounds) for sequence in sequences]
        if self._members is None or self._members.key != key:
            self._members = Members(key, sequences, [self.history(sequence) for sequence in sequences])
            self._members.estimate(self.estimator)
        return self._members


class RestingPlan(FixedPlan):
    """Of a step without drafts of which nothing is learned."""

    def __init__(self, policy: AdaptivePolicy, sequences: Sequence[HostSequence]) -> None:
        super().__init__((), drafts=False)
        self._policy, self._sequences = policy, sequences

    def learn(self, record: StepRecord) -> None:
        self._policy.prices.steps(conditions_of(self._sequences)).add(1.0, 1.0)
        self._policy.allow_tries(record.parts[-1].ms)


class AdaptivePlan:
    """The decisions of one step, and what is learned from it."""

    def __init__(
        self,
        policy: AdaptivePolicy,
        sequences: Sequence[HostSequence],
        num_missing: Sequence[int],
        drafters: list[int] | None,
    ) -> None:
        """drafters: those that draft, None where that is to be decided."""
        self._policy, self._sequences = policy, sequences
        self._conditions = conditions_of(sequences)
        self._price = policy.prices.at(self._conditions)
        self._teaches = True
        self._verified: Verified | None = None
        if drafters != []:
            self._members = policy.members(sequences)
        self.drafters = self._choose_drafters(self._price, num_missing) if drafters is None else drafters
        if self.drafters and not policy.guard(self._conditions).allows_drafts():
            self.drafters = []
        if self.drafters:
            policy.num_drafted_steps += 1
            is_due = policy.num_drafted_steps <= NUM_FIRST_LESSONS or policy.num_drafted_steps % STEPS_A_LESSON == 0
            self._teaches = is_due or any(self._members.histories[index].num_idle for index in self.drafters)

    def _choose_drafters(self, price: Price, num_missing: Sequence[int]) -> list[int]:
        """Those sequences whose drafts together gain most beyond the price of a first level, which is the cheaper the more share
        it; and tries, of those that nearly do and of others."""
        policy, sequences, histories = self._policy, self._sequences, self._members.histories
        indices = [index for index, sequence in enumerate(sequences) if sequence.bounds]
        utilities = dict(zip(indices, utilities_at(price, [histories[index] for index in indices]), strict=True))
        reading = {index: price.missed_row * max(0.0, num_missing[index] - price.rows_read) for index in indices}
        steps_left = policy.stay.steps_left
        for index in indices:
            utilities[index] -= reading[index] / steps_left
        indices.sort(key=utilities.__getitem__, reverse=True)
        gains = list(accumulate((utilities[index] for index in indices), initial=0.0))
        worth = [gain - start for gain, start in zip(gains, price.starts, strict=False)]
        num_drafters = worth.index(max(worth))
        best = num_drafters or 1 + worth[1:].index(max(worth[1:]))
        is_hopeless = not num_drafters and gains[best] <= HOPELESS * price.starts[best]
        if not num_drafters and not is_hopeless:
            cost = sum(reading[index] for index in indices[:best]) - worth[best]
            num_drafters = best if policy.affords(cost / price.rate) else 0
        drafters = indices[:num_drafters]
        due = []
        for index in indices[num_drafters:]:
            history = histories[index]
            history.num_idle += 1 + policy.num_rested
            if history.num_idle >= history.wait:
                due.append(index)
        if due and price.pays(price.utility(HOPED_FOR).mean()):
            for index in due:
                cost = reading[index] + price.starts[len(drafters) + 1] - price.starts[len(drafters)] + price.node
                if policy.affords(cost / price.rate):
                    drafters.append(index)
        most_rests = MOST_RESTING_STEPS if is_hopeless else MOST_RESTING_STEPS_WHERE_NEARLY
        policy.num_rested = 0 if drafters else min(most_rests, 1 + 2 * policy.num_rested)
        policy.all_draft = self._members if num_drafters == len(sequences) else None
        is_clear = policy.all_draft and gains[-1] > CLEARLY_WORTH_IT * price.starts[-1]
        policy.num_unasked, policy.num_resting_sequences = NUM_UNASKED if is_clear else policy.num_rested, len(sequences)
        policy.unknown_may_draft = policy.unknown_pays(price, 0.0, self._conditions.is_sampled)
        return sorted(drafters)

    def values(self, deeper: Candidates, parent_values: Floats | None) -> Floats:
        """The chances that nodes will be accepted."""
        if not len(deeper):
            return deeper.scores
        owners, depth, members = deeper.owners, int(deeper.depths[0]), self._members
        slopes, offsets = members.slopes[owners], members.offsets[owners]
        own = self._policy.estimator.of_level(depth, deeper.log_probs, deeper.parent_scores, slopes, offsets)
        if self._teaches:
            self._learn_children(deeper, parent_values, own)
        return own if parent_values is None else parent_values * own

    def expand(self, newest: Candidates) -> Ints:
        price, members = self._price, self._members
        depth = int(newest.depths[0]) if len(newest) else members.most_steps
        if depth >= members.most_steps:
            return newest.owners[:0]
        gains = self._gains_below(newest, depth)
        if depth >= members.least_steps:
            gains = np.where(newest.depths < members.bounds.num_steps[newest.owners], gains, 0.0)
        if gains.sum() <= price.least_level:
            return newest.owners[:0]
        order = (-gains).argsort(kind="stable")
        worth = gains[order].cumsum() - price.level.up_to(len(order))[1:]
        chosen = np.sort(order[: num_best(worth, 0.0)])
        return best_of_each(newest, chosen[gains[chosen] > 0.0], members.bounds.top_ks)

    def _gains_below(self, newest: Candidates, depth: int) -> Floats:
        """[M] expected tokens of children of nodes of one depth, beyond the price of those children that are worth it."""
        chances, children, kind = newest.values, self._policy.children[:, depth], self._members.kind
        prices = self._price.node / np.maximum(chances, 1e-9)
        if kind is not None:
            return chances * np.interp(prices, CHILD_PRICES, children[kind])
        of_greedy, of_sampled = (np.interp(prices, CHILD_PRICES, own) for own in children)
        return chances * np.where(self._members.kinds[newest.owners], of_sampled, of_greedy)

    def keep(self, candidates: Candidates) -> Ints:
        order = (-candidates.values).argsort(kind="stable")
        chances = candidates.values[order]
        prices = self._price.verify.up_to(len(order))
        count = num_best(chances.cumsum() - prices[1:], -prices[0])
        if self._teaches:
            self._verified = verified(chances, prices, count, self._price.rate)
        return best_of_each(candidates, np.sort(order[:count]), self._members.bounds.most_drafts)

    def learn(self, record: StepRecord) -> None:
        policy = self._policy
        total_ms = sum(part.ms for part in record.parts)
        for part in record.parts:
            policy.costs.correct(part, self._conditions)
        # A prompt that is read once says nothing about the steps to come.
        reads_prompts = any(part.part == "start" and part.num_rows > MOST_ROWS_OF_A_STEP * part.batch_size for part in record.parts)
        if not reads_prompts:
            gained = record.num_gained / len(self._sequences)
            share_drafted = len(self.drafters) / len(self._sequences)
            policy.prices.steps(self._conditions).add(gained, total_ms / self._price.plain_ms, share_drafted, self._verified)
            policy.guard(self._conditions).saw(bool(self.drafters), record.num_gained, total_ms)
        policy.allow_tries(total_ms)
        if self.drafters and self._teaches:
            self._learn_promises(record)
            self._learn_acceptance(record)

    def _learn_promises(self, record: StepRecord) -> None:
        promises = promises_of(record.candidates, len(self._sequences))
        for index in self.drafters:
            history = self._members.histories[index]
            history.add(promises[index])
            if history.num_idle:
                has_failed = not self._price.pays(self._price.utility(history.own.latest[: history.own.num_known]).mean())
                history.wait = min(LONGEST_WAIT, 2 * history.wait) if has_failed else FIRST_WAIT
                history.num_idle = 0

    def _learn_acceptance(self, record: StepRecord) -> None:
        members, labels, kept = self._members, record.is_accepted, record.candidates[record.kept]
        parents, is_first = np.searchsorted(record.kept, kept.parents), kept.parents < 0
        is_asked = is_first | (labels[parents] > 0)
        own = kept.values / np.where(is_first, 1.0, np.maximum(kept.values[parents], 1e-9))  # chances if the parent is accepted
        surprise = np.bincount(kept.owners, np.where(is_asked, labels - own, 0.0), len(self._sequences)).tolist()
        temperatures = members.temperatures[kept.owners]
        nodes = VerifiedNodes(kept.log_probs, kept.scores, kept.depths, temperatures, kept.values, labels, is_asked)
        self._policy.estimator.observe(nodes)
        for index in self.drafters:
            history = members.histories[index]
            correction = CORRECTION_DECAY * history.correction + CORRECTION_STEP * surprise[index]
            history.correction = min(MAX_CORRECTION, max(-MAX_CORRECTION, correction))
        members.estimate(self._policy.estimator)

    def _learn_children(self, deeper: Candidates, parent_values: Floats | None, own: Floats) -> None:
        """What the children of one level gain at each price; those of likely parents count most. own: [M] chances if the parent is
        accepted."""
        policy, depth = self._policy, int(deeper.depths[0]) - 1
        gains = np.maximum(0.0, own[:, None] - CHILD_PRICES)
        chances, parents = (np.ones(len(own)), deeper.owners) if parent_values is None else (parent_values, deeper.parents)
        kinds = self._members.kinds[deeper.owners]
        is_first = np.append(True, parents[1:] != parents[:-1])
        for kind in (0, 1):
            weights = np.where(kinds == kind, chances, 0.0)
            num_parents = weights[is_first].sum()
            if num_parents > 0:
                policy.num_levels_seen[kind, depth] += 1
                rate = max(CHILD_RATE, 1.0 / (2.0 + policy.num_levels_seen[kind, depth]))
                policy.children[kind, depth] += rate * (weights @ gains / num_parents - policy.children[kind, depth])


def num_best(worth: Floats, of_none: float) -> int:
    """How many to take, where the first 1, 2, ... together are worth so much and none at all `of_none`."""
    best = int(worth.argmax()) if len(worth) else -1
    return best + 1 if best >= 0 and worth[best] > of_none else 0
