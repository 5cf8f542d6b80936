"""Sweep draft trees: `python bench_speculative.py --steps 3 5 --topk 1 4 --num-draft-tokens 4 16`. The last line is JSON."""

import argparse
import json
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle_rt.bench.remote import measure_server
from eagle_rt.bench.report import best_per_batch_size, flags, plot, print_table
from eagle_rt.bench.sweep import STOPPED, Measurement, grid, rows, run_sweep
from eagle_rt.bench.tune import Tuner
from eagle_rt.bench.workload import load_workload
from eagle_rt.config import EngineConfig, add_flags, config_from_args, require
from eagle_rt.engine.load import load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.profile import default_file, subject_of
from eagle_rt.kernels.processor import processor_name
from eagle_rt.leave import INTERRUPTED, run
from eagle_rt.resolve import resolve_device, resolve_tree
from eagle_rt.tree_shape import TreeShape, num_tree_nodes


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    sweep = parser.add_argument_group("sweep")
    sweep.add_argument("--batch-size", type=int, nargs="+", default=[1], help="requests decoded together")
    sweep.add_argument("--steps", type=int, nargs="+", default=[1, 3, 5], help="depths of the tree")
    sweep.add_argument("--topk", type=int, nargs="+", default=[1, 4], help="children per node")
    sweep.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4, 8, 16], help="nodes verified, with the root")
    sweep.add_argument("--adaptive", action="store_true", help="also measure adaptive trees, up to the largest of these numbers")
    sweep.add_argument("--dataset", default="builtin", help="builtin, a .jsonl file, or a name in --dataset-dir such as mt_bench")
    sweep.add_argument("--dataset-dir", type=Path, help="folder with mt_bench.jsonl, gsm8k.jsonl, humaneval.jsonl")
    sweep.add_argument("--num-prompts", type=int, help="use only the first ones")
    sweep.add_argument("--max-new-tokens", type=int, default=128, help="per prompt")
    sweep.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sweep.add_argument("--seed", type=int, default=0, help="of sampled replies")
    sweep.add_argument("--repeats", type=int, default=3, help="medians over so many interleaved runs")
    sweep.add_argument("--base-url", help="measure a running server instead, as it is")
    sweep.add_argument("--api-key", help="of that server")
    sweep.add_argument("--output", type=Path, help="append the rows as JSON lines")
    sweep.add_argument("--plot", type=Path, metavar="DIR", help="write heat-maps, Pareto plots and more")
    tuning = parser.add_argument_group("tuning")
    tuning.add_argument("--tune", action="store_true", help="search instead of a sweep, and write a profile for this machine")
    tuning.add_argument("--tune-temperatures", type=float, nargs="+", default=[0.0, 1.0], help="to tune for")
    tuning.add_argument("--profile-output", type=Path, help="of the profile; default: where `--speculative-profile auto` looks")
    add_flags(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        if not args.speculative_algorithm:
            args.speculative_algorithm = "EAGLE3"
        config = resolve_device(config_from_args(args))
        if args.tune:
            algorithm, expectation = config.speculative_algorithm, "one with a head for --tune, which tunes trees"
            require(config.has_head, "speculative_algorithm", algorithm, expectation)
            require(
                not config.tree_rule, "speculative_tree", config.tree_rule, "left out for --tune, which tunes the numbers of trees"
            )
            return tune(args, config)
        measurements = [] if args.base_url else measure_here(args, config)
        table = measure_remote(args, config) if args.base_url else rows(measurements)
    except (ValueError, FileNotFoundError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_table(table)
    about = environment(config, args.base_url)
    incomplete = [own for own in measurements if own.problem]
    for own in incomplete:
        times = f"{len(own.rates)} of {args.repeats} times"
        print(f"measured {times}: batch {own.setting.batch_size}, {own.setting}: {own.problem}", file=sys.stderr)
    if args.output:
        with args.output.open("a") as stream:
            stream.writelines(json.dumps({**about, **row}) + "\n" for row in table)
    if args.plot and not args.base_url:
        for file in plot(table, args.plot):
            print(f"wrote {file}")
    document: dict[str, Any] = {"environment": about, "rows": table}
    if not args.base_url:
        assert config.speculative_algorithm
        best = {row["batch_size"]: flags(row, config.speculative_algorithm) for row in best_per_batch_size(table)}
        for batch_size, own in best.items():
            print(f"recommended at batch {batch_size}: {own}")
        document["recommended"] = [{"batch_size": batch_size, "flags": own} for batch_size, own in best.items()]
    if incomplete:
        document["incomplete"] = [
            {**asdict(own.setting), "tree": own.setting.tree.numbers, "problem": own.problem} for own in incomplete
        ]
    print(json.dumps(document))
    return INTERRUPTED if any(own.problem == STOPPED for own in incomplete) else 0


def measure_here(args: argparse.Namespace, config: EngineConfig) -> list[Measurement]:
    info = model_info(config)
    workload = load_workload(args.dataset, args.dataset_dir, info.tokenizer, args.num_prompts)
    sampling = SamplingParams(temperature=args.temperature, seed=args.seed, max_new_tokens=args.max_new_tokens)
    if not config.has_head:  # no beams, and any depth
        args.topk, args.steps = [1], [count - 1 for count in args.num_draft_tokens]
    adaptive = largest_tree(args) if args.adaptive else None
    ruled = (config.tree_rule, tree_by_rule(args, config)) if config.tree_rule else None
    settings = grid(args.batch_size, args.steps, args.topk, args.num_draft_tokens, adaptive, ruled)
    with tqdm(total=len(settings) * args.repeats, unit="run") as progress:

        def on_progress(setting: Any) -> None:
            progress.set_description(f"batch {setting.batch_size}, {setting}")
            progress.update()

        return run_sweep(load_models(config, info), config, settings, workload, sampling, args.repeats, on_progress)


def largest_tree(args: argparse.Namespace) -> TreeShape:
    steps, top_k = max(args.steps), max(args.topk)
    return TreeShape(steps, top_k, min(max(args.num_draft_tokens), num_tree_nodes(steps, top_k)))


def tree_by_rule(args: argparse.Namespace, config: EngineConfig) -> TreeShape:
    """The largest tree by the rule that --speculative-tree names: of the numbers of the sweep, unless it has its own."""
    static = config.speculative_tree.endswith(".json")
    return resolve_tree(config, config.device)[0] if static else largest_tree(args)


def tune(args: argparse.Namespace, config: EngineConfig) -> int:
    """Search for the best settings; write and name the profile, and print the flags that use it. The last line is JSON."""
    info = model_info(config)
    workload = load_workload(args.dataset, args.dataset_dir, info.tokenizer, args.num_prompts)
    subject = subject_of(config, info)
    file = args.profile_output or default_file(subject)
    with tqdm(unit="run") as progress:

        def on_progress(description: str) -> None:
            progress.set_description(description)
            progress.update()

        tuner = Tuner(load_models(config, info), config, subject, workload, args.seed)
        profile, _ = tuner.run(args.batch_size, args.tune_temperatures, on_progress)
    profile.write(file)
    for row in profile.best:
        fixed, adaptive = row["fixed"], row["adaptive"]
        print(
            f"batch {row['batch_size']}, temperature {row['temperature']:g}: none {row['none']} tokens/s, best fixed tree "
            f"{tree_numbers(fixed)} {fixed['tokens_per_second']}, adaptive up to {tree_numbers(adaptive)} "
            f"{adaptive['tokens_per_second']}"
        )
    print(f"wrote {file}")
    where = "auto" if args.profile_output is None else file
    print(f"use it: --speculative-algorithm {config.speculative_algorithm} --speculative-profile {where}")
    print(json.dumps({"environment": environment(config), "profile": str(file), "best": profile.best}))
    return 0


def tree_numbers(entry: dict[str, Any]) -> str:
    return f"({entry['num_steps']}, {entry['top_k']}, {entry['num_draft_tokens']})"


def measure_remote(args: argparse.Namespace, config: EngineConfig) -> list[dict[str, Any]]:
    workload = load_workload(args.dataset, args.dataset_dir, model_info(config).tokenizer, args.num_prompts)
    params = {"temperature": args.temperature, "seed": args.seed, "max_new_tokens": args.max_new_tokens}
    base_url = args.base_url.rstrip("/")
    return [
        measure_server(base_url, workload, batch_size, params, args.api_key) for batch_size in tqdm(args.batch_size, unit="run")
    ]


def environment(config: EngineConfig, server: str | None = None) -> dict[str, Any]:
    """What a number means nothing without. server: that was measured, whose head is its own."""
    unnamed = "the target's own layers" if config.drafts_with_own_layers else "built-in" if config.has_head else None
    head = config.speculative_draft_model_path or unnamed
    drafting = {"server": server} if server else {"algorithm": config.speculative_algorithm, "head": head}
    return {
        "date": date.today().isoformat(),
        "machine": processor_name(),
        "device": torch.cuda.get_device_name() if config.device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "model": config.model_path or "built-in",
        **drafting,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "tensor_parallel_size": config.tensor_parallel_size,
    }


if __name__ == "__main__":
    run(main)
