"""The GPU benchmark: is everything right, and how far is it from what the memory allows?

`python benchmarks/gpu.py --shape llama-3.1-8b` grows the built-in pair to that shape in the GPU's memory, checks it, measures it
part by part and writes JSON after every part. Started again it goes on where a time limit cut it. `--device cpu --shape builtin
--attention-backend torch --quick` runs the same code without a GPU, which shows that it runs, and measures nothing.
"""

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_kernels import attention_rows, copy_rate, small_kernel_rows

from eagle_rt.bench.grow.in_memory import grown_models
from eagle_rt.bench.grow.shapes import SHAPES
from eagle_rt.bench.lossless import gaps_where_parted
from eagle_rt.bench.report import print_table
from eagle_rt.bench.sweep import Measurement, Setting, core_for, measure_once, rows
from eagle_rt.bench.workload import Workload, load_workload
from eagle_rt.config import DTYPES, EngineConfig
from eagle_rt.engine.core import EngineCore, run_to_end
from eagle_rt.engine.load import LoadedModels, load_models, model_info, num_weights
from eagle_rt.engine.prepare import decode_sequences
from eagle_rt.engine.request import SamplingParams
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

ROOT = Path(__file__).parents[1]
TREES = [(3, 1, 4), (5, 1, 6), (3, 4, 16), (5, 4, 16), (5, 8, 32), (7, 10, 60)]
# The largest tree of those that each step chooses from.
BOUNDS = TreeShape(5, 8, 32)
GREEDY = SamplingParams(temperature=0, max_new_tokens=128, ignore_eos=True)


class Bench:
    """What all parts measure, loaded when the first of them asks for it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.is_quick = args, args.device, args.quick
        self.base = EngineConfig(
            device=args.device,
            dtype=args.dtype,
            speculative_algorithm="EAGLE3",
            speculative_fit_check="off",
            attention_backend=args.attention_backend,
            max_total_tokens=args.max_total_tokens,
            enable_torch_compile=args.enable_torch_compile,
        )
        self.info = model_info(self.base)
        self.sampling = replace(GREEDY, max_new_tokens=16 if args.quick else 128)
        self.trees = [TreeShape(*tree) for tree in (TREES[:1] if args.quick else TREES)]

    @cached_property
    def models(self) -> LoadedModels:
        if self.args.shape == "builtin":
            return load_models(self.base, self.info)
        context = 20480
        return grown_models(SHAPES[self.args.shape], self.info, DTYPES[self.args.dtype], self.device, context)

    @cached_property
    def workload(self) -> Workload:
        return load_workload(self.args.dataset, self.args.dataset_dir, self.info.tokenizer, 2 if self.is_quick else 16)

    def core(self, tree: TreeShape, batch_size: int = 1, *, is_adaptive: bool = False, **changes: Any) -> EngineCore:
        gc.collect()  # the last engine's cache and graphs
        return core_for(self.models, self.config(batch_size, **changes), Setting(batch_size, tree, is_adaptive))

    def config(self, batch_size: int, **changes: Any) -> EngineConfig:
        """With one graph, for just this batch size."""
        return replace(self.base, cuda_graph_bs=(batch_size,), **changes)

    @cached_property
    def copy_rate(self) -> float:
        """Bytes per second of a large copy."""
        return copy_rate(self.device, 2**24 if self.is_quick else 2**32)


def machine(bench: Bench) -> dict[str, Any]:
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "copy_bytes_per_second": bench.copy_rate,
    }
    if bench.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        result["gpu"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    for package in ("triton", "transformers", "flashinfer"):
        spec = importlib.util.find_spec(package)
        result[package] = getattr(__import__(package), "__version__", "?") if spec else None
    return result


def parity(bench: Bench) -> dict[str, Any]:
    """Every kernel against its twin, natively."""
    missing = [name for name in ("pytest", "hypothesis", "pytest_timeout") if importlib.util.find_spec(name) is None]
    if missing or bench.is_quick:
        return {"skipped": f"{', '.join(missing)} not installed" if missing else "--quick"}
    tests = ["tests/kernels/test_triton_kernels.py", "tests/kernels/test_triton_tree_attention.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    return {"return_code": result.returncode, "tail": result.stdout[-1500:]}


def exactness(bench: Bench) -> dict[str, Any]:
    """Greedy texts: captured steps against eager ones, bit for bit; trees against plain decoding, with the gaps where they part."""
    prompts = bench.workload.prompts
    sampling = [bench.sampling] * len(prompts)
    plain = run_to_end(bench.core(NO_SPECULATION, 4), prompts, sampling)
    found = []
    for tree in (NO_SPECULATION, *bench.trees):
        captured = run_to_end(bench.core(tree, 4), prompts, sampling)
        eager = run_to_end(bench.core(tree, 4, disable_cuda_graph=True), prompts, sampling)
        gaps = gaps_where_parted(bench.models, prompts, plain, captured)
        found.append({"tree": str(tree), "graph_equals_eager": captured == eager, "gaps_where_different": gaps})
    chosen = run_to_end(bench.core(BOUNDS, 4, is_adaptive=True), prompts, sampling)
    gaps = gaps_where_parted(bench.models, prompts, plain, chosen)
    found.append({"tree": f"up to {BOUNDS}, one in each step", "gaps_where_different": gaps})
    return {"rows": found}


def step_bytes(bench: Bench, tree: TreeShape, context: int) -> int:
    """What a step must read at least: the target once, and for every pass of the head its layer and output layer; and the cache."""
    models, itemsize = bench.models, bench.models.dtype.itemsize
    spec = models.spec
    total = num_weights(spec) * itemsize
    total += 2 * spec.num_layers * spec.shape.num_kv_heads * spec.shape.head_dim * context * itemsize
    if tree != NO_SPECULATION and models.head:
        shape = models.head.shape
        attention = shape.head_dim * (3 * shape.num_heads + 4 * shape.num_kv_heads)  # queries and keys read two hidden sizes
        layer = shape.hidden_size * (attention + 3 * shape.intermediate_size)
        output = shape.hidden_size * len(models.head.token_map.target_ids)
        fusion = shape.hidden_size * spec.shape.hidden_size * len(models.head.feature_layers)
        total += (tree.num_steps * (layer + output) + fusion) * itemsize
    return total


def timed_decoding(bench: Bench, tree: TreeShape, context: int) -> dict[str, Any]:
    """Milliseconds of a step of one request at a context, tokens of a step, and the share of the byte floor that they reach."""
    core = bench.core(tree)
    prompt = [token for prompt in bench.workload.prompts for token in prompt]
    text = (prompt * (context // len(prompt) + 1))[:context]
    core.submit("a", text, replace(bench.sampling, max_new_tokens=32 if bench.is_quick else 256))
    while core.scheduler.waiting or any(request.is_prefilling for request in core.scheduler.running):
        core.step()
    num_steps, num_tokens, start = 0, 0, time.perf_counter()
    while core.has_work:
        num_tokens += sum(len(event.tokens) for event in core.step())
        num_steps += 1
    seconds = (time.perf_counter() - start) / num_steps
    floor = step_bytes(bench, tree, context) / bench.copy_rate
    return {
        "tree": str(tree), "context": context, "step_ms": round(1000 * seconds, 3),
        "tokens_a_step": round(num_tokens / num_steps, 3), "floor_ms": round(1000 * floor, 3),
        "share_of_floor": round(floor / seconds, 3),
    }  # fmt: skip


def contexts(bench: Bench) -> dict[str, Any]:
    """Plain decoding and two full steps against their byte floors, from short contexts to long ones."""
    trees = [NO_SPECULATION, *(tree for tree in bench.trees if tree.num_draft_tokens in (4, 32, 60))]
    lengths = [64] if bench.is_quick else [256, 512, 1024, 4096, 16384]
    return {"rows": [timed_decoding(bench, tree, context) for context in lengths for tree in trees]}


def sweep(bench: Bench) -> dict[str, Any]:
    """Speed-ups over plain decoding by batch size."""
    measurements = []
    for batch_size in [1, 2] if bench.is_quick else [1, 2, 4, 8, 16, 32, 64]:
        workload = Workload(bench.workload.name, (bench.workload.prompts * batch_size)[: max(4, 2 * batch_size)])
        settings = [Setting(batch_size, tree) for tree in (NO_SPECULATION, *bench.trees)]
        for setting in (*settings, Setting(batch_size, BOUNDS, is_adaptive=True)):
            measurement = Measurement(setting)
            gc.collect()
            measure_once(bench.models, bench.config(batch_size), measurement, workload, bench.sampling)
            measurement.core = None  # and with it its cache
            measurements.append(measurement)
    return {"rows": rows(measurements)}


class WaitingClock:
    """Seconds of each part of a step, with the device waited for after each."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = {}
        self._device, self._last = device, time.perf_counter()

    def mark(self, part: str) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now


@torch.inference_mode()
def step_parts(bench: Bench) -> dict[str, Any]:
    """Milliseconds of each part of an eager step, the last of a few: where the time goes."""
    found = []
    for tree in bench.trees:
        core = bench.core(tree, 1, disable_cuda_graph=True)
        core.submit("a", bench.workload.prompts[0], bench.sampling)
        core.step()
        core.scheduler.plan()
        clock = WaitingClock(bench.device)
        for _ in range(3 if bench.is_quick else 20):
            requests = tuple(core.scheduler.running)
            sequences = decode_sequences(requests, tree.num_scratch_rows, bench.base.page_size, bench.device)
            clock.mark("prepare")
            core.runner.stepper.step(sequences, clock.mark)
        found.append({"tree": str(tree), **{part: round(1000 * value, 3) for part, value in clock.seconds.items()}})
    return {"rows": found}


def attention(bench: Bench) -> dict[str, Any]:
    shape = bench.models.spec.shape
    sizes = ([1], [64], [8]) if bench.is_quick else ([1, 16], [1024, 8192, 16384], [1, 16, 32, 64])
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return {"rows": list(attention_rows(bench.device, bench.models.dtype, heads, *sizes))}


def kernels(bench: Bench) -> dict[str, Any]:
    spec = bench.models.spec
    sizes = (spec.shape.hidden_size, spec.shape.intermediate_size, spec.vocab_size)
    num_rows = [2] if bench.is_quick else [1, 8, 32, 64, 256]
    return {"rows": list(small_kernel_rows(bench.device, bench.models.dtype, num_rows, *sizes))}


@torch.inference_mode()
def peer(bench: Bench) -> dict[str, Any]:
    """transformers on the same shape: static cache, compiled. Its weights are random, which costs the same."""
    spec = bench.models.spec
    shape = spec.shape
    config = LlamaConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_hidden_layers=spec.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=spec.vocab_size, max_position_embeddings=4096,
    )  # fmt: skip
    torch.set_default_dtype(bench.models.dtype)
    with torch.device(bench.device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    prompt = torch.tensor([bench.workload.prompts[0]], device=bench.device)
    count = 8 if bench.is_quick else 128
    options = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count}
    if bench.device == "cuda":
        options["cache_implementation"] = "static"  # which also compiles
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        model.generate(prompt, **options)
        seconds.append(time.perf_counter() - start)
    return {"tokens_per_second": round(count / min(seconds), 1), "first_call_seconds": round(seconds[0], 1)}


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    part.__name__: part for part in (machine, parity, exactness, contexts, step_parts, attention, kernels, sweep, peer)
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["builtin", *SHAPES], default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--attention-backend", default="triton", choices=["torch", "triton", "flashinfer"])
    parser.add_argument("--enable-torch-compile", action="store_true")
    parser.add_argument("--max-total-tokens", type=int, default=60_000)
    parser.add_argument("--dataset", default="builtin")
    parser.add_argument("--dataset-dir", type=Path)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / f"gpu_{date.today().isoformat()}.json")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    bench = Bench(args)
    results: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    if "machine" in results:
        bench.copy_rate = results["machine"]["copy_bytes_per_second"]
    for name in args.parts:
        if name not in results:
            start = time.perf_counter()
            results[name] = {**PARTS[name](bench), "seconds": round(time.perf_counter() - start, 1)}
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"== {name} ({results[name]['seconds']} s)", flush=True)
        table = results[name].get("rows")
        if name == "sweep":
            print_table(table)
        else:
            for row in table or [results[name]]:
                print("  " + ", ".join(f"{key} {value}" for key, value in row.items() if key != "seconds"), flush=True)


if __name__ == "__main__":
    main()
