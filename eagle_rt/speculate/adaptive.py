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

import numpy as np

from eagle_rt.speculate.acceptance import AcceptanceEstimator
from eagle_rt.speculate.costs import StepCosts, bucket
from eagle_rt.speculate.forest import Candidates, Floats, Ints, ranks_within_owners
from eagle_rt.speculate.policy import DraftPlan, StepRecord, best_of_each, in_bounds
from eagle_rt.speculate.sequences import HostSequence

# What the best nodes of a sequence's draft promise before it has drafted.
FIRST_PROMISES = np.array([0.75, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05])
PROMISE_RATE, COMMON_RATE, TRY_RATE = 0.15, 0.015, 0.5
RATE_MEMORY = 0.97
USES_OF_A_PRICE = 16
# Of the chance that one of a node's children is accepted if the node is.
REACH_RATE, FIRST_REACH = 0.02, 0.7
CORRECTION_STEP, CORRECTION_DECAY, MAX_CORRECTION = 0.15, 0.98, 2.0
# Tries of sequences that do not draft: their share of the time, and the steps between them, which double while they fail.
TRY_SHARE, FIRST_WAIT, LONGEST_WAIT = 0.01, 16, 512


class DraftHistory:
    """What a sequence's drafts have promised so far: expected acceptance of the best nodes, best first."""

    def __init__(self, promises: Floats) -> None:
        self.promises = promises.copy()
        self.correction = 0.0
        self.num_idle, self.wait = 0, FIRST_WAIT


class Rate:
    """Tokens per millisecond of one batch size, as a moving mean that begins at what plain decoding would gain."""

    def __init__(self, tokens: float, ms: float) -> None:
        self._tokens, self._ms = tokens, ms

    def add(self, tokens: float, ms: float) -> None:
        self._tokens = RATE_MEMORY * self._tokens + tokens
        self._ms = RATE_MEMORY * self._ms + ms

    @property
    def value(self) -> float:
        return self._tokens / self._ms


class AdaptivePolicy:
    """costs and estimator may come from a profile. max_batch_size: larger batches are not drafted for."""

    def __init__(self, costs: StepCosts, estimator: AcceptanceEstimator, max_batch_size: int | None) -> None:
        self.costs, self.estimator = costs, estimator
        self.calibration = estimator.calibration
        self.allowance_ms = 0.0
        self._max_batch_size = max_batch_size
        self._histories: dict[str, DraftHistory] = {}
        self._rates: dict[int, Rate] = {}
        self._prices: dict[tuple[int, int], Price] = {}
        self._common = {False: DraftHistory(FIRST_PROMISES), True: DraftHistory(FIRST_PROMISES)}
        self.reach = {is_sampled: np.full(estimator.max_depth + 2, FIRST_REACH) for is_sampled in (False, True)}

    def wants_drafts(self, batch_size: int) -> bool:
        if self._max_batch_size is not None and batch_size > self._max_batch_size:
            return False
        batch_size = max(1, batch_size)
        price = self.price(batch_size, context=64)
        return any(price.utility(common.promises) > 0 for common in self._common.values())

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        is_allowed = self._max_batch_size is None or len(sequences) <= self._max_batch_size
        return AdaptivePlan(self, sequences, num_missing, is_allowed)

    def forget(self, sequence_id: str) -> None:
        self._histories.pop(sequence_id, None)

    def history(self, sequence: HostSequence) -> DraftHistory:
        history = self._histories.get(sequence.id)
        if history is None:
            history = self._histories[sequence.id] = DraftHistory(self.common(sequence).promises)
        return history

    def common(self, sequence: HostSequence) -> DraftHistory:
        """What drafts have promised lately for sequences like this one."""
        return self._common[sequence.temperature > 0]

    def rate(self, batch_size: int) -> Rate:
        if batch_size not in self._rates:
            ms = float(self.costs.ms("verify", batch_size, batch_size, 64))
            self._rates[batch_size] = Rate(8.0 * batch_size, 8.0 * ms)
        return self._rates[batch_size]

    def price(self, batch_size: int, context: float) -> "Price":
        """Worked out anew every few steps."""
        key = bucket(batch_size, context)
        price = self._prices.get(key)
        if price is None or price.batch_size != batch_size or price.num_uses >= USES_OF_A_PRICE:
            price = self._prices[key] = Price(self, batch_size, context)
        price.num_uses += 1
        return price


class Price:
    """What time costs in tokens, for one step."""

    def __init__(self, policy: AdaptivePolicy, batch_size: int, context: float) -> None:
        costs = policy.costs
        self.batch_size, self.num_uses = batch_size, 0
        plain, more = costs.ms("verify", batch_size, np.array([batch_size, 2.0 * batch_size]), context).tolist()
        start = costs.ms("start", batch_size, np.array([batch_size, 2.0 * batch_size]), context).tolist()
        level = costs.ms("level", batch_size, np.array([batch_size, 2.0 * batch_size]), context).tolist()
        # No tree is worth less than plain decoding.
        self.rate = max(policy.rate(batch_size).value, batch_size / plain)
        self.plain_ms = plain
        self.node = self.rate * (more - plain) / batch_size
        self.start_row = self.rate * (start[1] - start[0]) / batch_size
        self.start_sequence = self.rate * start[0] / batch_size
        self.level_row = self.rate * (level[1] - level[0]) / batch_size
        self.level_sequence = self.rate * level[0] / batch_size

    def utility(self, promises: Floats) -> float:
        """Expected tokens beyond their price of a draft with such nodes: a first level, and further ones if those pay too."""
        pays = promises - self.node
        first = max(0.0, float(pays[0]))
        deeper = float(np.maximum(0.0, pays[1:] - self.level_row).sum()) - self.level_sequence
        return first + max(0.0, deeper) - self.start_sequence


class AdaptivePlan:
    """The decisions of one step, and what is learned from it."""

    def __init__(
        self, policy: AdaptivePolicy, sequences: Sequence[HostSequence], num_missing: Sequence[int], is_allowed: bool
    ) -> None:
        self._policy, self._sequences = policy, sequences
        self._context = sum(sequence.num_cached for sequence in sequences) / len(sequences)
        self._shapes = [sequence.bounds for sequence in sequences]
        self.drafters: list[int] = []
        self._price: Price | None = None
        if is_allowed and any(self._shapes):
            self._price = policy.price(len(sequences), self._context)
            self.drafters = self._choose_drafters(self._price, num_missing)
        if self.drafters:
            self._temperatures = np.array([sequence.temperature for sequence in sequences])
            self._corrections = np.zeros(len(sequences))
            for index in self.drafters:
                self._corrections[index] = policy.history(sequences[index]).correction

    def _choose_drafters(self, price: Price, num_missing: Sequence[int]) -> list[int]:
        policy, drafters = self._policy, []
        for index, sequence in enumerate(self._sequences):
            if not sequence.bounds:
                continue
            history = policy.history(sequence)
            catching_up = price.start_row * max(0, num_missing[index] - 1)
            if price.utility(history.promises) > min(catching_up, 1.0):
                drafters.append(index)
                continue
            history.num_idle += 1
            if history.num_idle >= history.wait:
                cost_ms = (catching_up + price.start_sequence + price.node) / price.rate
                if cost_ms <= policy.allowance_ms and price.utility(FIRST_PROMISES) > 0:
                    policy.allowance_ms -= cost_ms
                    drafters.append(index)
        return drafters

    def values(self, deeper: Candidates, parent_values: Floats) -> Floats:
        estimator, owners = self._policy.estimator, deeper.owners
        inputs = estimator.inputs(deeper.log_probs, deeper.parent_scores, deeper.depths, self._temperatures[owners])
        values = parent_values + estimator.log_probabilities(inputs, self._corrections[owners])
        return np.where(deeper.scores > -np.inf, values, -np.inf)

    def expand(self, candidates: Candidates, first_new: int) -> Ints:
        price = self._price
        assert price
        numbers = in_bounds(candidates, self._shapes, first_new)
        owners = candidates.owners[numbers]
        gains = np.exp(candidates.values[numbers]) * self._reach(owners, candidates.depths[numbers]) - price.level_row - price.node
        pays = gains > 0
        numbers, gains = numbers[pays], gains[pays]
        widths = np.array([shape.top_k if shape else 0 for shape in self._shapes])
        is_within = ranks_within_owners(candidates.owners[numbers], candidates.values[numbers]) < widths[candidates.owners[numbers]]
        numbers, gains = numbers[is_within], gains[is_within]
        if len(numbers) == 0:
            return numbers
        num_sequences = len(np.unique(candidates.owners[numbers]))
        fixed_ms = float(self._policy.costs.ms("level", num_sequences, len(numbers), self._context))
        fixed = price.rate * fixed_ms - price.level_row * len(numbers)
        return numbers if gains.sum() > fixed else numbers[:0]

    def keep(self, candidates: Candidates) -> Ints:
        price = self._price
        assert price
        limits = np.array([shape.num_draft_tokens - 1 if shape else 0 for shape in self._shapes])
        numbers = best_of_each(candidates, np.flatnonzero(candidates.scores > -np.inf), limits)
        values = candidates.values[numbers]
        order = np.argsort(-values, kind="stable")
        batch_size = len(self._sequences)
        ms = self._policy.costs.ms("verify", batch_size, batch_size + np.arange(len(order) + 1.0), self._context)
        worth = np.concatenate(([0.0], np.exp(values[order]).cumsum())) - price.rate * ms
        return np.sort(numbers[order[: int(worth.argmax())]])

    def learn(self, record: StepRecord) -> None:
        policy, batch_size = self._policy, len(self._sequences)
        total_ms = 0.0
        for part in record.parts:
            policy.costs.correct(part, record.context)
            total_ms += part.ms
        policy.rate(batch_size).add(record.num_gained, total_ms)
        policy.allowance_ms = min(policy.allowance_ms + TRY_SHARE * total_ms, TRY_SHARE * 256 * total_ms)
        if self.drafters:
            self._learn_acceptance(record)

    def _learn_acceptance(self, record: StepRecord) -> None:
        policy, candidates, labels = self._policy, record.candidates, record.is_accepted
        estimator, kept = policy.estimator, candidates[record.kept]
        parents = np.where(kept.parents < 0, -1, np.searchsorted(record.kept, kept.parents))
        is_asked = (parents < 0) | (labels[parents] > 0)  # whether the target got as far as to choose among it and its siblings
        inputs = estimator.inputs(kept.log_probs, kept.parent_scores, kept.depths, self._temperatures[kept.owners])
        estimator.calibration.add(np.exp(kept.values), np.exp(kept.scores), labels)
        conditional = np.exp(estimator.log_probabilities(inputs, self._corrections[kept.owners]))
        surprise = np.bincount(kept.owners, np.where(is_asked, labels - conditional, 0.0), len(self._sequences)).tolist()
        estimator.observe(inputs[is_asked], labels[is_asked])
        promises = self._promises(candidates)
        for index in self.drafters:
            sequence = self._sequences[index]
            history, common = policy.history(sequence), policy.common(sequence)
            correction = CORRECTION_DECAY * history.correction + CORRECTION_STEP * surprise[index]
            history.correction = min(MAX_CORRECTION, max(-MAX_CORRECTION, correction))
            # A try that follows a long wait says more than what was known before it.
            history.promises += (TRY_RATE if history.num_idle else PROMISE_RATE) * (promises[index] - history.promises)
            common.promises += COMMON_RATE * (promises[index] - common.promises)
            if history.num_idle:
                has_failed = self._price is None or self._price.utility(history.promises) <= 0
                history.wait = min(LONGEST_WAIT, 2 * history.wait) if has_failed else FIRST_WAIT
                history.num_idle = 0
        self._learn_reach(kept, parents, labels)

    def _promises(self, candidates: Candidates) -> Floats:
        """[B, P] the probabilities of each sequence's best nodes, best first."""
        promises = np.zeros((len(self._sequences), len(FIRST_PROMISES)))
        ranks = ranks_within_owners(candidates.owners, candidates.values)
        best = ranks < promises.shape[1]
        promises[candidates.owners[best], ranks[best]] = np.exp(candidates.values[best])
        return promises

    def _learn_reach(self, kept: Candidates, parents: Ints, labels: Floats) -> None:
        """Of the nodes that were accepted and had children verified: how often one of those was accepted."""
        accepted = np.flatnonzero(labels > 0)
        went_on = set(parents[accepted].tolist())
        was_asked = set(parents.tolist())
        for node in accepted.tolist():
            if node in was_asked:
                reach = self._policy.reach[self._sequences[int(kept.owners[node])].temperature > 0]
                depth = int(kept.depths[node])
                reach[depth] += REACH_RATE * ((node in went_on) - reach[depth])

    def _reach(self, owners: Ints, depths: Ints) -> Floats:
        reach = np.stack((self._policy.reach[False], self._policy.reach[True]))
        return reach[(self._temperatures[owners] > 0).astype(np.int64), np.minimum(depths, reach.shape[1] - 1)]
