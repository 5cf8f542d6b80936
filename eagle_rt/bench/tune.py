"""Finding the trees that pay here: successive halving over fixed trees, adaptive ones and none, for every batch size and
temperature."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from eagle_rt.bench.lockstep import full_rates, longest_reply
from eagle_rt.bench.sweep import Setting, core_for, costs_of
from eagle_rt.bench.workload import Workload
from eagle_rt.config import EngineConfig
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.load import LoadedModels
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.profile import Profile, Subject
from eagle_rt.speculate.adaptive import AdaptivePolicy
from eagle_rt.speculate.costs import StepCosts
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape, num_tree_nodes

STEPS, TOP_KS, NUM_TOKENS = (1, 2, 3, 4, 6), (1, 2, 4), (4, 8, 16, 24)
ADAPTIVE_BOUNDS = (TreeShape(3, 2, 8), TreeShape(5, 2, 12), TreeShape(6, 4, 24), TreeShape(8, 4, 40))
KEPT_SHARE, NUM_FINALISTS = 1 / 3, 3
LATE_SHARE = 0.9
# So many settings go through the texts side by side, none of speculation always among them: each holds a cache of its own.
GROUP_SIZE = 8
# Prompts of a turn: enough to keep a batch full for a while.
LEAST_PROMPTS, PROMPTS_A_SLOT = 2, 1.5


@dataclass(frozen=True)
class Round:
    """All settings that are left get at least and at most so many turns, within about so many seconds; in each turn all of them
    answer the same prompts, with about so many tokens."""

    num_tokens: int
    least_turns: int
    most_turns: int
    seconds: float


ROUNDS = (Round(16, 1, 4, 10.0), Round(32, 1, 8, 12.0), Round(32, 2, 16, 16.0))

C = TypeVar("C", bound=Hashable)


def halving(
    candidates: Sequence[C], measure: Callable[[list[C], int], dict[C, float]], num_rounds: int, keeps: Callable[[C], bool]
) -> dict[C, float]:
    """The speeds of the candidates that reach the last round: each round measures those left, and the fastest go on, besides those
    that `keeps` tells to.

    measure(candidates, round): their speeds there. Source: Jamieson and Talwalkar, 2016, "Non-stochastic best arm identification".
    """
    left, speeds = list(candidates), {}
    for number in range(num_rounds):
        speeds = measure(left, number)
        if number + 1 < num_rounds:
            rivals = sorted((own for own in left if not keeps(own)), key=lambda candidate: -speeds[candidate])
            count = max(NUM_FINALISTS, math.ceil(len(rivals) * KEPT_SHARE))
            left = [*filter(keeps, left), *rivals[:count]]
    return speeds


def fixed_trees() -> list[TreeShape]:
    """Chains, and trees that fill at least a path and no more than their levels supply."""
    trees = [TreeShape(steps, 1, steps + 1) for steps in STEPS]
    for steps in STEPS:
        for top_k in TOP_KS[1:]:
            trees += [TreeShape(steps, top_k, count) for count in NUM_TOKENS if steps < count <= num_tree_nodes(steps, top_k)]
    return trees


@dataclass(frozen=True)
class Tuned:
    """What was best for one batch size and temperature. `speeds`: tokens/s of every setting in the last round, the best fixed and
    adaptive ones and none among them."""

    batch_size: int
    temperature: float
    speeds: dict[Setting, float]

    def best(self, kind: str) -> tuple[Setting, float]:
        return max(((own, speed) for own, speed in self.speeds.items() if own.kind == kind), key=lambda item: item[1])

    def row(self) -> dict[str, Any]:
        def entry(kind: str) -> dict[str, Any]:
            setting, speed = self.best(kind)
            return {**asdict(setting.tree), "tokens_per_second": round(speed, 1)}

        return {
            "batch_size": self.batch_size,
            "temperature": self.temperature,
            "none": round(self.best("none")[1], 1),
            "fixed": entry("fixed"),
            "adaptive": entry("adaptive"),
        }


class Tuner:
    """Measures settings over models that are in memory. The engines of none and of adaptive trees are kept: the
    first is in every group, the others go on learning."""

    def __init__(self, models: LoadedModels, config: EngineConfig, subject: Subject, workload: Workload, seed: int) -> None:
        longest = max(map(len, workload.prompts)) + longest_reply(max(own.num_tokens for own in ROUNDS))
        self._models, self._workload, self._seed, self._subject = models, workload, seed, subject
        self._config = config
        self._bounds, self._trees = models.fitting(ADAPTIVE_BOUNDS), models.fitting(fixed_trees())
        self._tokens_per_request = longest + 2 * max(tree.num_scratch_rows for tree in (*self._bounds, *self._trees))
        self._tokens_per_request += 2 * config.page_size
        self._costs: StepCosts | None = None
        self._kept: dict[Setting, EngineCore] = {}

    def run(
        self, batch_sizes: list[int], temperatures: list[float], on_progress: Callable[[str], None]
    ) -> tuple[Profile, list[Tuned]]:
        """Tune for every pair of the two."""
        config = replace(self._config, max_total_tokens=self._tokens_per_request * max(batch_sizes))
        self._costs = costs_of(self._models, config, max(batch_sizes), self._bounds[-1])
        results = []
        for batch_size in batch_sizes:
            settings = [Setting(batch_size, NO_SPECULATION)]
            settings += [Setting(batch_size, tree) for tree in self._trees]
            settings += [Setting(batch_size, tree, is_adaptive=True) for tree in self._bounds]
            for temperature in temperatures:
                results.append(self._tune(settings, temperature, on_progress))
        bounds, fixed = overall_best(results, "adaptive"), overall_best(results, "fixed")
        rows = [result.row() for result in results]
        return Profile(self._subject, bounds, fixed, self._costs, self._weights(bounds), rows), results

    def _tune(self, settings: list[Setting], temperature: float, on_progress: Callable[[str], None]) -> Tuned:
        batch_size = settings[0].batch_size
        num_prompts = max(LEAST_PROMPTS, math.ceil(PROMPTS_A_SLOT * batch_size))
        prompts = itertools.cycle(self._workload.prompts)
        plain = settings[0]

        def measure(left: list[Setting], number: int) -> dict[Setting, float]:
            """The tokens/s of no speculation, times the medians over turns of how much faster the settings were beside it."""
            this = ROUNDS[number]
            sampling = SamplingParams(temperature=temperature, seed=self._seed, max_new_tokens=this.num_tokens)
            ratios: dict[Setting, list[float]] = {setting: [] for setting in left}
            speeds, start, num_turns = [], time.perf_counter(), 0
            while num_turns < this.least_turns or (
                num_turns < this.most_turns and time.perf_counter() - start < this.seconds * num_turns / (num_turns + 1)
            ):
                own_prompts = list(itertools.islice(prompts, num_prompts))
                for first in range(1, len(left), GROUP_SIZE - 1):
                    group = left[first : first + GROUP_SIZE - 1]
                    cores = [self._core(setting) for setting in (plain, *group)]
                    speed, *others = full_rates(cores, own_prompts, sampling)
                    speeds.append(speed)
                    for setting, other in zip(group, others, strict=True):
                        ratios[setting].append(other / speed)
                        on_progress(f"batch {batch_size}, temperature {temperature:g}, round {number + 1}: {setting}")
                num_turns += 1
            speed = statistics.median(speeds)
            return {setting: speed * statistics.median(own or [1.0]) for setting, own in ratios.items()}

        return Tuned(batch_size, temperature, halving(settings, measure, len(ROUNDS), is_kept))

    def _core(self, setting: Setting) -> EngineCore:
        if setting in self._kept:
            return self._kept[setting]
        config = replace(self._config, max_total_tokens=self._tokens_per_request * setting.batch_size)
        core = core_for(self._models, config, setting, self._costs)
        if is_kept(setting):
            self._kept[setting] = core
        return core

    def _weights(self, bounds: TreeShape) -> list[float]:
        """What the engine with these bounds that was made last has learned of acceptance."""
        core = next(core for setting, core in reversed(self._kept.items()) if setting.tree == bounds)
        stepper = core.runner.host_stepper
        assert stepper
        policy = stepper.policy
        assert isinstance(policy, AdaptivePolicy)
        return policy.estimator.weights.tolist()


def is_kept(setting: Setting) -> bool:
    """Whether it stays in the race however slow it is."""
    return setting.kind != "fixed"


def overall_best(results: list[Tuned], kind: str) -> TreeShape:
    """The tree that is best on the whole: with the highest mean of log speeds, against the best of each result. A tree that did not
    reach a last round counts there as somewhat slower than the slowest that did."""
    trees = list(dict.fromkeys(setting.tree for result in results for setting in result.speeds if setting.kind == kind))

    def merit(tree: TreeShape) -> float:
        total = 0.0
        for result in results:
            own = {setting.tree: speed for setting, speed in result.speeds.items() if setting.kind == kind}
            total += math.log(own.get(tree, LATE_SHARE * min(own.values())) / max(own.values()))
        return total

    return max(trees, key=merit)
