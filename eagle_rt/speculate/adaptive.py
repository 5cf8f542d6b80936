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

from eagle_rt.speculate.acceptance import AcceptanceEstimator, Calibration, Drift, VerifiedNodes
from eagle_rt.speculate.compiled import CHILD_PRICES, MORE_NODES, grown, learn_children, surprises_of, worth_verifying
from eagle_rt.speculate.costs import Conditions, StepCosts
from eagle_rt.speculate.drafters import LEVELS_OF_A_LESSON, Decision, DrafterChoice
from eagle_rt.speculate.forest import Candidates, Floats, Ints
from eagle_rt.speculate.members import MembersBook, conditions_of
from eagle_rt.speculate.policy import RESTING, DraftPlan, Rests, StepRecord, bounds_of
from eagle_rt.speculate.prices import Price, PriceBook, RecentSteps, Verified
from eagle_rt.speculate.promises import FIRST_CHANCES, promises_of, utilities_at
from eagle_rt.speculate.sequences import HostSequence

# Of the steps with drafts, after the first ones, one in so many teaches what nodes are worth, which takes time itself; but
# each does while drafts gain more or less than they are said to be worth by so many tokens.
NUM_FIRST_LESSONS, STEPS_A_LESSON, SURPRISING = 64, 16, 0.5
NO_PLACES, NO_CHANCES = np.zeros(0, dtype=np.int64), np.zeros(0)
# Of a sequence's correction: how far it moves with a surprise, how fast it fades, and the most it may be, in logits.
CORRECTION_STEP, CORRECTION_DECAY, MAX_CORRECTION = 0.15, 0.98, 2.0
# What the first drafts take, for whose numbers of rows code is still generated, says nothing of later ones.
NUM_UNSETTLED = 16
# But for what heads read a step of a trial loses no more than so many plain ones last: machines stand still now and then.
MOST_LOST = 4.0
# Where more of a step than this goes into rows that the head had missed, nothing is learned of what steps take.
MOST_READING = 0.15
# Beside a copy that is wrong more often a head is worth asking in any case.
MOST_MISSES = 0.5


class AdaptivePolicy:
    """costs and estimator may come from a profile. max_batch_size: larger batches are not drafted for."""

    has_chances = True

    def __init__(self, costs: StepCosts, estimator: AcceptanceEstimator, max_batch_size: int | None) -> None:
        self.costs, self.estimator, self.prices, self.book = costs, estimator, PriceBook(costs), MembersBook(estimator)
        self.choice = DrafterChoice(self.prices, self.book)
        self.num_drafted_steps = 0
        self.drifts = {is_sampled: Drift() for is_sampled in (False, True)}
        self._last: Decision | None = None
        self._max_batch_size = max_batch_size
        # [D, 2, P] below a node of depth d, for greedy and for sampled sequences, at each of CHILD_PRICES: the expected sum of what
        # its children's chances are above the price. Not what the mean child is above it: those that are below it are left out.
        first = np.maximum(0.0, FIRST_CHANCES[:, None] - CHILD_PRICES).mean(axis=0)
        self.children = np.tile(first, (estimator.max_depth + 1, 2, 1))
        self.num_levels_seen = np.zeros((estimator.max_depth + 1, 2))

    @property
    def calibration(self) -> Calibration:
        return self.estimator.calibration

    def wants_drafts(self, batch_size: int, num_rows: int, is_sampled: bool) -> bool:
        if self._max_batch_size is not None and batch_size > self._max_batch_size:
            return False
        price = self.prices.last(Conditions(max(1, batch_size), num_rows, is_sampled))
        return self.choice.unknown_pays(price, num_rows, is_sampled)

    def rests(self, num_sequences: int) -> bool:
        return (self._max_batch_size is not None and num_sequences > self._max_batch_size) or self.choice.rests(num_sequences)

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        may_draft = any(sequence.bounds for sequence in sequences)
        self._last = self.choice.decide(sequences, num_missing) if may_draft else None
        return AdaptivePlan(self, self._last) if self._last and self._last.drafters else RESTING

    def learn_rests(self, rests: Rests) -> None:
        self.prices.between_ms = rests.between_ms
        if not self._last or not rests.steps:
            return
        count, price = len(rests.steps), self._last.price
        for observation in rests.observations(len(self._last.members), price.plain_ms):
            self.costs.correct(observation, self._last.conditions)
            self.choice.add_plain_step(self._last, observation.ms + rests.between_ms)
        self.prices.add_steps(count)
        self.prices.steps(self._last.conditions).add_rests(count, sum(ms for _, ms in rests.steps))
        self.choice.stay.add_steps(sum(size for size, _ in rests.steps))
        self.choice.allow_tries(price.plain_ms, count)

    @property
    def is_measuring(self) -> bool:
        return self.choice.is_measuring

    def leaves_to_copies(self, sequences: Sequence[HostSequence], misses: Floats) -> bool:
        """A head's tree gains something only where the copy is wrong."""
        if misses.min() > MOST_MISSES:
            return False
        price = self._price(sequences)
        utilities = utilities_at(price, self.book.of(sequences).histories)
        return float(misses @ np.maximum(0.0, utilities)) <= price.starts[-1]

    def keep_copies(self, sequences: Sequence[HostSequence], chances: Floats, owners: Ints, kept: Ints) -> Ints:
        """Those that pay beside what is verified in any case."""
        batch_size, count = len(sequences), len(kept)
        if self._max_batch_size is not None and batch_size > self._max_batch_size:
            return owners[:0]
        limits = bounds_of(tuple(sequence.bounds for sequence in sequences)).most_drafts
        if count:
            limits = limits - np.bincount(kept, minlength=batch_size)
        prices = self._price(sequences).verify(count + len(chances))
        return worth_verifying(chances, owners, limits, prices[count:], False)[0]

    def _price(self, sequences: Sequence[HostSequence]) -> Price:
        """Of steps that were decided on last, if they had as many sequences."""
        last = self._last
        if last and last.conditions.batch_size == len(sequences):
            return last.price
        return self.prices.last(conditions_of(sequences))

    def add_copied(self, sequences: Sequence[HostSequence]) -> None:
        """What these steps take is not learned: it would say something of plain steps, too, which are then seldom made by
        themselves, and drafts would seem cheaper than they are."""
        self.prices.add_steps(1)
        self.choice.stay.add_steps(len(sequences))

    def forget(self, sequence_id: str) -> None:
        if self.book.forget(sequence_id):
            self.choice.forget()


class AdaptivePlan:
    """The decisions of one step with drafts, and what is learned from it."""

    def __init__(self, policy: AdaptivePolicy, decision: Decision) -> None:
        self._policy, self._decision = policy, decision
        self._members, self._price = decision.members, decision.price
        self._verified: Verified | None = None
        self._chances = NO_CHANCES  # of all candidates so far
        self._drift, self._expected, self._variance = policy.drifts[decision.conditions.is_sampled], 0.0, 0.0
        self._members.drift_to(self._drift.logits)
        self.drafters = decision.drafters
        policy.num_drafted_steps += 1
        is_due = policy.num_drafted_steps <= NUM_FIRST_LESSONS or policy.num_drafted_steps % STEPS_A_LESSON == 0
        is_due |= bool(abs(decision.price.beyond) > SURPRISING)
        self.teaches = is_due or decision.is_trial or any(self._members.histories[index].num_idle for index in self.drafters)

    def expand(self, newest: Candidates) -> Ints:
        """Values are the chances that nodes will be accepted."""
        policy, chances, num_nodes = self._policy, self._chances, len(newest)
        if not num_nodes:
            return NO_PLACES
        depth = int(newest.depths[0])
        places, self._chances = grown(
            newest.log_probs,
            newest.scores,
            newest.owners,
            newest.values,
            chances,
            depth,
            policy.estimator.path_and_biases,
            self._members.numbers,
            # Also below what is not believed to be worth it: only what is drafted shows what lower levels promise.
            self.teaches and depth < LEVELS_OF_A_LESSON,
            policy.children,
            self._price.lists.up_to(len(chances) + num_nodes + MORE_NODES),
        )
        return places

    def keep(self, candidates: Candidates) -> Ints:
        prices = self._price.verify(len(candidates))
        kept, count, last, self._expected, self._variance = worth_verifying(
            candidates.values, candidates.owners, self._members.bounds.most_drafts, prices, self._decision.is_halved
        )
        if self.teaches:
            self._verified = Verified(count, float(prices[count] - prices[0]) / self._price.rate_of_trees, last)
        return kept

    def learn(self, record: StepRecord) -> None:
        policy, conditions, batch_size = self._policy, self._decision.conditions, len(self._members)
        total_ms, reading_ms, plain_ms = record.total_ms - self._copied_ms(record), self._reading_ms(record), self._price.plain_ms
        is_reading = reading_ms >= MOST_READING * total_ms
        # What it takes to read much says little of what it takes to draft.
        for part in record.parts[1:] if is_reading else record.parts:
            policy.costs.correct(part, conditions)
        if is_reading:
            policy.prices.add_reading(self._price, len(self.drafters), self._num_missed(record), record.parts[0].ms)
        steps, gained = policy.prices.steps(conditions), record.num_gained / batch_size
        steps.add(gained, total_ms / plain_ms, reading_ms / plain_ms, len(self.drafters) / batch_size, self._verified)
        if policy.num_drafted_steps > NUM_UNSETTLED and not is_reading and not self._decision.is_halved:
            steps.add_worth(self._worth_beyond(steps, record, total_ms - reading_ms))
        self._drift.move(record.num_gained - batch_size, self._expected, self._variance)
        policy.prices.add_steps(1)
        policy.choice.stay.add_steps(batch_size)
        policy.choice.allow_tries(total_ms)
        if self._decision.is_trial:
            gain = record.num_gained - batch_size * (total_ms - reading_ms) / plain_ms
            lost_ms = min(MOST_LOST * plain_ms, total_ms - reading_ms - plain_ms * record.num_gained / batch_size)
            policy.choice.add_trial(gain, len(self.drafters), lost_ms + reading_ms + record.teaching_ms)
        if self.teaches:
            self._learn_children(record.candidates)
            self._learn_promises(record)
            self._learn_acceptance(record)

    def _copied_ms(self, record: StepRecord) -> float:
        """Of the time what went into copies, whose tokens are none that heads gain."""
        if not record.num_copied:
            return 0.0
        own, prices = len(record.kept), self._price.verify(len(record.kept) + record.num_copied)
        return float(prices[own + record.num_copied] - prices[own]) / self._price.rate_of_trees

    def _reading_ms(self, record: StepRecord) -> float:
        """Of the time what went into rows that the head had missed."""
        price, start = self._price, record.parts[0]
        return min(start.ms, max(0.0, price.missed_row * self._num_missed(record) / price.rate))

    def _num_missed(self, record: StepRecord) -> float:
        """Rows that the heads of drafters had missed."""
        start = record.parts[0]
        return start.num_rows - self._price.rows_read * start.batch_size

    def _worth_beyond(self, steps: RecentSteps, record: StepRecord, step_ms: float) -> float:
        """See `Pace.beyond`."""
        price, batch_size = self._price, len(self._members)
        length = steps.counted(step_ms / price.plain_ms)
        worth = record.num_gained - batch_size - price.rate * price.plain_ms * (length - 1.0)
        return price.beyond + (worth - self._decision.worth) / len(self.drafters)

    def _learn_children(self, nodes: Candidates) -> None:
        policy = self._policy
        chances, owners, kinds = nodes.values, nodes.owners, self._members.kinds
        learn_children(policy.children, policy.num_levels_seen, chances, owners, nodes.parents, nodes.depths, kinds)

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
