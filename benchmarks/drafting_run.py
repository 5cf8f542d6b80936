"""What the benchmarks of drafts begin and end with: the arguments that they share, the engine's config, and the file of results."""

import argparse
import json
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from bench_speculative import environment
from eagle_rt.config import EngineConfig, add_flags, config_from_args
from eagle_rt.resolve import resolve_device


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, EngineConfig]:
    """The command line, and the config of engines that draft, with an EAGLE-3 head if none is named."""
    parser.add_argument("--name", default="", help="of the file that is written, besides what was measured and the date")
    parser.add_argument("--dataset-dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file")
    add_flags(parser)
    args = parser.parse_args()
    config = resolve_device(config_from_args(args))
    algorithm = config.speculative_algorithm or "EAGLE3"
    return args, replace(config, speculative_algorithm=algorithm, speculative_fit_check="off")


def write(measured: str, args: argparse.Namespace, config: EngineConfig, **results: Any) -> None:
    """One file for what was measured, with the command and the machine."""
    document = {"command": " ".join(sys.argv[1:]), "environment": environment(config), **results}
    name = "_".join(filter(None, [measured, args.name, date.today().isoformat()]))
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
