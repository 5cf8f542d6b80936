"""Measuring draft trees against no speculation, in one process and one run."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from eagle_rt.bench.workload import Workload
from eagle_rt.config import EngineConfig
from eagle_rt.engine.build import prepared_core
from eagle_rt.engine.calibrate import measured_costs
from eagle_rt.engine.core import EngineCore, run_to_end
from eagle_rt.engine.load import LoadedModels
from eagle_rt.engine.metrics import EngineMetrics
from eagle_rt.engine.params import SamplingParams
from eagle_rt.speculate.acceptance import Calibration
from eagle_rt.speculate.costs import StepCosts
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape, num_tree_nodes

WARM_UP_PROMPT = [0] * 32
# What the step's clock calls its parts, in the three groups of a report.
DRAFT_PARTS = ("draft", "extend")
VERIFY_PARTS = ("verify",)
# A captured step is one part.
OTHER_PARTS = ("prepare", "accept", "step")
STOPPED = "stopped by Ctrl-C"


@dataclass(frozen=True)
class Setting:
    """One point of a sweep. is_adaptive: `tree` is the largest one, and each step sizes its own; rule: trees grow by this one, see
    `tree_rules.py`, and `tree` is what they may grow to."""

    batch_size: int
    tree: TreeShape
    is_adaptive: bool = False
    rule: str | None = None

    @property
    def kind(self) -> str:
        return "none" if self.tree == NO_SPECULATION else "adaptive" if self.is_adaptive else self.rule or "fixed"

    def __str__(self) -> str:
        return f"{self.kind} {self.tree}" if self.tree != NO_SPECULATION else "none"


@dataclass
class Measurement:
    """All repeats of one setting: tokens and seconds of each, and the engine's totals over all of them.

    tree_sizes: mean nodes that were verified for a request, in each step of the last repeat. core: the engine, kept where it
    learns. problem: why there are no (more) repeats.
    """

    setting: Setting
    rates: list[float] = field(default_factory=list)
    num_tokens: int = 0
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    tree_sizes: list[float] = field(default_factory=list)
    core: EngineCore | None = None
    problem: str | None = None


def grid(
    batch_sizes: list[int],
    steps: list[int],
    top_ks: list[int],
    num_tokens: list[int],
    adaptive: TreeShape | None = None,
    ruled: tuple[str, TreeShape] | None = None,
) -> list[Setting]:
    """No speculation and every possible tree, for each batch size, adaptive trees up to `adaptive`, and those by a rule. Trees that
    cannot be drafted, and chains that differ only in a token count which does not apply to them, are left out."""
    trees = {}
    for num_steps in steps:
        for top_k in top_ks:
            for count in num_tokens:
                if top_k == 1:
                    trees[TreeShape(num_steps, 1, num_steps + 1)] = None
                elif 2 <= count <= num_tree_nodes(num_steps, top_k):
                    trees[TreeShape(num_steps, top_k, count)] = None
    settings = []
    for batch_size in batch_sizes:
        settings += [Setting(batch_size, tree) for tree in (NO_SPECULATION, *trees)]
        settings += [Setting(batch_size, adaptive, is_adaptive=True)] if adaptive else []
        settings += [Setting(batch_size, ruled[1], rule=ruled[0])] if ruled else []
    return settings


def core_for(models: LoadedModels, config: EngineConfig, setting: Setting, costs: StepCosts | None = None) -> EngineCore:
    """An engine with the setting's tree, over models that are already in memory. costs: of steps, for adaptive trees."""
    tree = setting.tree
    speculation: dict[str, Any] = {"speculative_algorithm": None}
    if tree != NO_SPECULATION:
        speculation = {
            "speculative_algorithm": config.speculative_algorithm,
            "speculative_tree": setting.kind,
            "speculative_num_steps": tree.num_steps,
            "speculative_eagle_topk": tree.top_k,
            "speculative_num_draft_tokens": tree.num_draft_tokens,
        }
    return prepared_core(models, replace(config, max_running_requests=setting.batch_size, **speculation), costs)[0]


def costs_of(models: LoadedModels, config: EngineConfig, batch_size: int, largest: TreeShape) -> StepCosts:
    """What steps of up to so many requests and trees up to `largest` cost, for adaptive engines to share."""
    return measured_costs(core_for(models, config, Setting(batch_size, largest)))


def run_sweep(
    models: LoadedModels,
    config: EngineConfig,
    settings: list[Setting],
    workload: Workload,
    sampling: SamplingParams,
    num_repeats: int,
    on_progress: Callable[[Setting], None],
) -> list[Measurement]:
    """Measure every setting `num_repeats` times, in turns, so that a slow minute of the machine hits all of them alike. One that
    does not fit takes nothing from the others, and what was measured before Ctrl-C is kept.

    Raises:
        ValueError: nothing could be measured, and why.
    """
    measurements = [Measurement(setting) for setting in settings]
    try:
        for measurement in measurements * num_repeats:
            if not measurement.problem:
                measure_if_it_fits(models, config, measurement, workload, sampling)
            on_progress(measurement.setting)
    except KeyboardInterrupt:
        if not any(measurement.rates for measurement in measurements):
            raise
        for measurement in measurements:
            if not measurement.problem and len(measurement.rates) < num_repeats:
                measurement.problem = STOPPED
    if not any(measurement.rates for measurement in measurements):
        raise ValueError(measurements[0].problem)
    return measurements


def measure_if_it_fits(
    models: LoadedModels, config: EngineConfig, measurement: Measurement, workload: Workload, sampling: SamplingParams
) -> None:
    try:
        measure_once(models, config, measurement, workload, sampling)
    except (ValueError, torch.OutOfMemoryError) as error:
        measurement.problem = str(error)


def measure_once(
    models: LoadedModels,
    config: EngineConfig,
    measurement: Measurement,
    workload: Workload,
    sampling: SamplingParams,
) -> None:
    """Add one run of a setting to its measurement: all prompts on a fresh engine, after a short warm-up with others. An engine
    whose trees are adaptive, or made by a rule, is kept for the next run, as a server goes on learning, but finds no prompt in its
    cache."""
    setting = measurement.setting
    core = measurement.core or core_for(models, config, setting)
    generate(core, [WARM_UP_PROMPT] * setting.batch_size, replace(sampling, max_new_tokens=8, ignore_eos=True))
    core.forget_metrics()
    core.scheduler.forget_prefixes()
    measurement.tree_sizes.clear()
    start = time.perf_counter()
    measurement.num_tokens = generate(core, workload.prompts, sampling, measurement.tree_sizes)
    measurement.rates.append(measurement.num_tokens / (time.perf_counter() - start))
    add_metrics(measurement.metrics, core.current_metrics())
    measurement.core = core if setting.is_adaptive or setting.rule else None


def generate(core: EngineCore, prompts: list[list[int]], sampling: SamplingParams, tree_sizes: list[float] | None = None) -> int:
    """Run all prompts to their end; the number of tokens generated. tree_sizes: gets the mean nodes a request of every step."""
    before = (0, 0)

    def note() -> None:
        nonlocal before
        now = core.metrics.num_drafts, core.metrics.num_draft_tokens
        if tree_sizes is not None and now[0] > before[0]:
            tree_sizes.append(1 + (now[1] - before[1]) / (now[0] - before[0]))
        before = now

    return sum(map(len, run_to_end(core, prompts, [sampling] * len(prompts), note)))


def add_metrics(total: EngineMetrics, more: EngineMetrics) -> None:
    total.num_decode_steps += more.num_decode_steps
    total.num_drafts += more.num_drafts
    total.num_draft_tokens += more.num_draft_tokens
    total.num_undrafted += more.num_undrafted
    total.calibration = more.calibration
    total.num_accepted_tokens += more.num_accepted_tokens
    missing = len(more.accepted_per_position) - len(total.accepted_per_position)
    total.accepted_per_position += [0] * missing
    for position, count in enumerate(more.accepted_per_position):
        total.accepted_per_position[position] += count
    for part, seconds in more.seconds.items():
        total.seconds[part] = total.seconds.get(part, 0.0) + seconds


def rows(measurements: list[Measurement]) -> list[dict[str, Any]]:
    """One dictionary per setting that was measured beside no speculation, ready for a table or for JSON. Rates are medians over
    the repeats; a speed-up is the median of the ratios to no speculation at the same batch size in the same repeat. Times are
    milliseconds per decode step."""
    baselines = {m.setting.batch_size: m for m in measurements if m.setting.tree == NO_SPECULATION}
    result = []
    for measurement in measurements:
        setting, metrics = measurement.setting, measurement.metrics
        baseline = baselines[setting.batch_size]
        if not (measurement.rates and baseline.rates):
            continue

        def step_ms(*parts: str, metrics: EngineMetrics = metrics) -> float:
            return round(1000 * sum(metrics.seconds.get(part, 0.0) for part in parts) / max(1, metrics.num_decode_steps), 3)

        ratios = [rate / base for rate, base in zip(measurement.rates, baseline.rates, strict=False)]
        result.append(
            {
                "batch_size": setting.batch_size,
                "kind": setting.kind,
                "steps": setting.tree.num_steps,
                "topk": setting.tree.top_k,
                "num_draft_tokens": setting.tree.num_draft_tokens,
                "tokens_per_second": round(statistics.median(measurement.rates), 1),
                "speedup": round(statistics.median(ratios), 3),
                "mean_accepted_tokens": round(metrics.mean_accepted_tokens, 3),
                "acceptance_by_depth": acceptance_by_depth(metrics),
                "step_ms": step_ms(*DRAFT_PARTS, *VERIFY_PARTS, *OTHER_PARTS),
                "draft_ms": step_ms(*DRAFT_PARTS),
                "verify_ms": step_ms(*VERIFY_PARTS),
                "other_ms": step_ms(*OTHER_PARTS),
                "num_tokens": measurement.num_tokens,
                "repeats": len(measurement.rates),
                "mean_tree_size": round(1 + metrics.num_draft_tokens / max(1, metrics.num_drafts), 2),
                "tree_sizes": [round(size, 2) for size in measurement.tree_sizes],
                **calibration_columns(metrics.calibration),
            }
        )
    return result


def calibration_columns(calibration: Calibration | None) -> dict[str, Any]:
    """How good an adaptive engine's estimates were: Brier scores of its own and of the head's sharpened ones, and per tenth
    the number of nodes, their mean probability and the share that was accepted."""
    if not calibration:
        return {}
    table = [
        [round(count), round(predicted / count, 3), round(accepted / count, 3)]
        for count, predicted, accepted in zip(calibration.counts, calibration.predicted, calibration.accepted, strict=True)
        if count
    ]
    return {
        "brier_score": round(calibration.brier_score, 4),
        "raw_brier_score": round(calibration.raw_brier_score, 4),
        "reliability": table,
    }


def acceptance_by_depth(metrics: EngineMetrics) -> list[float]:
    """The share of steps that kept a draft at depth 1, 2, ..."""
    return [round(count / metrics.num_drafts, 3) for count in metrics.accepted_per_position]
