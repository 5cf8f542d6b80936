"""Adaptive trees against none and against fixed ones; with what texts repeat and without; coupled drafts against uncoupled ones;
what choosing costs.

`python benchmarks/adaptive.py points --dataset-dir PROMPTS`, or `switch`, `ngram`, `coupling`, `overhead`. Prints a table, writes
JSON. All that is compared takes turns in one process.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.drafting_run import parsed, write
from eagle_rt.bench.lockstep import quiet_rounds
from eagle_rt.bench.sweep import Measurement, Setting, add_metrics, calibration_columns, core_for, generate
from eagle_rt.bench.workload import Workload, load_workload
from eagle_rt.config import EngineConfig
from eagle_rt.engine.core import EngineCore, run_to_end
from eagle_rt.engine.load import LoadedModels, ModelInfo, load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.resolve import DEFAULT_COPY
from eagle_rt.speculate.policy import DraftPlan
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

HOSTILE, ASKED_AGAIN = "hostile", "asked_again"
HALF_SECOND = 0.5
# Prompts of a load that switches are cut to so many tokens, so that reading those of many requests takes little of a phase.
SHORT_PROMPT = 32


def workload(name: str, args: argparse.Namespace, info: ModelInfo, count: int, first: int = 0) -> Workload:
    """Prompts number first .. first + count - 1 of a data set, or as many of those as it has; `hostile` ones are random tokens,
    after which no head knows what comes.

    Raises:
        ValueError: it has none of them.
    """
    if name == HOSTILE:
        rng = random.Random(0)
        size = len(info.tokenizer)
        prompts = [[rng.randrange(size) for _ in range(64)] for _ in range(first + count)]
    else:
        prompts = load_workload(name, args.dataset_dir, info.tokenizer, first + count).prompts
        if len(prompts) <= first:
            limits = "--prompts-per-slot or --least-prompts"
            raise ValueError(f"{name} has {len(prompts)} prompts and none after number {first}; set a smaller {limits}")
    return Workload(name, prompts[first:])


def points(args: argparse.Namespace, config: EngineConfig, info: ModelInfo, models: LoadedModels) -> list[dict[str, Any]]:
    """Tokens per second of none, every fixed tree and adaptive ones, for each batch size, temperature and data set."""
    trees, bounds = [tree_shape(text) for text in args.trees], tree_shape(args.bounds)
    results = []
    counts = {batch_size: max(args.least_prompts, args.prompts_per_slot * batch_size) for batch_size in args.batch_size}
    # Those that no point has, of which there have to be some before hours of measuring begin.
    others = {
        dataset: workload(dataset, args, info, 4 * max(args.batch_size), first=max(counts.values())).prompts
        for dataset in args.datasets
    }
    progress = tqdm(total=len(args.batch_size) * len(args.temperatures) * len(args.datasets), unit="point", disable=None)
    for batch_size in args.batch_size:
        settings = [Setting(batch_size, NO_SPECULATION), *(Setting(batch_size, tree) for tree in trees)]
        settings.append(Setting(batch_size, bounds, is_adaptive=True))
        cores = [core_for(models, config, setting) for setting in settings]
        # What lies in the past of a server that has been up for a while: other prompts of the same kinds.
        for dataset in args.datasets:
            for temperature in args.temperatures:
                sampling = SamplingParams(temperature=temperature, seed=args.seed + 1, max_new_tokens=args.max_new_tokens)
                generate(cores[-1], others[dataset][: max(4, batch_size)], sampling)
        for dataset in args.datasets:
            prompts = workload(dataset, args, info, counts[batch_size]).prompts
            for temperature in args.temperatures:
                sampling = SamplingParams(
                    temperature=temperature, seed=args.seed, max_new_tokens=args.max_new_tokens, ignore_eos=dataset == HOSTILE
                )
                settle(cores[-1], others[dataset], 4 * batch_size, sampling, args.settle_seconds)
                measurements = [Measurement(setting) for setting in settings]
                rounds = quiet_rounds(cores, prompts, sampling, args.repeats, args.most_stolen)
                for own in rounds:
                    for measurement, rate, metrics in zip(measurements, own.rates, own.metrics, strict=True):
                        measurement.rates.append(rate)
                        add_metrics(measurement.metrics, metrics)
                results.append(point(batch_size, dataset, temperature, measurements))
                results[-1]["stolen"] = [round(own.stolen, 4) for own in rounds]
                print(line(results[-1]), flush=True)
                progress.update()
    return results


def settle(core: EngineCore, prompts: list[list[int]], count: int, sampling: SamplingParams, seconds: float) -> None:
    """Other prompts of the same kind for so long, `count` at a time, for what an engine learns while its load stays the same."""
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        core.scheduler.forget_prefixes()
        generate(core, list(islice(cycle(prompts), count)), replace(sampling, seed=1000))


def point(batch_size: int, dataset: str, temperature: float, measurements: list[Measurement]) -> dict[str, Any]:
    plain, *fixed, adaptive = measurements

    # Of all rounds together, which are of the same texts: the median of three would be nearly one round alone.
    rates = {str(own.setting): statistics.harmonic_mean(own.rates) for own in measurements}
    best = max((str(own.setting) for own in fixed), key=rates.__getitem__)
    ours = rates[str(adaptive.setting)]
    return {
        "batch_size": batch_size,
        "dataset": dataset,
        "temperature": temperature,
        "tokens_per_second": {setting: round(rate, 1) for setting, rate in rates.items()},
        "best_fixed": best,
        "adaptive_over_none": round(ours / rates[str(plain.setting)], 3),
        "adaptive_over_best_fixed": round(ours / rates[best], 3),
        "rounds": {str(own.setting): [round(rate, 1) for rate in own.rates] for own in measurements},
        "accepted": {str(own.setting): round(own.metrics.mean_accepted_tokens, 2) for own in measurements},
        "step_ms": {str(own.setting): parts_ms(own) for own in measurements},
        "undrafted": round(adaptive.metrics.num_undrafted / max(1, adaptive.metrics.num_drafts), 3),
        "mean_tree_size": round(1 + adaptive.metrics.num_draft_tokens / max(1, adaptive.metrics.num_drafts), 2),
        **calibration_columns(adaptive.metrics.calibration),
    }


def parts_ms(measurement: Measurement) -> dict[str, float]:
    """What each part took, for a decode step of the batch."""
    metrics = measurement.metrics
    return {part: round(1000 * seconds / metrics.num_decode_steps, 2) for part, seconds in sorted(metrics.seconds.items())}


def line(result: dict[str, Any]) -> str:
    rates = result["tokens_per_second"]
    none, adaptive = rates["none"], next(rate for name, rate in rates.items() if name.startswith("adaptive"))
    return (
        f"batch {result['batch_size']:2} {result['dataset']:9} T={result['temperature']:g}: none {none}, best fixed "
        f"{rates[result['best_fixed']]} [{result['best_fixed']}], adaptive {adaptive} = {result['adaptive_over_none']}x none, "
        f"{result['adaptive_over_best_fixed']}x best fixed; nodes {result['mean_tree_size']}, "
        f"Brier {result['brier_score']} against {result['raw_brier_score']}"
    )


def mix(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every single setting over all points, as the mean of its speed in units of no speculation at each point."""
    names = list(results[0]["tokens_per_second"])
    rows = []
    for name in names:
        ratios = [result["tokens_per_second"][name] / result["tokens_per_second"]["none"] for result in results]
        rows.append(
            {"setting": name, "mean_over_none": round(statistics.geometric_mean(ratios), 3), "least": round(min(ratios), 3)}
        )
    return sorted(rows, key=lambda row: -row["mean_over_none"])


def switch(args: argparse.Namespace, config: EngineConfig, info: ModelInfo, models: LoadedModels) -> list[dict[str, Any]]:
    """A load that goes from one request to many and back every few seconds: tokens per second and drafts per sequence and step, by
    the half second after each change."""
    largest = max(args.batch_size)
    settings = [Setting(largest, NO_SPECULATION), *(Setting(largest, tree_shape(text)) for text in args.trees)]
    settings.append(Setting(largest, tree_shape(args.bounds), is_adaptive=True))
    prompts = [prompt[:SHORT_PROMPT] for prompt in workload(args.datasets[0], args, info, 64).prompts]
    cores = [core_for(models, config, setting) for setting in settings]
    for core in cores:
        generate(core, prompts[:4], SamplingParams(temperature=0, max_new_tokens=16))
    totals: dict[Setting, list[Phase]] = {setting: [] for setting in settings}
    for phase in tqdm(range(args.phases), unit="phase", disable=None):
        for setting, core in zip(settings, cores, strict=True):
            num_running = largest if phase % 2 else 1
            totals[setting].append(phase_of(core, num_running, prompts, args))
    rows = []
    for setting, phases in totals.items():
        row = {"setting": str(setting), "tokens_per_second": round(statistics.mean(phase.rate for phase in phases), 1)}
        for name, own in (("one", phases[::2]), (f"{largest}", phases[1::2])):
            row[f"with_{name}"] = means([phase.rates for phase in own])
            row[f"drafts_with_{name}"] = means([phase.drafts for phase in own])
        rows.append(row)
        print(row, flush=True)
    return rows


@dataclass(frozen=True)
class Phase:
    """Tokens per second over the whole of it and in each half second, and how many drafts a sequence was given in a step there."""

    rate: float
    rates: list[float]
    drafts: list[float]


def phase_of(core: EngineCore, num_running: int, prompts: list[list[int]], args: argparse.Namespace) -> Phase:
    """Some seconds with so many requests in flight; the learning of before goes on."""
    sampling = SamplingParams(temperature=args.temperatures[0], seed=args.seed, max_new_tokens=args.max_new_tokens, ignore_eos=True)
    running: set[str] = set()
    counts, drafts = ([0.0] * round(args.phase_seconds / HALF_SECOND) for _ in range(2))
    num_steps = list(counts)
    core.forget_metrics()
    start, number = time.perf_counter(), 0
    while (now := time.perf_counter() - start) < args.phase_seconds:
        while len(running) < num_running:
            name = f"{start} {number}"
            core.submit(name, prompts[number % len(prompts)], sampling)
            running.add(name)
            number += 1
        num_steps_before, num_drafts_before = core.metrics.num_drafts, core.metrics.num_draft_tokens
        events, place = core.step(), min(len(counts) - 1, int(now / HALF_SECOND))
        for event in events:
            counts[place] += len(event.tokens)
            if event.finish_reason:
                running.discard(event.request_id)
        num_steps[place] += core.metrics.num_drafts - num_steps_before
        drafts[place] += core.metrics.num_draft_tokens - num_drafts_before
    seconds = time.perf_counter() - start
    for name in running:
        core.abort(name)
    rates = [count / HALF_SECOND for count in counts]
    return Phase(sum(counts) / seconds, rates, [count / max(1.0, steps) for count, steps in zip(drafts, num_steps, strict=True)])


def means(phases: list[list[float]]) -> list[float]:
    return [round(statistics.mean(values), 2) for values in zip(*phases, strict=True)]


def ngram(args: argparse.Namespace, config: EngineConfig, info: ModelInfo, models: LoadedModels) -> list[dict[str, Any]]:
    """Tokens per second of none, of trees of the head alone, of those with what texts repeat, and of that alone, without a head.
    Each prompt of the data set `asked_again` is one of gsm8k, the reply to it, and the same once more."""
    rows = []
    headless = replace(config, speculative_algorithm="NGRAM", speculative_draft_model_path=None)
    for batch_size in args.batch_size:
        plain, drafting = Setting(batch_size, NO_SPECULATION), Setting(batch_size, tree_shape(args.bounds), is_adaptive=True)
        cores = {name: core_for(models, replace(config, speculative_ngram=name), drafting) for name in ("off", "auto")}
        copying = Setting(batch_size, TreeShape(DEFAULT_COPY - 1, 1, DEFAULT_COPY), is_adaptive=True)
        cores = {"none": core_for(models, config, plain), **cores, "alone": core_for(models, headless, copying)}
        for dataset in args.datasets:
            count = max(args.least_prompts, args.prompts_per_slot * batch_size)
            prompts = workload(dataset.replace(ASKED_AGAIN, "gsm8k"), args, info, count).prompts
            if dataset == ASKED_AGAIN:
                replies = run_to_end(cores["none"], prompts, [SamplingParams(temperature=0, max_new_tokens=64)] * len(prompts))
                prompts = [[*prompt, *reply, *prompt] for prompt, reply in zip(prompts, replies, strict=True)]
            for temperature in args.temperatures:
                sampling = SamplingParams(temperature=temperature, seed=args.seed, max_new_tokens=args.max_new_tokens)
                for core in cores.values():
                    settle(core, prompts, len(prompts), sampling, args.settle_seconds / 2)
                rounds = quiet_rounds(list(cores.values()), prompts, sampling, args.repeats, args.most_stolen)
                of_each = zip(*(own.rates for own in rounds), strict=True)
                rates = {name: statistics.harmonic_mean(own) for name, own in zip(cores, of_each, strict=True)}
                rows.append(
                    {
                        "batch_size": batch_size,
                        "dataset": dataset,
                        "temperature": temperature,
                        **{name: round(rate, 1) for name, rate in rates.items()},
                        "auto_over_off": round(rates["auto"] / rates["off"], 3),
                        "alone_over_none": round(rates["alone"] / rates["none"], 3),
                        "accepted": [round(own.mean_accepted_tokens, 2) for own in rounds[-1].metrics],
                        "rounds": [[round(rate, 1) for rate in own.rates] for own in rounds],
                    }
                )
                print(rows[-1], flush=True)
    return rows


def coupling(args: argparse.Namespace, config: EngineConfig, info: ModelInfo, models: LoadedModels) -> list[dict[str, Any]]:
    """Mean accepted tokens: greedy, and sampled with uncoupled and coupled drafts, and how much of the gap the coupling closes."""
    rows = []
    for dataset in args.datasets:
        prompts = workload(dataset, args, info, args.least_prompts).prompts
        for tree in map(tree_shape, args.trees):

            def accepted(temperature: float, coupling: str, tree: TreeShape = tree, prompts: list = prompts) -> float:
                core = core_for(models, replace(config, speculative_coupling=coupling), Setting(len(prompts), tree))
                seeds = range(args.seed, args.seed + len(prompts))
                settings = [SamplingParams(temperature, seed=seed, max_new_tokens=args.max_new_tokens) for seed in seeds]
                run_to_end(core, prompts, settings)
                return core.current_metrics().mean_accepted_tokens

            greedy = accepted(0.0, "off")
            for temperature in filter(None, args.temperatures):
                off, on = accepted(temperature, "off"), accepted(temperature, "auto")
                rows.append(
                    {
                        "dataset": dataset,
                        "tree": str(tree),
                        "temperature": temperature,
                        "uncoupled": round(off, 2),
                        "coupled": round(on, 2),
                        "greedy": round(greedy, 2),
                        "recovered": round((on - off) / (greedy - off), 3),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def overhead(args: argparse.Namespace, config: EngineConfig, info: ModelInfo, models: LoadedModels) -> list[dict[str, Any]]:
    """The share of an adaptive engine's decode steps that goes into choosing: everything that its plan is asked, and what it
    learns."""
    rows = []
    for batch_size in args.batch_size:
        core = core_for(models, config, Setting(batch_size, tree_shape(args.bounds), is_adaptive=True))
        stepper = core.runner.host_stepper
        assert stepper
        spent = [0.0]

        def timed(call: Callable[..., Any], spent: list[float] = spent) -> Callable[..., Any]:
            def wrapped(*arguments: Any) -> Any:
                start = time.perf_counter()
                result = call(*arguments)
                spent[0] += time.perf_counter() - start
                return result

            return wrapped

        begin = timed(stepper.policy.begin)

        def begin_timed(*arguments: Any, begin: Callable[..., DraftPlan] = begin, timed: Callable = timed) -> DraftPlan:
            plan = begin(*arguments)
            for name in ("expand", "keep", "learn"):
                setattr(plan, name, timed(getattr(plan, name)))
            return plan

        stepper.policy.begin = begin_timed
        prompts = workload(args.datasets[0], args, info, max(args.least_prompts, batch_size)).prompts
        sampling = SamplingParams(temperature=args.temperatures[0], seed=args.seed, max_new_tokens=args.max_new_tokens)
        settle(core, prompts, len(prompts), sampling, args.settle_seconds)
        core.forget_metrics()
        spent[0] = 0.0
        generate(core, prompts, sampling)
        metrics = core.current_metrics()
        total = sum(seconds for part, seconds in metrics.seconds.items() if part != "prefill")
        rows.append(
            {
                "batch_size": batch_size,
                "step_ms": round(1000 * total / metrics.num_decode_steps, 3),
                "choosing_ms": round(1000 * spent[0] / metrics.num_decode_steps, 3),
                "share": round(spent[0] / total, 4),
                "undrafted": round(metrics.num_undrafted / metrics.num_drafts, 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


def tree_shape(text: str) -> TreeShape:
    return TreeShape(*map(int, text.split(",")))


def main() -> None:
    parts = {"points": points, "switch": switch, "ngram": ngram, "coupling": coupling, "overhead": overhead}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("--datasets", nargs="+", default=["gsm8k", "mt_bench", HOSTILE])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--trees", nargs="+", default=["1,1,2", "2,1,3", "3,1,4", "3,2,8", "5,4,16"])
    parser.add_argument("--bounds", default="6,4,24", help="of the adaptive trees")
    parser.add_argument("--least-prompts", type=int, default=4, help="of a point")
    parser.add_argument("--prompts-per-slot", type=int, default=2, help="prompts of a point, for each sequence of its batch")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-stolen", type=float, default=0.01, help="of the time of a round, else it is made again")
    parser.add_argument("--settle-seconds", type=float, default=10.0, help="of adaptive trees, before each point")
    parser.add_argument("--phases", type=int, default=6)
    parser.add_argument("--phase-seconds", type=float, default=4.0)
    args, config = parsed(parser)
    info = model_info(config)
    rows = parts[args.part](args, config, info, load_models(config, info))
    results: dict[str, Any] = {"rows": rows}
    if args.part == "points":
        results["mix"] = mix(rows)
        print(json.dumps(results["mix"], indent=1))
    write(f"adaptive_{args.part}", args, config, **results)


if __name__ == "__main__":
    main()
