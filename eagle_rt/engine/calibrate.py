"""Measuring at start what the parts of a step cost here."""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.prepare import sequence_rows
from eagle_rt.speculate.costs import Observation, StepCosts, fitted_costs
from eagle_rt.speculate.host_step import HostStepper
from eagle_rt.speculate.policy import DraftPlan, FixedPolicy, StepRecord
from eagle_rt.speculate.sampler import SamplingBatch
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape

BATCH_SIZES = (1, 4, 16, 64)
CONTEXT = 64
NUM_REPEATS = 4
# Larger batches are measured only while there is time; what is missing is extrapolated, and corrected while running.
TIME_LIMIT_S = 4.0


class Recorder(FixedPolicy):
    """Drafts what it is told, and remembers what that took."""

    def __init__(self) -> None:
        super().__init__(None)
        self.observations: list[Observation] = []

    def begin(self, sequences: Sequence[HostSequence], num_missing: Sequence[int]) -> DraftPlan:
        plan = super().begin(sequences, num_missing)
        plan.learn = self._remember  # type: ignore[method-assign]
        return plan

    def _remember(self, record: StepRecord) -> None:
        self.observations += record.parts


def trees_to_time(bounds: TreeShape) -> list[TreeShape | None]:
    """None, and trees of few and of many nodes, of narrow and of wide levels."""
    steps, top_k, num_tokens = bounds.num_steps, bounds.top_k, bounds.num_draft_tokens
    trees: list[TreeShape | None] = [None, TreeShape(1, 1, 2), TreeShape(min(3, steps), 1, min(3, steps) + 1)]
    for most in (8, 16, num_tokens):
        trees.append(TreeShape(min(3, steps), top_k, min(most, num_tokens, 1 + top_k + (min(3, steps) - 1) * top_k**2)))
    return list(dict.fromkeys(trees))


@torch.inference_mode()
def measured_costs(core: EngineCore) -> StepCosts:
    """Time steps of made-up texts over an engine that is not serving yet."""
    stepper = core.runner.host_stepper
    assert stepper
    policy, recorder = stepper.policy, Recorder()
    stepper.policy = recorder
    limits = core.scheduler.limits
    capacity = CONTEXT + limits.num_scratch
    longest = min(limits.max_running, limits.num_pages * limits.page_size // (capacity + limits.page_size))
    sizes = sorted({min(size, max(1, longest)) for size in BATCH_SIZES})
    medians: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    start = time.perf_counter()
    try:
        for batch_size in sizes:
            if batch_size > 1 and time.perf_counter() - start > TIME_LIMIT_S / 2:
                break
            for tree in trees_to_time(core.runner.tree_shape):
                for repeat in range(NUM_REPEATS):
                    recorder.observations.clear()
                    run_step(stepper, core, batch_size, tree, repeat)
                    # The first step of a shape pays for what is then kept.
                    for observation in recorder.observations if repeat else []:
                        medians[observation.part, observation.batch_size, observation.num_rows].append(observation.ms)
    finally:
        stepper.policy = policy
    return fitted_costs([Observation(*key, statistics.median(ms)) for key, ms in medians.items()])


def run_step(stepper: HostStepper, core: EngineCore, batch_size: int, tree: TreeShape | None, repeat: int) -> None:
    """A step of random texts, of which the head has a few more rows to read in every other repeat."""
    limits, target = core.scheduler.limits, stepper.target
    vocab_size, device = target.spec.vocab_size, target.embedding.device
    num_missing = 1 + 2 * (repeat % 2)
    num_pages = limits.pages_for(CONTEXT + limits.num_scratch)
    features = torch.randn(num_missing, stepper.feature_size, dtype=target.embedding.dtype, device=device)
    sequences = []
    for b in range(batch_size):
        pages = list(range(b * num_pages, (b + 1) * num_pages))
        text = [random.randrange(vocab_size) for _ in range(CONTEXT + 1)]
        rows = sequence_rows(pages, CONTEXT + limits.num_scratch, limits.page_size, str(device))
        sequences.append(HostSequence(f"timing {b}", text, rows, 0.0, tree))
        stepper.drafter.rows.begin(f"timing {b}", CONTEXT - num_missing, CONTEXT - num_missing)
        stepper.drafter.rows.add(f"timing {b}", features)
    zeros = torch.zeros(batch_size, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    sampling = SamplingBatch(zeros, none, zeros, zeros, none, none, has_filters=False)
    stepper.step(sequences, sampling, lambda part: None)
    for sequence in sequences:
        stepper.forget(sequence.id)
