"""The GPU benchmark: is everything right, and how far is it from what the memory allows?

`python benchmarks/gpu.py --shape llama-3.1-8b` grows the built-in pair to that shape in the GPU's memory, checks it and measures
it, job by job (`gpu_parts.py`). JSON is written after every job, so that started again it goes on where a time limit cut it; one
that fails is noted, and the next begins.

`--device cpu --shape builtin --attention-backend torch --quick` runs the same code without a GPU: it shows that all of it runs,
and measures nothing.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_bench import Bench, Rows
from benchmarks.gpu_parts import PARTS
from eagle_rt.bench.grow.shapes import SHAPES
from eagle_rt.bench.report import print_table
from eagle_rt.config import QUANTIZATIONS
from eagle_rt.resolve import DTYPES


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["builtin", *SHAPES], default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--quantization", choices=list(QUANTIZATIONS), default="none", help="of the target's weights")
    parser.add_argument("--attention-backend", default="triton", choices=["torch", "triton", "flashinfer"])
    parser.add_argument("--enable-torch-compile", action="store_true")
    parser.add_argument("--max-total-tokens", type=int, default=60_000)
    parser.add_argument("--dataset", default="builtin")
    parser.add_argument("--dataset-dir", type=Path)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--jobs", nargs="+", metavar="TEXT", default=[""], help="only those with one of these in their name")
    parser.add_argument("--retry", action="store_true", help="also the jobs that have failed")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / f"gpu_{date.today().isoformat()}.json")
    return parser


def outcome_of(job: Callable[[], Rows]) -> dict[str, Any]:
    """Its rows or its error, and how long it took."""
    start = time.perf_counter()
    try:
        outcome: dict[str, Any] = {"rows": job()}
    except Exception as error:
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {error}"}
    return {**outcome, "seconds": round(time.perf_counter() - start, 1)}


def show(part: str, job: str, outcome: dict[str, Any]) -> None:
    print(f"== {part}, {job} ({outcome['seconds']} s)", flush=True)
    if part == "sweep" and "rows" in outcome:
        print_table(outcome["rows"])
        return
    for row in outcome.get("rows", [{"error": outcome.get("error")}]):
        print("  " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def main() -> int:
    """1 where a job has failed."""
    args = make_parser().parse_args()
    bench = Bench(args)
    results: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    if "rows" in results.get("machine", {}).get("machine", {}):
        bench.copy_rate = results["machine"]["machine"]["rows"][0]["copy_bytes_per_second"]
    for part in args.parts:
        done = results.setdefault(part, {})
        for name, job in PARTS[part](bench).items():
            if not any(text in name for text in args.jobs):
                continue
            if name not in done or (args.retry and "error" in done[name]):
                done[name] = outcome_of(job)
                args.output.parent.mkdir(parents=True, exist_ok=True)
                args.output.write_text(json.dumps(results, indent=1) + "\n")
            show(part, name, done[name])
    return int(any("error" in outcome for done in results.values() for outcome in done.values()))


if __name__ == "__main__":
    sys.exit(main())
