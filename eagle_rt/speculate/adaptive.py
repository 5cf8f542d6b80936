"""Trees that pay: the draft of each step is sized for the most tokens per millisecond over the whole batch.

The price of time is the rate at which the engine has been gaining tokens, `rate` tokens/ms: whatever costs x ms must be expected
to gain more than rate * x tokens. With that price every choice of a step can be made by itself (Dinkelbach's method for
fractions), and all requests' candidates compete for the same time:

- whether a sequence drafts at all, by what its last drafts promised and drafts have gained beyond that, against catching its head
  up and drafting a first level (`drafters.py`);
- under which nodes another level is drafted, and whether it is drafted at all, against its rows;
- how many nodes are verified, the likeliest first, against what each more row costs the target.
"""

from collections.abc import Sequence

import numpy as np

from eagle_rt.speculate.acceptance import AcceptanceEstimator, Calibration, VerifiedNodes
from eagle_rt.speculate.compiled import (
    CHILD_PRICES,
    chances_of_level,
    gains_of_children,
    surprises_of,
    worth_expanding,
    worth_verifying,
)
from eagle_rt.speculate.costs import Conditions, StepCosts
from eagle_rt.speculate.drafters import LEVELS_OF_A_LESSON, Decision, DrafterChoice
from eagle_rt.speculate.forest import Candidates, Floats, Ints
from eagle_rt.speculate.members import MembersBook, conditions_of
from eagle_rt.speculate.policy import DraftPlan, FixedPlan, StepRecord, best_of_each, can_grow
from eagle_rt.speculate.prices import PriceBook, Verified, verified
from eagle_rt.speculate.promises import FIRST_CHANCES, promises_of
from eagle_rt.speculate.sequences import HostSequence

# Of the steps with drafts, after the first ones, one in so many teaches what nodes and time are worth, which takes time itself; but
# each does while drafts gain more or less than they are said to be worth by so many tokens.
NUM_FIRST_LESSONS, STEPS_A_LESSON, SURPRISING = 64, 8, 0.5
# How fast it is forgotten what children have gained, for each parent.
CHILD_RATE = 0.03
# How many more nodes than there are so far a tree with another level may have.
MORE_NODES = 64
NO_PLACES, NO_CHANCES = np.zeros(0, dtype=np.int64), np.zeros(0)
# Of a sequence's correction: how far it moves with a surprise, how fast it fades, and the most it may be, in logits.
CORRECTION_STEP, CORRECTION_DECAY, MAX_CORRECTION = 0.15, 0.98, 2.0
# What the first drafts take, for whose numbers of rows code is still generated, says nothing of later ones.
NUM_UNSETTLED = 16
# Where more of a step than this goes into rows that the head had missed, nothing is learned of what steps take.
MOST_READING = 0.15


class AdaptivePolicy:
    """costs and estimator may come from a profile. max_batch_size: larger batches are not drafted for."""

    def __init__(self, costs: StepCosts, estimator: AcceptanceEstimator, max_batch_size: int | None) -> None:
        self.costs, self.estimator, self.prices, self.book = costs, estimator, PriceBook(costs), MembersBook(estimator)
        self.choice = DrafterChoice(self.prices, self.book)
        self.num_drafted_steps = 0
        self._max_batch_size = max_batch_size
        # [D, 2, P] below a node of depth d, for greedy and for sampled sequences, at each of CHILD_PRICES: the expected sum of what
        # its children's chances are above the price. Not what the mean child is above it: those that are below it are left out.
        first = np.maximum(0.0, FIRST_CHANCES[:, None] - CHILD_PRICES).mean(axis=0)
        self.children = np.tile(first, (estimator.max_depth + 1, 2, 1))
        self._num_levels_seen = np.zeros((estimator.max_depth + 1, 2))

    @property
    def calibration(self) -> Calibration:
        return self.estimator.calibration

    def wants_drafts(self, batch_size: int, num_rows: int, is_sampled: bool) -> bool:
        if self._max_batch_size is not None and batch_size > self._max_batch_size:
            return False
        price = self.prices.at(Conditions(max(1, batch_size), num_rows, is_sampled))
        return self.choice.unknown_pays(price, num_rows, is_sampled)

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        self.choice.stay.add_step(len(sequences))
        is_too_large = self._max_batch_size is not None and len(sequences) > self._max_batch_size
        if is_too_large or not any(sequence.bounds for sequence in sequences):
            return RestingPlan(self, sequences)
        decision = self.choice.decide(sequences, num_missing)
        return AdaptivePlan(self, decision) if decision else RestingPlan(self, sequences)

    def learn_children(self, depth: int, gains: Floats, num_parents: Floats) -> None:
        """What the children of nodes of one depth have gained at each price, see `gains_of_children`."""
        for kind in num_parents.nonzero()[0]:
            self._num_levels_seen[depth, kind] += 1
            rate = max(1.0 - (1.0 - CHILD_RATE) ** num_parents[kind], 1.0 / (2.0 + self._num_levels_seen[depth, kind]))
            self.children[depth, kind] += rate * (gains[kind] / num_parents[kind] - self.children[depth, kind])

    def forget(self, sequence_id: str) -> None:
        if self.book.forget(sequence_id):
            self.choice.forget()


class RestingPlan(FixedPlan):
    """Of a step without drafts of which nothing is learned."""

    def __init__(self, policy: AdaptivePolicy, sequences: Sequence[HostSequence]) -> None:
        super().__init__((), drafts=False)
        self._policy, self._sequences = policy, sequences

    def learn(self, record: StepRecord) -> None:
        steps = self._policy.prices.steps(conditions_of(self._sequences))
        steps.add(1.0, 1.0)
        steps.add_worth(None)
        self._policy.choice.allow_tries(len(self._sequences), record.parts[-1].ms)


class AdaptivePlan:
    """The decisions of one step, and what is learned from it."""

    def __init__(self, policy: AdaptivePolicy, decision: Decision) -> None:
        self._policy, self._decision = policy, decision
        self._members, self._price = decision.members, decision.price
        self._teaches = True
        self._verified: Verified | None = None
        self._chances = np.zeros(0)  # of all candidates so far
        self.drafters = decision.drafters
        if self.drafters:
            policy.num_drafted_steps += 1
            is_due = policy.num_drafted_steps <= NUM_FIRST_LESSONS or policy.num_drafted_steps % STEPS_A_LESSON == 0
            is_due |= abs(decision.price.beyond) > SURPRISING
            self._teaches = is_due or decision.is_trial or any(self._members.histories[index].num_idle for index in self.drafters)

    def values(self, deeper: Candidates, parent_values: Floats | None) -> Floats:
        """The chances that nodes will be accepted."""
        if not len(deeper):
            return deeper.scores
        depth, members = int(deeper.depths[0]), self._members
        above = NO_CHANCES if parent_values is None else parent_values
        path, bias = self._policy.estimator.path_and_bias(depth)
        chances = chances_of_level(deeper.log_probs, deeper.scores, deeper.owners, members.lines, path, bias, above)
        if self._teaches:
            gains, num_parents = gains_of_children(chances, above, deeper.parents, deeper.owners, members.kinds)
            self._policy.learn_children(depth - 1, gains, num_parents)
        return chances

    def expand(self, newest: Candidates) -> Ints:
        price, members = self._price, self._members
        self._chances = np.concatenate((self._chances, newest.values))
        depth = int(newest.depths[0]) if len(newest) else members.most_steps
        if depth >= members.most_steps:
            return NO_PLACES
        chances = newest.values
        if depth >= members.least_steps:
            chances = np.where(depth < members.bounds.num_steps[newest.owners], chances, 0.0)
        verify = price.verify.up_to(len(self._chances) + MORE_NODES)
        level = price.level.up_to(len(newest))
        children, top_ks = self._policy.children[depth], members.bounds.top_ks
        worth = worth_expanding(chances, newest.owners, members.kinds, top_ks, children, self._chances, verify, level)
        if self._teaches and depth < LEVELS_OF_A_LESSON:
            # Also below what is not believed to be worth it: only what is drafted shows what lower levels promise.
            return np.union1d(worth, best_of_each(newest, can_grow(newest, members.bounds), np.minimum(1, top_ks)))
        return worth

    def keep(self, candidates: Candidates) -> Ints:
        prices = self._price.verify.up_to(len(candidates))
        kept, count = worth_verifying(candidates.values, candidates.owners, self._members.bounds.most_drafts, prices)
        if self._teaches:
            self._verified = verified(-np.sort(-candidates.values), prices, count, self._price.rate_of_trees)
        return kept

    def learn(self, record: StepRecord) -> None:
        policy, conditions, batch_size = self._policy, self._decision.conditions, len(self._members)
        total_ms = sum(part.ms for part in record.parts)
        if self._teaches:
            for part in record.parts:
                policy.costs.correct(part, conditions)
        steps, gained = policy.prices.steps(conditions), record.num_gained / batch_size
        reading_ms, plain_ms = self._reading_ms(record), self._price.plain_ms
        steps.add(gained, total_ms / plain_ms, reading_ms / plain_ms, len(self.drafters) / batch_size, self._verified)
        is_settled = policy.num_drafted_steps > NUM_UNSETTLED and reading_ms < MOST_READING * total_ms
        if not self.drafters:
            steps.add_worth(None)
        elif is_settled and not self._decision.is_trial:
            steps.add_worth(self._worth_beyond(record, total_ms - reading_ms))
        policy.choice.allow_tries(batch_size, total_ms)
        if self.drafters and self._teaches:
            self._learn_promises(record)
            self._learn_acceptance(record)

    def _reading_ms(self, record: StepRecord) -> float:
        """Of the time what went into rows that the head had missed."""
        starts = [part for part in record.parts if part.part == "start"]
        num_missed = sum(part.num_rows - self._price.rows_read * part.batch_size for part in starts)
        return min(sum(part.ms for part in starts), max(0.0, self._price.missed_row * num_missed / self._price.rate))

    def _worth_beyond(self, record: StepRecord, step_ms: float) -> float:
        """See `Pace.beyond`."""
        price, batch_size = self._price, len(self._members)
        length = self._policy.prices.steps(self._decision.conditions).counted(step_ms / price.plain_ms)
        worth = record.num_gained - batch_size - price.rate * price.plain_ms * (length - 1.0)
        return price.beyond + (worth - self._decision.worth) / len(self.drafters)

    def _learn_promises(self, record: StepRecord) -> None:
        promises = promises_of(record.candidates, len(self._members))
        for index in self.drafters:
            history = self._members.histories[index]
            history.add(promises[index])
            if history.num_idle:
                history.tried(not self._price.pays(self._price.utility(history.own.latest[: history.own.num_known]).mean()))

    def _learn_acceptance(self, record: StepRecord) -> None:
        members, labels, kept = self._members, record.is_accepted(), record.candidates[record.kept]
        is_asked, surprises = surprises_of(kept.values, kept.owners, kept.parents, record.kept, labels, len(members))
        temperatures = members.temperatures[kept.owners]
        nodes = VerifiedNodes(kept.log_probs, kept.scores, kept.depths, temperatures, kept.values, labels, is_asked)
        self._policy.estimator.observe(nodes)
        for index in self.drafters:
            history = members.histories[index]
            correction = CORRECTION_DECAY * history.correction + CORRECTION_STEP * float(surprises[index])
            history.correction = min(MAX_CORRECTION, max(-MAX_CORRECTION, correction))
        members.estimate(self._policy.estimator)
