"""Which sequences of a batch draft: those whose drafts together gain most beyond the price of a first level, if any do.

That is not asked anew in every step. And since sequences that do not draft show nothing, some are tried now and then, beside others
or where none drafts, in a small share of the time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from eagle_rt.speculate.costs import Conditions
from eagle_rt.speculate.members import Members, MembersBook, conditions_of
from eagle_rt.speculate.policy import num_cold
from eagle_rt.speculate.prices import Price, PriceBook, Stay
from eagle_rt.speculate.promises import HOPED_FOR, utilities_at
from eagle_rt.speculate.sequences import HostSequence

# After a step in which nothing was worth drafting some go without asking: the more, the longer that lasts, up to so many
# milliseconds. Where steps are short, asking takes a third of one; and a trial is paid for only every so often, before which asking
# hardly ever changes anything.
LONGEST_REST_MS = 250.0
# Where all have left they are shorter by so many times, since others may come for whom drafts pay; where one has, by its share.
SHORTER_RESTS = 4.0
# After one in which all drafted some do so without asking, more where that was worth so many times its price.
NUM_UNASKED, NUM_UNASKED_WHERE_CLEAR, CLEARLY_WORTH_IT = 5, 11, 1.25
# Tries of sequences that do not draft, and trials where none does: their share of the time, saved up for so many steps. More would
# find new texts sooner, and cost more where nothing pays.
TRY_SHARE, MOST_STEPS_ALLOWED_FOR = 0.0075, 1024
# How long a trial is, if what it comes to leaves hope; how many draft in it, for whom heads have the least to read; and how deep
# its drafts are at least, and all from which is learned. From one to the next there are so many steps: else what a long rest has
# saved up would be spent in one go where drafts nearly pay.
STEPS_OF_A_TRIAL, MOST_IN_A_TRIAL, LEVELS_OF_A_LESSON, STEPS_BETWEEN_TRIALS = 4, 8, 2, 32
# A batch that has grown by more than this share rests for a step where heads would have to read more rows than so many of each of
# its sequences: more are to come, and what pays for few need not pay for many. Where it rested before it is not even asked.
GROWING, UNREAD_ROWS = 0.25, 32
# Plain steps are what prices are in units of: some are made in a row now and then, since what they take can hardly be told from
# what steps with drafts take, nor, where they are short, what many in a row do from a single one. They may lose such a share of
# the time against drafts, which makes them rare where drafts gain much, and where they gain little, it matters the most. But they
# come after so many steps with drafts at least, and at most: these become twice as many each time. Where one took more or less
# than was believed by such a share, a logarithm, and by such a share of what drafts gain, they come again at once, and soon
# after that: memory that is faster in one second than in the next would ask for them all the time. And each time half a tree
# follows.
PLAIN_SHARE, A_SURPRISE, SHARE_OF_GAIN = 0.005, 0.15, 0.5
LEAST_BETWEEN, FIRST_MOST_BETWEEN, MOST_BETWEEN = 16, 64, 256
# What a plain step takes was believed so wrongly, a logarithm too, that prices are worked out anew, and decisions made.
MUCH_WRONG = 0.05


@dataclass(frozen=True)
class Decision:
    """Who of a batch drafts, and what time costs it. drafters: numbers of members, ascending; worth: tokens that their drafts are
    expected to gain beyond their price, once the head has read what it missed; is_trial: they draft though that is not believed to
    pay; is_halved: half of the nodes that are worth it are verified, since nothing else shows what fewer rows take."""

    members: Members
    conditions: Conditions
    price: Price
    drafters: list[int]
    worth: float = 0.0
    is_trial: bool = False
    is_halved: bool = False


class Offer(NamedTuple):
    """What a member's next draft is believed to be worth, what its head has to read for it first, and that spread over the steps
    for which it stays, all in tokens."""

    number: int
    utility: float
    reading: float
    spread: float

    @property
    def gain(self) -> float:
        return self.utility - self.spread


def worth_of(offers: Sequence[Offer], price: Price) -> float:
    """Tokens that the drafts of just these are expected to gain beyond their price, once the head has read what it missed."""
    return sum(offer.utility for offer in offers) - price.starts[len(offers)]


def is_about(num_sequences: int, others: int) -> bool:
    """Whether two batches are of about the same size."""
    return 4 * abs(num_sequences - others) <= others


def trial_of(begun: Decision, num_missing: Sequence[int]) -> Decision:
    """Those that draft in one are the same in all of its steps, while they stay: they have the least to read, since they have."""
    may_draft = [index for index, (_, shape) in enumerate(begun.members.key) if shape]
    fewest = sorted(may_draft, key=num_missing.__getitem__)[:MOST_IN_A_TRIAL]
    return replace(begun, drafters=sorted(fewest), is_trial=True)


def num_plain_steps(price: Price) -> int:
    """In a row, after drafts, so that one is among them from which something is learned."""
    return num_cold(price.plain_ms) + 1


class DrafterChoice:
    """allowance_ms: the time that is left for tries.

    For num_unasked steps the last decision holds without asking, which was that all of these sequences draft or that none of about
    so many does; num_rested: steps that rested after the one before, less the shares of those that have left since;
    unknown_may_draft: whether one of which nothing is known would draft; is_measuring: this step is made without drafts for what
    that takes.
    """

    def __init__(self, prices: PriceBook, book: MembersBook) -> None:
        self.stay, self.allowance_ms = Stay(), 0.0
        self.num_unasked, self.num_rested = 0, 0.0
        self.unknown_may_draft = True
        # Of the trial so far: the drafts, the tokens that they have gained beyond plain decoding, and the time that was left for
        # tries before it: one that seems to gain time must not pay for the next one.
        self._num_tried, self._tried_gain, self._most_allowed_ms = 0, 0.0, 0.0
        self._steps_since_trial = STEPS_BETWEEN_TRIALS  # since the last one began
        self._prices, self._book = prices, book
        self._last: Decision | None = None
        self._last_size = 0  # sequences of the last step, whether it was asked or not
        self._known: set[str] = set()  # those of the batch that was asked last
        # Plain steps that are still to be made in a row. And of batches of about each size: steps with drafts since any were
        # measured, and after how many they are due at most.
        self._num_plain, self.is_measuring = 0, False
        self._drafted: dict[tuple[int, bool], tuple[int, int]] = {}
        self._were_plain = False  # the last ones were such steps

    def rests(self, num_sequences: int) -> bool:
        """Whether a step of so many goes without asking, as none drafted when it was asked last, or drafts nothing in any case:
        also while one has left and the next one's prompt is read, and while many come."""
        last, before = self._last, self._last_size
        self._last_size, self.is_measuring = num_sequences, False
        if not last:
            return False
        if not last.drafters and num_sequences > (1.0 + GROWING) * before:
            return True
        if not (is_about(num_sequences, len(last.members)) or abs(num_sequences - len(last.members)) == 1):
            return False
        if self._num_plain:
            self._num_plain, self.is_measuring = self._num_plain - 1, True
            return True
        if last.drafters or not self.num_unasked:
            return False
        self.num_unasked -= 1
        return True

    def decide(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> Decision:
        """num_missing: rows of each that its head has to catch up with."""
        decision = self._decided(sequences, num_missing)
        are_due = bool(decision.drafters) and not decision.is_trial and self._plain_steps_are_due(decision)
        self._num_plain, self.is_measuring = num_plain_steps(decision.price) - 1 if are_due else 0, are_due
        self._were_plain, were_plain = are_due, self._were_plain
        if are_due:
            return replace(decision, drafters=[])
        return replace(decision, is_halved=True) if were_plain and not decision.is_trial else decision

    def _decided(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> Decision:
        """`decide` by what drafts are worth alone."""
        if self._last and self._last.drafters and self.num_unasked and self._is_as_asked(self._last, sequences):
            self.num_unasked -= 1
            if self._last.is_trial:
                self._last = trial_of(replace(self._begun(sequences), worth=self._last.worth), num_missing)
            elif self._book.of(sequences) is not self._last.members:
                self._last = self._all(sequences)
            return self._last
        begun = self._begun(sequences)
        if self._is_growing(begun.members, num_missing):
            return begun
        self._last = decision = self._with_drafters(begun, num_missing)
        self.unknown_may_draft = self.unknown_pays(begun.price, begun.conditions.context, begun.conditions.is_sampled)
        return decision

    def _plain_steps_are_due(self, decision: Decision) -> bool:
        key, price = decision.conditions.kind, decision.price
        count, most = self._drafted.get(key, (0, FIRST_MOST_BETWEEN))
        is_due = count >= min(most, max(LEAST_BETWEEN, num_plain_steps(price) * (price.speed - 1.0) / PLAIN_SHARE))
        self._drafted[key] = (0, min(MOST_BETWEEN, max(LEAST_BETWEEN, 2 * most))) if is_due else (count + 1, most)
        return is_due

    def unknown_pays(self, price: Price, num_rows: float, is_sampled: bool) -> bool:
        """Whether new sequences would draft, of which nothing is known, where a head has to read so many rows of each first."""
        common, _ = self._book.common[is_sampled].utility(price)
        return price.pays(common - price.missed_row * num_rows / self.stay.num_steps)

    def allow_tries(self, step_ms: float, num_steps: int = 1) -> None:
        """Some of the time of steps goes into drafts of sequences that do not draft otherwise."""
        self._steps_since_trial += num_steps
        allowed_ms = TRY_SHARE * step_ms
        self.allowance_ms = min(self.allowance_ms + num_steps * allowed_ms, MOST_STEPS_ALLOWED_FOR * allowed_ms)

    def add_plain_step(self, then: Decision, ms: float) -> None:
        """One, after some without drafts, took so long where that was decided."""
        key, price = then.conditions.kind, then.price
        surprise, gain = abs(math.log(ms / price.plain_ms)), math.log(price.speed)
        _, most = self._drafted.get(key, (0, FIRST_MOST_BETWEEN))
        is_surprise = surprise > max(A_SURPRISE, SHARE_OF_GAIN * gain)
        self._drafted[key] = 0, 0 if is_surprise else max(LEAST_BETWEEN, most)
        if surprise > MUCH_WRONG:
            self._prices.forget(then.conditions)
            self.num_unasked = 0

    def add_trial(self, gain: float, num_drafts: int, lost_ms: float) -> None:
        """A step of one, with so many drafts, gained so many tokens more than plain decoding would have in its time, but for what
        heads read; and lost that much time, all told. A trial ends where it is a loss beyond chance: what a single draft gains
        varies by about one token."""
        self.allowance_ms = min(self._most_allowed_ms, self.allowance_ms - lost_ms)
        self._num_tried, self._tried_gain = self._num_tried + num_drafts, self._tried_gain + gain
        if self._tried_gain < -(self._num_tried**0.5):
            self.num_unasked = 0

    def forget(self) -> None:
        """One has left, another may take its place: drafts of all, before which nothing rested, end, and rests become shorter."""
        self.stay.add_end()
        last = self._last
        if last and not last.is_trial and self.unknown_may_draft != bool(last.drafters):
            self.num_rested /= SHORTER_RESTS ** (1.0 / len(last.members))
            self.num_unasked = min(self.num_unasked, int(self.num_rested))

    def _is_growing(self, members: Members, num_missing: Sequence[int]) -> bool:
        before, self._known = self._known, {sequence_id for sequence_id, _ in members.key}
        num_new = len(self._known - before)
        is_same_size = len(before) == len(members)
        return not is_same_size and num_new > GROWING * (len(members) - num_new) and min(num_missing) > UNREAD_ROWS

    def _begun(self, sequences: Sequence[HostSequence]) -> Decision:
        """Nobody drafts so far."""
        conditions = conditions_of(sequences)
        return Decision(self._book.of(sequences), conditions, self._prices.at(conditions), [])

    def _is_as_asked(self, last: Decision, sequences: Sequence[HostSequence]) -> bool:
        """Drafts of all go on, as rests do, while one leaves and the next one's prompt is read, until too many have, or drafts have
        come to gain much less than was said."""
        if last.is_trial:
            return True
        if self._prices.is_wrong(last.price, last.conditions):
            return False
        if not (self.unknown_may_draft and all(own.bounds for own in sequences)):
            return self._book.of(sequences) is last.members
        return is_about(len(sequences), len(last.members))

    def _all(self, sequences: Sequence[HostSequence]) -> Decision:
        """As all of those did that were asked last."""
        assert self._last
        worth = self._last.worth * len(sequences) / len(self._last.members)
        return replace(self._begun(sequences), drafters=list(range(len(sequences))), worth=worth)

    def _with_drafters(self, begun: Decision, num_missing: Sequence[int]) -> Decision:
        """The more share a first level, the cheaper it is."""
        price = begun.price
        offers = self._offers(begun, num_missing)
        gains = list(accumulate((offer.gain for offer in offers), initial=0.0))
        worth = [gain - start for gain, start in zip(gains, price.starts, strict=False)]
        num_drafters = worth.index(max(worth))
        drafters, idle = offers[:num_drafters], offers[num_drafters:]
        tries = self._tries_of(begun, idle, num_drafters)
        is_due = self._steps_since_trial >= STEPS_BETWEEN_TRIALS
        if is_due and not drafters and price.pays(price.utility(HOPED_FOR).mean()):
            trial = trial_of(begun, num_missing)
            trying = [offer for offer in offers if offer.number in trial.drafters]
            trial = replace(trial, worth=self._worth_of_trial(trial, trying))
            if self._affords_trial(trial, trying):
                # If it is in vain, so many steps rest afterwards that a plain one is measured.
                self.num_unasked, self.num_rested = STEPS_OF_A_TRIAL - 1, float(num_plain_steps(price) // 2)
                self._num_tried, self._tried_gain, self._most_allowed_ms = 0, 0.0, self.allowance_ms
                self._steps_since_trial = 0
                return trial
        self._hold(
            are_any=bool(drafters or tries),
            are_all=num_drafters == len(begun.members),
            is_clear=gains[-1] > CLEARLY_WORTH_IT * price.starts[-1],
            plain_ms=price.plain_ms,
        )
        chosen = sorted(offer.number for offer in drafters + tries)
        return replace(begun, drafters=chosen, worth=worth_of(drafters, price))

    def _offers(self, begun: Decision, num_missing: Sequence[int]) -> list[Offer]:
        """Of those that may draft, best first."""
        price = begun.price
        indices = [index for index, (_, shape) in enumerate(begun.members.key) if shape]
        histories = [begun.members.histories[index] for index in indices]
        offers = []
        for index, history, utility in zip(indices, histories, utilities_at(price, histories), strict=True):
            reading = price.missed_row * max(0.0, num_missing[index] - price.rows_read)
            offers.append(Offer(index, utility, reading, reading / self.stay.steps_left(history.num_idle)))
        return sorted(offers, key=lambda offer: -offer.gain)

    def _tries_of(self, begun: Decision, idle: list[Offer], num_drafters: int) -> list[Offer]:
        """Those that draft beside others for what that shows, of those that have been idle for long."""
        price, histories = begun.price, begun.members.histories
        for offer in idle:
            histories[offer.number].num_idle += 1 + int(self.num_rested)
        due = [offer for offer in idle if histories[offer.number].num_idle >= histories[offer.number].wait]
        tries: list[Offer] = []
        if num_drafters and due and price.pays(price.utility(HOPED_FOR).mean()):
            for offer in due:
                num_others = num_drafters + len(tries)
                cost = (offer.reading + price.first_levels[num_others + 1] - price.first_levels[num_others]) / price.rate
                if self._affords(cost):
                    tries.append(offer)
        return tries

    def _worth_of_trial(self, trial: Decision, offers: list[Offer]) -> float:
        """See `Decision.worth`: of drafts which are deeper than they might be, so that lower levels are seen."""
        price, latest = trial.price, self._book.common[trial.conditions.is_sampled].latest
        deeper = price.utility(latest, LEVELS_OF_A_LESSON) - price.utility(latest)
        return worth_of(offers, price) + len(offers) * float(deeper.mean())

    def _affords_trial(self, trial: Decision, offers: list[Offer]) -> bool:
        """Where nobody drafts, whether some may for a few steps, which will be paid for by what they come to."""
        reading = sum(offer.reading for offer in offers)
        return (reading + STEPS_OF_A_TRIAL * max(0.0, -trial.worth)) / trial.price.rate <= self.allowance_ms

    def _hold(self, *, are_any: bool, are_all: bool, is_clear: bool, plain_ms: float) -> None:
        """For how many steps nobody is asked. are_all: all draft, and none as a try; plain_ms: of a step without drafts."""
        self.num_rested = 0.0 if are_any else min(max(1.0, LONGEST_REST_MS // plain_ms), 1.0 + 2.0 * self.num_rested)
        self.num_unasked = int(self.num_rested)
        if are_all:
            self.num_unasked = NUM_UNASKED_WHERE_CLEAR if is_clear else NUM_UNASKED

    def _affords(self, ms: float) -> bool:
        """Spends that on a try, if there is so much left for tries."""
        if ms > self.allowance_ms:
            return False
        self.allowance_ms -= ms
        return True
