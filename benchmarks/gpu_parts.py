"""The parts of the GPU benchmark: each a list of jobs, of which those come first that say most."""

import gc
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from benchmarks.gpu_bench import Bench, Jobs, Rows
from benchmarks.gpu_kernel_parts import attention, experts, kernels, latents, products, tilings
from benchmarks.mixed_load import mixed_load
from eagle_rt.bench.lossless import gaps_where_parted
from eagle_rt.bench.sweep import Measurement, Setting, core_for, measure_once, rows
from eagle_rt.bench.workload import Workload
from eagle_rt.engine.load import weight_bytes
from eagle_rt.engine.prepare import decode_sequences
from eagle_rt.resolve import DEFAULT_COPY
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

ROOT = Path(__file__).parents[1]
# Not swept over: trees that hardly differ from others. More rows than this in a step never pay.
ONE_REQUEST, MOST_ROWS = (TreeShape(5, 1, 6), TreeShape(5, 4, 16), TreeShape(7, 10, 60)), 1024
# The largest tree of those that each step chooses from.
BOUNDS = TreeShape(5, 8, 32)
PARITY_TESTS = [
    "kernels/test_triton_kernels",
    "kernels/test_triton_tree_attention",
    "kernels/test_triton_copies",
    "kernels/test_skinny_products",
    "kernels/test_experts",
    "kernels/test_latents",
    "kernels/test_delta_net",
    "kernels/test_narrow_weights",
    "engine/test_step_kernels",
    "engine/test_launching_on_gpu",
]


def machine(bench: Bench) -> Jobs:
    return {"machine": lambda: [machine_row(bench)]}


def machine_row(bench: Bench) -> dict[str, Any]:
    row: dict[str, Any] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "copy_bytes_per_second": bench.copy_rate,
    }
    if bench.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        row["gpu"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    for package in ("triton", "transformers", "flashinfer"):
        spec = importlib.util.find_spec(package)
        row[package] = getattr(__import__(package), "__version__", "?") if spec else None
    return row


def parity(bench: Bench) -> Jobs:
    """Every kernel against its twin, natively; and that nothing waits to be launched."""
    return {} if bench.is_quick else {name: partial(tested, name) for name in PARITY_TESTS}


def tested(name: str) -> Rows:
    missing = [package for package in ("pytest", "hypothesis", "pytest_timeout") if importlib.util.find_spec(package) is None]
    if missing:
        return [{"skipped": f"{', '.join(missing)} not installed"}]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/{name}.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    return [{"return_code": result.returncode, "tail": result.stdout[-1500:]}]


def exactness(bench: Bench) -> Jobs:
    """Greedy texts: captured steps against eager ones, bit for bit; trees against plain decoding, with the gaps where they part."""
    jobs: Jobs = {str(tree): partial(exact, bench, tree) for tree in (NO_SPECULATION, *bench.trees)}
    return {**jobs, f"up to {BOUNDS}": partial(exact_in_any_tree, bench)}


def exact(bench: Bench, tree: TreeShape) -> Rows:
    captured, eager = bench.texts(tree), bench.texts(tree, disable_cuda_graph=True)
    gaps = gaps_where_parted(bench.models, bench.workload.prompts, bench.plain_texts, captured)
    return [{"graph_equals_eager": captured == eager, "gaps_where_different": gaps}]


def exact_in_any_tree(bench: Bench) -> Rows:
    """One of a few trees in each step, as it pays."""
    gaps = gaps_where_parted(bench.models, bench.workload.prompts, bench.plain_texts, bench.texts(BOUNDS, is_adaptive=True))
    return [{"gaps_where_different": gaps}]


def step_bytes(bench: Bench, tree: TreeShape, context: int) -> int:
    """What a step must read at least: the target once, and for every pass of the head its layer and output layer; and the cache."""
    models, itemsize = bench.models, bench.models.dtype.itemsize
    spec = models.spec
    total = weight_bytes(spec, models.dtype, models.quantization)
    total += 2 * spec.num_layers * spec.shape.num_kv_heads * spec.shape.head_dim * context * itemsize
    if tree != NO_SPECULATION and models.head:
        shape = models.head.shape
        attention = shape.head_dim * (3 * shape.num_heads + 4 * shape.num_kv_heads)  # queries and keys read two hidden sizes
        layer = shape.hidden_size * (attention + 3 * shape.intermediate_size)
        output = shape.hidden_size * len(models.head.token_map.target_ids)
        fusion = shape.hidden_size * spec.shape.hidden_size * len(models.head.feature_layers)
        total += (tree.num_steps * (layer + output) + fusion) * itemsize
    return total


def timed_decoding(bench: Bench, tree: TreeShape, context: int) -> Rows:
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
    return [{
        "step_ms": round(1000 * seconds, 3), "tokens_a_step": round(num_tokens / num_steps, 3),
        "floor_ms": round(1000 * floor, 3), "share_of_floor": round(floor / seconds, 3),
    }]  # fmt: skip


def contexts(bench: Bench) -> Jobs:
    """Plain decoding and two full steps against their byte floors, from short contexts to long ones."""
    trees = [NO_SPECULATION, *(tree for tree in bench.trees if tree.num_draft_tokens in (4, 32, 60))]
    lengths = [64] if bench.is_quick else [512, 4096, 16384, 1024, 256]
    return {f"{tree} at {context} rows": partial(timed_decoding, bench, tree, context) for context in lengths for tree in trees}


def sweep(bench: Bench) -> Jobs:
    """Speed-ups over plain decoding by batch size; of draws; and where prompts do not wait for each other."""
    batch_sizes, sampled, large = ([1, 2], [1], [2]) if bench.is_quick else ([8, 32, 1, 2, 64, 4, 16], [1, 8], [32, 64])
    return {
        **{f"batch {size}": partial(swept, bench, size) for size in batch_sizes},
        **{f"batch {size} at T = 1": partial(swept, bench, size, temperature=1.0) for size in sampled},
        **{f"batch {size}, no delay": partial(swept, bench, size, prefill_delay="off") for size in large},
    }


def swept(bench: Bench, batch_size: int, temperature: float = 0.0, **changes: Any) -> Rows:
    measurements, sampling = [], replace(bench.sampling, temperature=temperature, seed=0)
    workload = Workload(bench.workload.name, (bench.workload.prompts * batch_size)[: max(4, 2 * batch_size)])
    trees = [tree for tree in bench.trees if batch_size * tree.num_draft_tokens <= MOST_ROWS and tree not in ONE_REQUEST]
    settings = [Setting(batch_size, tree) for tree in (NO_SPECULATION, *trees)]
    for setting in (*settings, Setting(batch_size, BOUNDS, is_adaptive=True)):
        measurement = Measurement(setting)
        gc.collect()
        measure_once(bench.models, bench.config(batch_size, **changes), measurement, workload, sampling)
        measurement.core = None  # and with it its cache
        measurements.append(measurement)
    return rows(measurements)


def copies(bench: Bench) -> Jobs:
    """What is gained by drafting what texts repeat: after prompts, and after those that hold the reply to them."""
    return {
        f"batch {size}, {text}": partial(copied, bench, size, is_asked_again=text == "asked again")
        for size in ([1] if bench.is_quick else [1, 8])
        for text in ("prompts", "asked again")
    }


def copied(bench: Bench, batch_size: int, *, is_asked_again: bool) -> Rows:
    """With nothing, the head alone, the head and copies, and copies alone."""
    prompts, head = (bench.workload.prompts * batch_size)[: max(4, 2 * batch_size)], Setting(batch_size, BOUNDS, is_adaptive=True)
    if is_asked_again:
        texts = zip(bench.workload.prompts, bench.plain_texts, strict=True)
        prompts = ([[*prompt, *reply, *prompt] for prompt, reply in texts] * batch_size)[: len(prompts)]
    longest = TreeShape(DEFAULT_COPY - 1, 1, DEFAULT_COPY)
    config, workload, measurements = bench.config(batch_size), Workload(bench.workload.name, prompts), {}
    for name, setting, changes in (
        ("nothing", Setting(batch_size, NO_SPECULATION), {}),
        ("head", head, {}),
        ("head and copies", head, {"speculative_ngram": "auto"}),
        ("copies", Setting(batch_size, longest, is_adaptive=True), {"speculative_algorithm": "NGRAM", "speculative_ngram": "auto"}),
    ):
        measurements[name] = Measurement(setting)
        gc.collect()
        measure_once(bench.models, replace(config, **changes), measurements[name], workload, bench.sampling)
        measurements[name].core = None  # and with it its cache
    return [{"drafting": name, **row} for name, row in zip(measurements, rows(list(measurements.values())), strict=True)]


def start_up(bench: Bench) -> Jobs:
    """Of an engine whose weights are loaded, with graphs for the batch sizes that are captured by default."""

    def started(is_adaptive: bool) -> Rows:
        models = bench.models  # loaded before the clock starts
        start = time.perf_counter()
        core_for(models, bench.base, Setting(8, BOUNDS, is_adaptive))
        return [{"seconds_after_loading": round(time.perf_counter() - start, 1)}]

    return {f"tree {BOUNDS}": partial(started, False), f"trees up to {BOUNDS}": partial(started, True)}


def load(bench: Bench) -> Jobs:
    """Whether anything breaks or is lost where nothing is alike."""
    batch_size, seconds, most_tokens = (4, 2.0, 16) if bench.is_quick else (32, 20.0, 512)

    def loaded(is_adaptive: bool) -> Rows:
        core = bench.core(BOUNDS, batch_size, is_adaptive=is_adaptive)
        return [mixed_load(core, bench.workload.prompts, seconds, most_tokens)]

    return {f"tree {BOUNDS}": partial(loaded, False), f"trees up to {BOUNDS}": partial(loaded, True)}


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


def step_parts(bench: Bench) -> Jobs:
    """Milliseconds of each part of an eager step: where the time goes."""
    return {str(tree): partial(parts_of_a_step, bench, tree) for tree in bench.trees}


@torch.inference_mode()
def parts_of_a_step(bench: Bench, tree: TreeShape) -> Rows:
    """Of the last of a few."""
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
    return [{part: round(1000 * value, 3) for part, value in clock.seconds.items()}]


def profile(bench: Bench) -> Jobs:
    """Microseconds that each kernel takes of a captured step of one request, most first."""
    trees = [tree for tree in (NO_SPECULATION, *bench.trees[::-1]) if tree.num_draft_tokens in (1, 4, 32, 60)]
    return {str(tree): partial(profiled, bench, tree) for tree in trees}


def profiled(bench: Bench, tree: TreeShape) -> Rows:
    core = bench.core(tree)
    core.submit("a", bench.workload.prompts[0], bench.sampling)
    num_steps = 2 if bench.is_quick else 10
    for _ in range(3):
        core.step()
    activities = [ProfilerActivity.CUDA if bench.device == "cuda" else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            core.step()
    averages = sorted(profiler.key_averages(), key=own_time, reverse=True)
    return [
        {"kernel": average.key[:80], "calls": average.count / num_steps, "us": round(own_time(average) / num_steps, 1)}
        for average in averages[:40]
    ]


def own_time(average: Any) -> float:
    return max(average.self_device_time_total, average.self_cpu_time_total)


def peer(bench: Bench) -> Jobs:
    return {"transformers": partial(transformers_rate, bench)}


@torch.inference_mode()
def transformers_rate(bench: Bench) -> Rows:
    """transformers on the same shape: static cache, compiled. Its weights are random, which costs the same."""
    spec = bench.models.spec
    shape, experts = spec.shape, spec.experts[-1]
    sizes = {
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size, "num_hidden_layers": spec.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "vocab_size": spec.vocab_size, "max_position_embeddings": 4096,
    }  # fmt: skip
    more = {"num_local_experts": experts.count, "num_experts_per_tok": experts.mixing.top_k} if experts else {}
    config = MixtralConfig(**sizes, **more) if experts else LlamaConfig(**sizes)
    torch.set_default_dtype(bench.models.dtype)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config).eval()
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
    return [{"tokens_per_second": round(count / min(seconds), 1), "first_call_seconds": round(seconds[0], 1)}]


# Those that say most first.
PARTS: dict[str, Callable[[Bench], Jobs]] = {
    part.__name__: part
    for part in (
        machine, exactness, contexts, sweep, copies, profile, parity, attention, latents, products, experts, start_up, load, peer,
        step_parts, kernels, tilings,
    )
}  # fmt: skip
