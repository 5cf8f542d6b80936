"""Heads against each other: the same target, prompts and trees, in turns in one process.

`python benchmarks/heads.py --heads EAGLE3 EAGLE:DIR EAGLE:DIR:freq_1024.pt --datasets gsm8k mt_bench --dataset-dir PROMPTS`. A head
is ALGORITHM, ALGORITHM:FOLDER or ALGORITHM:FOLDER:TOKEN_MAP; without a folder it is the built-in one. Prints a table, writes JSON.
"""

import argparse
import json
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_speculative import environment
from eagle_rt.bench.sweep import Measurement, Setting, measure_once, rows
from eagle_rt.bench.workload import load_workload
from eagle_rt.config import EngineConfig, add_flags, config_from_args
from eagle_rt.engine.load import load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.resolve import resolve_device
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

COLUMNS = (
    "dataset",
    "head",
    "draft_vocabulary",
    "tree",
    "mean_accepted_tokens",
    "draft_ms",
    "verify_ms",
    "tokens_per_second",
    "speedup",
)


def head_config(config: EngineConfig, description: str) -> EngineConfig:
    algorithm, folder, token_map = [*description.split(":"), "", ""][:3]
    return replace(
        config,
        speculative_algorithm=algorithm,
        speculative_draft_model_path=folder or None,
        speculative_token_map=token_map or None,
    )


def compare(
    config: EngineConfig, heads: list[str], trees: list[TreeShape], dataset: str, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for no speculation, and one for every head and tree."""
    info = model_info(config)
    workload = load_workload(dataset, args.dataset_dir, info.tokenizer, args.num_prompts)
    sampling = SamplingParams(temperature=args.temperature, seed=0, max_new_tokens=args.max_new_tokens)
    configs = {description: head_config(config, description) for description in heads}
    models = {description: load_models(configs[description], info) for description in heads}
    points = [(heads[0], Measurement(Setting(args.batch_size, NO_SPECULATION)))]
    points += [(head, Measurement(Setting(args.batch_size, tree))) for head in heads for tree in trees]
    for _ in tqdm(range(args.repeats), desc=dataset, unit="repeat"):
        for head, measurement in points:
            measure_once(models[head], configs[head], measurement, workload, sampling)
    table = rows([measurement for _, measurement in points])
    for row, (head, measurement) in zip(table, points, strict=True):
        draft_head = models[head].head
        assert draft_head is not None
        is_plain = measurement.setting.tree == NO_SPECULATION
        row |= {
            "dataset": dataset,
            "head": "none" if is_plain else head,
            "tree": "" if is_plain else str(measurement.setting.tree),
            "draft_vocabulary": "" if is_plain else len(draft_head.token_map.target_ids),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=["EAGLE3", "EAGLE"])
    parser.add_argument("--trees", nargs="+", default=["3,2,8", "5,4,16"], help="steps,top-k,tokens")
    parser.add_argument("--datasets", nargs="+", default=["builtin"])
    parser.add_argument("--dataset-dir", type=Path)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help=f"JSON (default: benchmarks/results/heads_{date.today()}.json)")
    add_flags(parser)
    args = parser.parse_args()
    config = resolve_device(config_from_args(args))
    trees = [TreeShape(*map(int, tree.split(","))) for tree in args.trees]
    results = [row for dataset in args.datasets for row in compare(config, args.heads, trees, dataset, args)]
    table = Table()
    for column in COLUMNS:
        table.add_column(column.replace("_", " "))
    for row in results:
        table.add_row(*(str(row[column]) for column in COLUMNS))
    Console(width=160).print(table)
    output = args.output or Path(__file__).parent / "results" / f"heads_{date.today()}.json"
    output.write_text(json.dumps({"environment": environment(config), "command": sys.argv[1:], "rows": results}, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
