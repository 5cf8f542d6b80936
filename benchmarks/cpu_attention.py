"""One layer's attention on a CPU: sequence by sequence, like sequences together, and our kernel row by row:
`python benchmarks/cpu_attention.py`.

Shapes are those of the built-in pair in both precisions and, in bfloat16, of 0.5B, of an 8B and of latents. All take turns in one
process; planning, done once a pass, is left out. Prints a table, writes JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_speculative import environment
from benchmarks.tree_batches import tree_batch
from eagle_rt.attention.grouped import GroupedAttention
from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.attention.rows import RowAttention
from eagle_rt.batch import HostRows
from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.config import EngineConfig
from eagle_rt.resolve import resolve_device

# Precision, query heads, and what the cache keeps.
SHAPES = {
    "built-in": (torch.float32, 8, RowShape(4, 32)),
    "built-in bfloat16": (torch.bfloat16, 8, RowShape(4, 32)),
    "0.5b": (torch.bfloat16, 14, RowShape(2, 64)),
    "8b": (torch.bfloat16, 32, RowShape(8, 128)),
    "latents": (torch.bfloat16, 20, RowShape(1, 576, 512)),
}
BACKENDS = {"one_by_one": ReferenceAttention, "grouped": GroupedAttention, "rows": RowAttention}
TURNS = 30


def row(shape: str, batch_size: int, context: int, num_nodes: int, is_run: bool) -> dict[str, Any]:
    """Microseconds of each, medians over turns, and how far the others are from one by one."""
    dtype, num_heads, kept = SHAPES[shape]
    batch = tree_batch([context + 7 * b for b in range(batch_size)], num_nodes, "cpu", is_run)
    assert isinstance(batch.rows, HostRows)
    pool = KVPool([kept], sum(batch.rows.kv_lens), dtype, "cpu")
    pool.storage.normal_()
    queries = torch.randn(len(batch.tokens), num_heads, kept.head_dim).to(dtype)
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for name, kind in BACKENDS.items():
        backend = kind(dtype)
        plan = backend.plan(batch, pool)
        calls[name] = lambda backend=backend, plan=plan: backend.run(queries, 0, plan, None)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    expected, *found = (call().float() for call in calls.values())
    return {
        "shape": shape,
        "batch_size": batch_size,
        "context": context,
        "nodes": num_nodes,
        "side_by_side": is_run,
        **{f"{name}_us": round(1e6 * statistics.median(own)) for name, own in times.items()},
        "error": max(float((own - expected).norm() / expected.norm()) for own in found),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[100, 400, 2000])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON file")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        for batch_size in args.batch_size:
            for context in args.context:
                for num_nodes in args.nodes:
                    for is_run in (True, False):
                        rows.append(row(shape, batch_size, context, num_nodes, is_run))
                        print(rows[-1], flush=True)
    document = {
        "command": " ".join(sys.argv[1:]),
        "environment": environment(resolve_device(EngineConfig(device="cpu"))),
        "rows": rows,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / f"cpu_attention_{date.today().isoformat()}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
