"""Measuring draft trees against no speculation, in one process and one run."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_rt.bench.workload import Workload
from eagle_rt.config import NO_SPECULATION, EngineConfig, TreeShape, num_tree_nodes
from eagle_rt.engine.build import prepared_core
from eagle_rt.engine.core import EngineCore, run_to_end
from eagle_rt.engine.load import LoadedModels
from eagle_rt.engine.metrics import EngineMetrics
from eagle_rt.engine.request import SamplingParams

WARM_UP_PROMPT = [0] * 32
# What the step's clock calls its parts, in the three groups of a report.
DRAFT_PARTS = ("draft", "extend")
VERIFY_PARTS = ("verify",)
# A captured step is one part.
OTHER_PARTS = ("prepare", "accept", "step")


@dataclass(frozen=True)
class Setting:
    """One point of a sweep."""

    batch_size: int
    tree: TreeShape


@dataclass
class Measurement:
    """All repeats of one setting: tokens and seconds of each, and the engine's totals over all of them."""

    setting: Setting
    rates: list[float] = field(default_factory=list)
    num_tokens: int = 0
    metrics: EngineMetrics = field(default_factory=EngineMetrics)


def grid(batch_sizes: list[int], steps: list[int], top_ks: list[int], num_tokens: list[int]) -> list[Setting]:
    """No speculation and every possible tree, for each batch size. Trees that cannot be drafted, and chains that differ only in a
    token count which does not apply to them, are left out."""
    trees = {}
    for num_steps in steps:
        for top_k in top_ks:
            for count in num_tokens:
                if top_k == 1:
                    trees[TreeShape(num_steps, 1, num_steps + 1)] = None
                elif 2 <= count <= num_tree_nodes(num_steps, top_k):
                    trees[TreeShape(num_steps, top_k, count)] = None
    return [Setting(batch_size, tree) for batch_size in batch_sizes for tree in (NO_SPECULATION, *trees)]


def core_for(models: LoadedModels, config: EngineConfig, setting: Setting) -> EngineCore:
    """An engine with the setting's tree, over models that are already in memory."""
    tree = setting.tree
    speculation: dict[str, Any] = {"speculative_algorithm": None}
    if tree != NO_SPECULATION:
        speculation = {
            "speculative_algorithm": config.speculative_algorithm,
            "speculative_num_steps": tree.num_steps,
            "speculative_eagle_topk": tree.top_k,
            "speculative_num_draft_tokens": tree.num_draft_tokens,
        }
    return prepared_core(models, replace(config, max_running_requests=setting.batch_size, **speculation))[0]


def run_sweep(
    models: LoadedModels,
    config: EngineConfig,
    settings: list[Setting],
    workload: Workload,
    sampling: SamplingParams,
    num_repeats: int,
    on_progress: Callable[[Setting], None],
) -> list[Measurement]:
    """Measure every setting `num_repeats` times, in turns, so that a slow minute of the machine hits all of them alike."""
    measurements = [Measurement(setting) for setting in settings]
    for _ in range(num_repeats):
        for measurement in measurements:
            measure_once(models, config, measurement, workload, sampling)
            on_progress(measurement.setting)
    return measurements


def measure_once(
    models: LoadedModels, config: EngineConfig, measurement: Measurement, workload: Workload, sampling: SamplingParams
) -> None:
    """Add one run of a setting to its measurement: all prompts on a fresh engine, after a short warm-up with others."""
    core = core_for(models, config, measurement.setting)
    generate(core, [WARM_UP_PROMPT] * measurement.setting.batch_size, replace(sampling, max_new_tokens=8, ignore_eos=True))
    core.forget_metrics()
    start = time.perf_counter()
    measurement.num_tokens = generate(core, workload.prompts, sampling)
    measurement.rates.append(measurement.num_tokens / (time.perf_counter() - start))
    add_metrics(measurement.metrics, core.current_metrics())


def generate(core: EngineCore, prompts: list[list[int]], sampling: SamplingParams) -> int:
    """Run all prompts to their end; the number of tokens generated."""
    return sum(map(len, run_to_end(core, prompts, [sampling] * len(prompts))))


def add_metrics(total: EngineMetrics, more: EngineMetrics) -> None:
    total.num_decode_steps += more.num_decode_steps
    total.num_drafts += more.num_drafts
    total.num_accepted_tokens += more.num_accepted_tokens
    missing = len(more.accepted_per_position) - len(total.accepted_per_position)
    total.accepted_per_position += [0] * missing
    for position, count in enumerate(more.accepted_per_position):
        total.accepted_per_position[position] += count
    for part, seconds in more.seconds.items():
        total.seconds[part] = total.seconds.get(part, 0.0) + seconds


def rows(measurements: list[Measurement]) -> list[dict[str, Any]]:
    """One dictionary per setting, ready for a table or for JSON. Rates are medians over the repeats; a speed-up is the median of
    the ratios to no speculation at the same batch size in the same repeat. Times are milliseconds per decode step."""
    baselines = {m.setting.batch_size: m for m in measurements if m.setting.tree == NO_SPECULATION}
    result = []
    for measurement in measurements:
        setting, metrics = measurement.setting, measurement.metrics
        baseline = baselines[setting.batch_size]

        def step_ms(*parts: str, metrics: EngineMetrics = metrics) -> float:
            return round(1000 * sum(metrics.seconds.get(part, 0.0) for part in parts) / max(1, metrics.num_decode_steps), 3)

        ratios = [rate / base for rate, base in zip(measurement.rates, baseline.rates, strict=True)]
        result.append(
            {
                "batch_size": setting.batch_size,
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
            }
        )
    return result


def acceptance_by_depth(metrics: EngineMetrics) -> list[float]:
    """The share of steps that kept a draft at depth 1, 2, ..."""
    return [round(count / metrics.num_drafts, 3) for count in metrics.accepted_per_position]
