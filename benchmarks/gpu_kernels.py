"""Kernels on a GPU: attention against FlashInfer and torch, and the small ones against the bytes that they must move."""

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.tree_batches import tree_batch
from eagle_rt.attention.base import AttentionBackend
from eagle_rt.attention.flashinfer import FlashInferAttention, wrappers_on
from eagle_rt.attention.grouped import GroupedAttention
from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.attention.triton import TritonAttention
from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.kernels.experts import ExpertTensors
from eagle_rt.kernels.narrow import BITS, NarrowWeight, narrowed
from eagle_rt.kernels.narrow_experts import narrow_experts
from eagle_rt.kernels.skinny import TURNED_TILE
from eagle_rt.kernels.triton.add_rms_norm import add_rms_norm
from eagle_rt.kernels.triton.gated import gated
from eagle_rt.kernels.triton.gated_product import gated_product
from eagle_rt.kernels.triton.gumbel_argmax import gumbel_argmax
from eagle_rt.kernels.triton.mix_experts import mix_experts
from eagle_rt.kernels.triton.narrow_product import narrow_product
from eagle_rt.kernels.triton.rotate_and_write import rotate_and_write
from eagle_rt.kernels.triton.route import route
from eagle_rt.kernels.triton.skinny_product import skinny_product
from eagle_rt.kernels.triton.top_children import top_children
from eagle_rt.kernels.triton.tree_attention import Tiling, tree_attention
from eagle_rt.kernels.triton.turned_product import turned_product
from eagle_rt.models.layer_kinds import ExpertShape

# Of the cache, by timed layers together: several times what a GPU's own cache holds.
LEAST_READ = 2**28


def seconds_of(run: Callable[[], object], device: str, *, is_captured: bool = True) -> float:
    """Median time of a call, between events on a GPU, where it is captured so that launching costs nothing; what it needs to warm
    up has then happened. On a CPU, where kernels are interpreted, it is timed for form's sake."""
    num_warm_ups, num_repeats = (3, 30) if device == "cuda" else (0, 2)
    for _ in range(num_warm_ups):
        run()
    if device == "cuda" and is_captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    times = []
    for _ in range(num_repeats):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def copy_rate(device: str, num_bytes: int) -> float:
    """Bytes read and written per second by a large copy: the ceiling for everything that moves bytes."""
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def backends(device: str, dtype: torch.dtype, kept: RowShape) -> dict[str, AttentionBackend]:
    found: dict[str, AttentionBackend] = {"triton": TritonAttention(), "torch": GroupedAttention(dtype)}
    if device == "cuda" and not kept.value_dim and importlib.util.find_spec("flashinfer"):
        found["flashinfer"] = FlashInferAttention(wrappers_on(device))
    return found


def attention_row(
    device: str, dtype: torch.dtype, num_heads: int, kept: RowShape, lengths: list[int], num_nodes: int
) -> dict[str, Any]:
    """Microseconds of one layer's attention over such rows of the cache with the plan made beforehand, and its error against torch
    in float32. Layers take turns, so that no cache but the GPU's memory holds what is read."""
    batch = tree_batch(lengths, num_nodes, device)
    num_slots = sum(lengths) + len(lengths) * num_nodes
    layer_bytes = num_slots * kept.num_numbers * dtype.itemsize
    num_layers = max(1, min(16, LEAST_READ // layer_bytes)) if device == "cuda" else 1
    pool, precise = (
        KVPool([kept] * layers, num_slots, precision, device) for layers, precision in ((num_layers, dtype), (1, torch.float32))
    )
    pool.storage.normal_()
    precise.storage.copy_(pool.storage[:1])
    queries = torch.randn(len(batch.tokens), num_heads, kept.head_dim, device=device).to(dtype)
    reference = ReferenceAttention(torch.float32)
    expected = reference.run(queries.float(), 0, reference.plan(batch, precise), None)
    row: dict[str, Any] = {"bytes": layer_bytes}
    for name, backend in backends(device, dtype, kept).items():
        plan = backend.plan(batch, pool)
        error = (backend.run(queries, 0, plan, None).float() - expected).norm() / expected.norm()
        run = partial(run_layers, backend, queries, plan, num_layers)
        seconds = seconds_of(run, device, is_captured=name != "torch")
        row |= {f"{name}_us": round(1e6 * seconds / num_layers, 1), f"{name}_error": float(error)}
    return row


def tiling_row(
    device: str, dtype: torch.dtype, heads: tuple[int, int, int], lengths: list[int], num_nodes: int, tilings: list[Tiling]
) -> dict[str, Any]:
    """Microseconds of our kernel by how its work is cut."""
    num_heads, num_kv_heads, head_dim = heads
    batch = tree_batch(lengths, num_nodes, device)
    pool = KVPool([RowShape(num_kv_heads, head_dim)], sum(lengths) + len(lengths) * num_nodes, dtype, device)
    pool.storage.normal_()
    queries = torch.randn(len(batch.tokens), num_heads, head_dim, device=device).to(dtype)
    plan = TritonAttention().plan(batch, pool)
    arguments = (queries, pool.storage[0], plan.rows.pages, plan.rows.kv_lens, plan.queries_of, plan.masks, plan.positions)
    return {
        str(tiling): round(
            1e6 * seconds_of(partial(tree_attention, *arguments, page_size=plan.rows.page_size, tiling=tiling), device), 1
        )
        for tiling in tilings
    }


def product_rows(
    device: str, dtype: torch.dtype, num_rows: int, shapes: dict[str, tuple[int, int]], heads: tuple[int, int, int]
) -> Iterator[dict[str, Any]]:
    """Microseconds of x W^T by torch's product and by our skinny one, for W of such shapes [out, in], of both with what follows a
    product of gate and up, or of queries, keys and values of such heads, and with weights of few bits, as many as fill the same
    memory. Weights take turns, so that no cache but the GPU's memory holds what is read."""
    for name, (out_size, in_size) in shapes.items():
        num_bytes = out_size * in_size * dtype.itemsize
        num_weights = max(2, LEAST_READ // num_bytes) if device == "cuda" else 1
        weights = [(torch.randn(out_size, in_size, device=device) / in_size**0.5).to(dtype) for _ in range(num_weights)]
        x = torch.randn(num_rows, in_size, device=device).to(dtype)
        row: dict[str, Any] = {"product": name, "bytes": num_bytes}
        kinds = {"torch": torch_product, "skinny": skinny_product}
        if name == "gate_up":
            kinds |= {"torch_and_gate": torch_product_and_gate, "gated": gated_product}
        if name == "qkv" and heads[2] % TURNED_TILE.outs == 0:
            kinds |= turning_products(x, heads)
        for kind, product in kinds.items():
            seconds = seconds_of(partial(multiply_all, product, x, weights), device)
            row[f"{kind}_us"] = round(1e6 * seconds / num_weights, 2)
        for kind, make in NARROW.items():
            narrow = make(weights[0])
            num_more = num_weights * dtype.itemsize * 8 // BITS[narrow.kind] - 1 if device == "cuda" else 0
            copies = [narrow, *(copy_of(narrow) for _ in range(num_more))]
            seconds = seconds_of(partial(multiply_all, narrow_product_alone, x, copies), device)
            row |= {f"{kind}_us": round(1e6 * seconds / len(copies), 2), f"{kind}_bytes": sum(map(bytes_of, parts_of(narrow)))}
        yield row


def expert_row(device: str, dtype: torch.dtype, num_rows: int, hidden: int, shape: ExpertShape) -> dict[str, Any]:
    """Microseconds of routing and mixing the experts of one layer, as they are and rounded to four bits, and the bytes of those
    that some row takes. Layers take turns, so that no cache but the GPU's memory holds what is read."""
    num_bytes = 3 * hidden * shape.intermediate_size * dtype.itemsize
    num_layers = max(2, LEAST_READ // (shape.count * num_bytes)) if device == "cuda" else 1
    count, size = shape.count, shape.intermediate_size
    sizes = [(count, hidden), (count, 2 * size, hidden), (count, hidden, size)]
    layers = [
        ExpertTensors(*((torch.randn(*own, device=device) / own[-1] ** 0.5).to(dtype) for own in sizes)) for _ in range(num_layers)
    ]
    x = torch.randn(num_rows, hidden, device=device).to(dtype)

    def routed(weights: ExpertTensors) -> tuple[Tensor, Tensor]:
        return route(x @ weights.router.t(), shape.mixing)

    def mix_all(experts: list[Any]) -> None:
        for weights, own in zip(layers, experts, strict=True):
            mix_experts(x, *routed(weights), own, shape.mixing)

    taken = [len(routed(weights)[1].unique()) for weights in layers]
    narrow = [narrow_experts(weights, shape.mixing, "int4") for weights in layers]
    seconds, narrow_seconds = (seconds_of(partial(mix_all, experts), device) / num_layers for experts in (layers, narrow))
    num_taken = sum(taken) / num_layers
    return {
        "us": round(1e6 * seconds, 1),
        "int4_us": round(1e6 * narrow_seconds, 1),
        "experts": round(num_taken, 1),
        "bytes": round(num_taken * num_bytes),
    }


def on_gptq_levels(weight: Tensor) -> Tensor:
    """As gptq stores a weight, whose groups of 128 have one scale: rounded to whole numbers of a seventh of the largest."""
    groups = weight.float().unflatten(1, (-1, min(128, weight.shape[1])))
    steps = groups.abs().amax(2, keepdim=True) / 7
    return (groups / steps).round_().mul_(steps).flatten(1)


# Weights of few bits as they are rounded here, and as gptq and fp8 checkpoints store them.
NARROW: dict[str, Callable[[Tensor], NarrowWeight]] = {
    "int8": lambda weight: must(narrowed(weight, "int8")),
    "int4": lambda weight: must(narrowed(weight, "int4")),
    "gptq": lambda weight: must(narrowed(on_gptq_levels(weight), "stored")),
    "fp8": lambda weight: must(narrowed((100 * weight.float()).to(torch.float8_e4m3fn).float(), "stored")),
}


def must(narrow: NarrowWeight | None) -> NarrowWeight:
    assert narrow
    return narrow


def parts_of(narrow: NarrowWeight) -> tuple[Tensor, ...]:
    return narrow.words, narrow.ratios, narrow.offsets, narrow.scales


def copy_of(narrow: NarrowWeight) -> NarrowWeight:
    return NarrowWeight(narrow.kind, narrow.out_size, narrow.in_size, *(own.clone() for own in parts_of(narrow)))


def bytes_of(values: Tensor) -> int:
    return values.numel() * values.element_size()


def narrow_product_alone(x: Tensor, weight: NarrowWeight) -> Tensor:
    return narrow_product(x, weight, None)


def torch_product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def torch_product_and_gate(x: Tensor, weight: Tensor) -> Tensor:
    return gated(torch_product(x, weight))


def turning_products(x: Tensor, heads: tuple[int, int, int]) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Products whose heads are turned and cached, by two kernels and by one."""
    num_heads, num_kv_heads, head_dim = heads
    angles, slots = torch.rand(len(x), 1, head_dim, device=x.device).to(x.dtype), torch.arange(len(x), device=x.device)
    storage = KVPool([RowShape(num_kv_heads, head_dim)], len(x), x.dtype, x.device.type).storage[0]

    def one_after_the_other(x: Tensor, weight: Tensor) -> Tensor:
        qkv = torch_product(x, weight).view(len(x), -1, head_dim)
        return rotate_and_write(qkv, num_heads, angles, angles, None, storage, slots)

    def at_once(x: Tensor, weight: Tensor) -> Tensor:
        return turned_product(x, weight, None, num_heads, angles, angles, storage, slots)

    return {"torch_and_turned": one_after_the_other, "turned": at_once}


def multiply_all(product: Callable[[Tensor, Any], Tensor], x: Tensor, weights: list[Any]) -> None:
    for weight in weights:
        product(x, weight)


def run_layers(backend: AttentionBackend, queries: Tensor, plan: Any, num_layers: int) -> None:
    for layer in range(num_layers):
        backend.run(queries, layer, plan, None)


def small_kernel_rows(
    device: str, dtype: torch.dtype, num_rows: int, hidden: int, inner: int, vocab: int
) -> Iterator[dict[str, Any]]:
    """Microseconds of the kernels around the products, and the bytes that each must move."""
    for name, (call, num_bytes) in small_kernels(device, dtype, num_rows, hidden, inner, vocab).items():
        yield {"kernel": name, "us": round(1e6 * seconds_of(call, device), 1), "bytes": num_bytes}


def small_kernels(
    device: str, dtype: torch.dtype, num_rows: int, hidden: int, inner: int, vocab: int
) -> dict[str, tuple[Callable[[], object], int]]:
    x, weight = torch.randn(num_rows, hidden, device=device).to(dtype), torch.randn(hidden, device=device).to(dtype)
    gate = torch.randn(num_rows, 2 * inner, device=device).to(dtype)
    logits = torch.randn(1, num_rows, vocab, device=device)
    draft_logits = logits[..., :32000].to(dtype)
    nothing = torch.full((1, num_rows), -torch.inf, device=device)
    temperature, seeds = torch.ones(1, device=device), torch.ones(1, dtype=torch.int64, device=device)
    positions, scores = torch.ones(1, num_rows, dtype=torch.int64, device=device), torch.zeros(1, num_rows, device=device)
    return {
        "add_rms_norm": (lambda: add_rms_norm(x, x, weight, 1e-5), 4 * x.nbytes),
        "gated": (lambda: gated(gate), gate.nbytes * 3 // 2),
        "gumbel_argmax": (lambda: gumbel_argmax(logits, temperature, nothing, seeds, positions), logits.nbytes),
        "top_children": (lambda: top_children(draft_logits, scores, 8), draft_logits.nbytes),
    }
