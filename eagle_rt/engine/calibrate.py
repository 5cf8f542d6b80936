"""Measuring at start what the parts of a step cost here."""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.prepare import slots_of
from eagle_rt.kernels.packed_linear import NO_TILES, RowTiles
from eagle_rt.speculate.copies import Chains, Copy
from eagle_rt.speculate.costs import Observation, StepCosts, fitted_copy_costs, fitted_costs
from eagle_rt.speculate.host_step import HostStepper
from eagle_rt.speculate.host_verifier import Drafted, HostVerifier
from eagle_rt.speculate.policy import MOST_COLD, DraftPlan, FixedPolicy, Rests, StepRecord, num_cold
from eagle_rt.speculate.sampler import SamplingBatch
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape, num_tree_nodes

MIDDLE_BATCH_SIZE = 4
CONTEXT = 64
# Rows that a head has to read before it drafts: after a step, and after a pause.
MISSING_ROWS = (1, 3, 32)
# Rounds of one step of every batch size and tree, so that a machine that is slow for a while is slow for all of them; the first
# pays for what is then kept. The least number of rounds is cut short only by TIME_LIMIT_S, and more begin within ROUNDS_S only.
MOST_ROUNDS, LEAST_ROUNDS, ROUNDS_S, TIME_LIMIT_S = 12, 5, 3.0, 9.0


class Recorder(FixedPolicy):
    """Drafts what it is told, or nothing where it `is_resting`, and remembers what that took."""

    def __init__(self) -> None:
        super().__init__(None)
        self.observations: list[Observation] = []
        self.is_resting = False

    def rests(self, num_sequences: int) -> bool:
        return self.is_resting

    def learn_rests(self, rests: Rests) -> None:
        if rests.steps:
            sizes, times = zip(*rests.steps, strict=True)
            self.observations += rests.observations(sizes[0], min(times))

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        plan = super().begin(sequences, num_missing)
        plan.learn = self._remember  # type: ignore[method-assign]
        return plan

    def _remember(self, record: StepRecord) -> None:
        self.observations += record.parts


def trees_to_time(bounds: TreeShape, batch_size: int, jump_after: int | None) -> list[TreeShape | None]:
    """None, and trees of few and of many nodes, of narrow and of wide levels; of large batches only small ones. jump_after: so many
    rows cost clearly less than one more."""
    steps, top_k, num_tokens = min(3, bounds.num_steps), bounds.top_k, bounds.num_draft_tokens
    most = min(num_tokens, num_tree_nodes(steps, top_k))
    nodes = [8, 12, 16, most] if batch_size <= MIDDLE_BATCH_SIZE else [5, 8]
    if jump_after and batch_size == 1:
        nodes += [jump_after, jump_after + 1]
    trees: list[TreeShape | None] = [None, TreeShape(1, 1, 2), TreeShape(steps, 1, steps + 1)]
    trees += [TreeShape(steps, top_k, min(most, count)) for count in nodes]
    return list(dict.fromkeys(trees))


@torch.inference_mode()
def measured_costs(core: EngineCore) -> StepCosts:
    """Time steps of made-up texts over an engine that is not serving yet: the median of a few."""
    stepper = core.runner.host_stepper
    return costs_with_head(core, stepper) if stepper else costs_without_head(core)


def costs_with_head(core: EngineCore, stepper: HostStepper) -> StepCosts:
    policy, recorder = stepper.policy, Recorder()
    stepper.policy = recorder
    tiles, jump_after = tiling_of(stepper.verifier)
    seen: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    try:
        for number in rounds():
            recorder.observations.clear()
            for batch_size in batch_sizes(core):
                plain = seen.get(("verify", batch_size, batch_size))
                num_plain = 1 + (num_cold(min(plain)) if plain else MOST_COLD)
                for tree in trees_to_time(core.runner.tree_shape, batch_size, jump_after):
                    recorder.is_resting = tree is None
                    for _ in range(1 if tree else num_plain):
                        run_step(stepper, core, batch_size, tree, num_missing=MISSING_ROWS[number % len(MISSING_ROWS)])
            for one in recorder.observations if number else []:
                seen[one.part, one.batch_size, one.num_rows].append(one.ms)
    finally:
        stepper.policy = policy
    return fitted_costs(medians_of(seen), tiles, jump_after)


def costs_without_head(core: EngineCore) -> StepCosts:
    """All that differs is how many tokens are verified."""
    stepper, longest = core.runner.headless, core.runner.tree_shape.num_nodes
    assert stepper
    tiles, jump_after = tiling_of(stepper.verifier)
    seen: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for number in rounds():
        for batch_size in batch_sizes(core):
            counts = [1, 2, 4, 8, 12, 16, longest] if batch_size <= MIDDLE_BATCH_SIZE else [1, 2, 4, 8]
            counts += [jump_after, jump_after + 1] if jump_after and batch_size == 1 else []
            for count in sorted({min(longest, own) for own in counts}):
                ms = copy_step_ms(stepper.verifier, core, batch_size, count - 1)
                if number:
                    seen["verify", batch_size, batch_size * count].append(ms)
    return fitted_copy_costs(medians_of(seen), tiles, jump_after)


def tiling_of(verifier: HostVerifier) -> tuple[RowTiles, int | None]:
    """How products of the target's are cut: with which rows they are filled up, and after how many they cost clearly more."""
    product = verifier.target.lm_head.product
    return (product.tiles, product.rows_at_once) if product else (NO_TILES, None)


def batch_sizes(core: EngineCore) -> list[int]:
    """To time: one, a few, and as many as may run."""
    limits = core.scheduler.limits
    rows_each = CONTEXT + limits.num_scratch + limits.page_size
    largest = max(1, min(limits.max_running, limits.num_pages * limits.page_size // rows_each))
    return sorted({1, min(MIDDLE_BATCH_SIZE, largest), largest})


def rounds() -> Iterator[int]:
    """0, 1, 2, ... for as long as there is time for another one."""
    start = time.perf_counter()
    for number in range(MOST_ROUNDS):
        if number >= 2 and time.perf_counter() - start > (ROUNDS_S if number >= LEAST_ROUNDS else TIME_LIMIT_S):
            return
        yield number


def medians_of(seen: dict[tuple[str, int, int], list[float]]) -> list[Observation]:
    return [Observation(*key, statistics.median(times)) for key, times in seen.items()]


def made_up_sequences(core: EngineCore, batch_size: int, tree: TreeShape | None) -> list[HostSequence]:
    """Random texts on pages that nobody has yet."""
    limits, vocab_size = core.scheduler.limits, core.runner.stepper.target.spec.vocab_size
    num_pages = limits.pages_for(CONTEXT + limits.num_scratch)
    sequences = []
    for b in range(batch_size):
        pages = list(range(b * num_pages, (b + 1) * num_pages))
        text = [random.randrange(vocab_size) for _ in range(CONTEXT + 1)]
        rows = slots_of(pages, CONTEXT + limits.num_scratch, limits.page_size)
        sequences.append(HostSequence(f"timing {b}", text, rows, 0.0, tree, b))
    return sequences


def greedy_batch(batch_size: int, device: torch.device) -> SamplingBatch:
    zeros, none = torch.zeros(batch_size, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    return SamplingBatch(zeros, none, zeros, zeros, none, none, has_filters=False)


def run_step(stepper: HostStepper, core: EngineCore, batch_size: int, tree: TreeShape | None, num_missing: int) -> None:
    """A step of random texts, of which the head has so many rows to read."""
    embedding = stepper.verifier.target.embedding
    features = torch.randn(num_missing, stepper.feature_size, dtype=embedding.dtype, device=embedding.device)
    sequences = made_up_sequences(core, batch_size, tree)
    for sequence in sequences:
        stepper.drafter.rows.begin(sequence.id, CONTEXT - num_missing, CONTEXT - num_missing)
        stepper.drafter.rows.add(sequence.id, features)
    stepper.step(sequences, greedy_batch(batch_size, embedding.device), lambda part: None)
    for sequence in sequences:
        stepper.forget(sequence.id)


def copy_step_ms(verifier: HostVerifier, core: EngineCore, batch_size: int, num_copied: int) -> float:
    """Milliseconds of a step of random texts, each with so many tokens beside its next one."""
    sequences, sampling = made_up_sequences(core, batch_size, None), greedy_batch(batch_size, verifier.target.embedding.device)
    if not num_copied:
        times: list[float] = []
        while not times or len(times) <= num_cold(min(times)):
            start = time.perf_counter()
            verifier.plain_step(sequences, sampling)
            times.append(1000 * (time.perf_counter() - start))
        return times[-1]
    chances = np.full(num_copied, 0.5)
    copies = [Copy(b, np.array(own.text[:num_copied]), chances, chances) for b, own in enumerate(sequences)]
    chains = Chains.of(copies)
    start = time.perf_counter()
    drafted = Drafted.of_chains(sequences, chains, np.arange(len(chains.tokens)))
    verifier.verify(sequences, sampling, drafted.trees, lambda part: None)
    return 1000 * (time.perf_counter() - start)
