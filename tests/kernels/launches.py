"""Every kernel launched as steps launch it, but compiled only: for a GPU, down to its machine code, on a machine without one.

`python launches.py CALLS...` makes some of the lists of calls below and prints in JSON what each kernel takes.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from eagle_rt.kernels.delta_net import DeltaNetShape, DeltaNetWeights, Lineage, Memory
from eagle_rt.kernels.experts import ExpertTensors, Mixing
from eagle_rt.kernels.gate import GEGLU, SWIGLU, Gate
from eagle_rt.kernels.narrow import TILE, WORDS, Kind, NarrowWeight, block_inputs
from eagle_rt.kernels.narrow_experts import NarrowExperts, NarrowStack
from eagle_rt.kernels.rms_norm import HeadNorms, RMSNorm
from eagle_rt.kernels.skinny import LARGE_TILE, SMALL_TILE, Tile
from eagle_rt.kernels.triton.add_rms_norm import add_rms_norm
from eagle_rt.kernels.triton.ancestors import ancestors
from eagle_rt.kernels.triton.begin_step import begin_step
from eagle_rt.kernels.triton.cos_sin import cos_sin
from eagle_rt.kernels.triton.delta_net import delta_net
from eagle_rt.kernels.triton.embed import embed
from eagle_rt.kernels.triton.filter_thresholds import filter_thresholds
from eagle_rt.kernels.triton.finish_step import finish_step
from eagle_rt.kernels.triton.gated import gated
from eagle_rt.kernels.triton.gated_product import gated_product
from eagle_rt.kernels.triton.graft_copies import graft_copies
from eagle_rt.kernels.triton.gumbel_argmax import gumbel_argmax
from eagle_rt.kernels.triton.latent_queries import latent_queries
from eagle_rt.kernels.triton.mix_experts import mix_experts
from eagle_rt.kernels.triton.move_rows import move_rows
from eagle_rt.kernels.triton.narrow_product import narrow_product
from eagle_rt.kernels.triton.norms_side_by_side import norms_side_by_side
from eagle_rt.kernels.triton.note_tokens import note_tokens
from eagle_rt.kernels.triton.penalize import penalize
from eagle_rt.kernels.triton.rerank import rerank
from eagle_rt.kernels.triton.rotate_and_write import rotate_and_write
from eagle_rt.kernels.triton.route import route
from eagle_rt.kernels.triton.select_beam import select_beam
from eagle_rt.kernels.triton.skinny_product import skinny_product
from eagle_rt.kernels.triton.top_children import KernelNoise, top_children
from eagle_rt.kernels.triton.tree_attention import Ragged, Uniform, tree_attention
from eagle_rt.kernels.triton.turned_product import turned_product
from eagle_rt.kernels.triton.walk import walk
from eagle_rt.kernels.triton.widen import widen
from eagle_rt.kernels.triton.write_latents import write_latents

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def floats(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def attend(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    queries: Uniform | Ragged,
    *,
    page_size: int = 1,
    window: int | None = None,
    has_sinks: bool = False,
    value_dim: int | None = None,
) -> None:
    """heads: of queries, of keys, and the size of each; two sequences of up to 8192 tokens."""
    num_heads, num_kv_heads, head_dim = heads
    count, num_words = 2 * queries.most, -(-(getattr(queries, "num_columns", None) or 1) // 64)
    tree_attention(
        floats(count, num_heads, head_dim, dtype=dtype),
        floats(16, 1 if value_dim else 2, num_kv_heads, head_dim, dtype=dtype),
        ids(2, 8192 // page_size, dtype=torch.int32),
        ids(2, dtype=torch.int32),
        queries,
        ids(count, num_words),
        ids(count),
        page_size=page_size,
        window=window,
        sinks=floats(num_heads) if has_sinks else None,
        value_dim=value_dim,
    )


def prompts(most: int) -> Ragged:
    return Ragged(most, ids(3, dtype=torch.int32), ids(2 * most, dtype=torch.int32))


def turn(heads: tuple[int, int, int], norms_follow: bool | None, *, norms_values: bool = False) -> None:
    num_heads, num_kv_heads, head_dim = heads
    angles, weights = floats(4, 1, head_dim, dtype=BF16), floats(head_dim, dtype=BF16)
    own = RMSNorm(weights, 1e-6)
    norms = None if norms_follow is None else HeadNorms(own, own, norms_follow, own if norms_values else None)
    qkv, storage = floats(4, num_heads + 2 * num_kv_heads, head_dim, dtype=BF16), floats(16, 2, num_kv_heads, head_dim, dtype=BF16)
    rotate_and_write(qkv, num_heads, angles, angles, norms, storage, ids(4))


def turn_latents(num_queries: int, dtype: torch.dtype) -> None:
    angles, norms = floats(4, 1, 64, dtype=dtype), [RMSNorm(floats(size, dtype=dtype), 1e-6) for size in (num_queries, 512)]
    write_latents(floats(4, num_queries + 576, dtype=dtype), *norms, angles, angles, floats(16, 1, 1, 576, dtype=dtype), ids(4))
    latent_queries(floats(4, 20, 512, dtype=dtype), floats(4, 20, 256, dtype=dtype), angles, angles)


def turn_products(rows: int, heads: tuple[int, int, int], dtype: torch.dtype, *, has_bias: bool) -> None:
    num_heads, num_kv_heads, head_dim = heads
    out_size, angles = (num_heads + 2 * num_kv_heads) * head_dim, floats(rows, 1, head_dim, dtype=dtype)
    bias, storage = floats(out_size, dtype=dtype) if has_bias else None, floats(16, 2, num_kv_heads, head_dim, dtype=dtype)
    x, weight = floats(rows, 1024, dtype=dtype), floats(out_size, 1024, dtype=dtype)
    turned_product(x, weight, bias, num_heads, angles, angles, storage, ids(rows))


def multiply(product: Callable[..., Tensor], rows: int, tile: Tile, dtype: torch.dtype) -> None:
    product(floats(rows, 1024, dtype=dtype), floats(4096, 1024, dtype=dtype), tile)


def narrow(kind: Kind, out_size: int, in_size: int, parts: int) -> NarrowWeight:
    tiles, blocks = -(-out_size // TILE), -(-in_size // block_inputs(kind))
    words = ids(tiles, blocks, TILE, WORDS, dtype=torch.int32)
    ratios, offsets = (floats(tiles, blocks, parts, TILE, dtype=dtype) for dtype in (FP16, BF16))
    return NarrowWeight(kind, out_size, in_size, words, ratios, offsets, floats(tiles * TILE))


def multiply_narrow(kind: Kind, parts: int, rows: int, dtype: torch.dtype, *, out_size: int, has_bias: bool = False) -> None:
    """Few outputs are made in parts."""
    weight = narrow(kind, out_size, 14336, parts)
    narrow_product(floats(rows, 14336, dtype=dtype), weight, floats(out_size, dtype=dtype) if has_bias else None)
    widen(weight, dtype)


def mix(
    rows: int,
    sizes: tuple[int, int],
    gate: Gate,
    kind: Kind | None = None,
    parts: int = 0,
    *,
    has_biases: bool,
    weighs_inputs: bool = False,
) -> None:
    """Eight experts of which rows take two, of that size of rows and of experts."""
    count, top_k, (hidden_size, size) = 8, 2, sizes
    weights = ExpertTensors(
        floats(count, hidden_size, dtype=BF16),
        floats(count, 2 * size, hidden_size, dtype=BF16),
        floats(count, hidden_size, size, dtype=BF16),
        *((floats(count, n, dtype=BF16).squeeze(1) for n in (1, 2 * size, hidden_size)) if has_biases else ()),
    )
    held: ExpertTensors | NarrowExperts = weights
    mixing = Mixing(top_k, normalizes=True, gate=gate, weighs_inputs=weighs_inputs)
    if kind:
        gates = NarrowStack(narrow(kind, count * 2 * size, hidden_size, parts), count, 2 * size, in_halves=True, dtype=BF16)
        down = NarrowStack(narrow(kind, count * hidden_size, size, parts), count, hidden_size, in_halves=False, dtype=BF16)
        held = NarrowExperts(weights, gates, down, mixing)
    mix_experts(floats(rows, hidden_size, dtype=BF16), floats(rows, top_k), ids(rows, top_k, dtype=torch.int32), held, mixing)


def draft(top_k: int, width: int, dtype: torch.dtype, *, has_noise: bool) -> None:
    rows = floats(2, top_k), ids(2, top_k)
    noise = KernelNoise(floats(2), ids(2), *rows, token_ids=ids(width)) if has_noise else None
    top_children(floats(2, top_k, width, dtype=dtype), floats(2, top_k), top_k, 1.75, noise)
    children = floats(2, top_k * top_k), ids(2, top_k * top_k)
    select_beam(*children, ids(2, top_k, 2), top_k, first_row=top_k, first_candidate=top_k)


def finish_tree(top_k: int, num_steps: int, num_nodes: int) -> None:
    candidates = top_k + (num_steps - 1) * top_k * top_k
    drafted = floats(2, candidates), ids(2, candidates), ids(2, candidates)
    rerank(*drafted, ids(32000), ids(2), top_k, num_nodes)
    tree, scores = ids(2, num_nodes), floats(2, num_nodes)
    texts = ids(4, 4096, dtype=torch.int32), ids(2), ids(2)
    graft_copies(*texts, (tree, tree, tree, scores), 16, num_steps, 32, 16384)
    note_tokens(*texts, ids(2), ids(2, num_steps + 1))
    ancestors(tree, tree, ids(2), num_steps)
    walk(tree, tree, scores, tree, num_steps)
    begin_step(ids(2), ids(2, 64, dtype=torch.int32), 16, num_nodes)
    finish_step(ids(2, num_steps + 1), ids(2), scores, ids(2), 0, ids(2), ids(2))
    move_rows(floats(2, 64, 2, 8, 128, dtype=BF16), ids(2, num_nodes), ids(2, num_steps + 1))


def choose(dtype: torch.dtype) -> None:
    logits, settings = floats(1, 4, 128256, dtype=dtype), floats(1)
    gumbel_argmax(logits, settings, filter_thresholds(logits, settings, ids(1), settings, settings), ids(1), ids(1, 4))


def penalize_logits(token_ids: Tensor | None) -> None:
    tables = ids(2, 32000, dtype=torch.int32), ids(2, 32000, dtype=torch.bool), floats(2, 32000)
    penalize(floats(2, 32000, dtype=BF16), tables, (floats(2), floats(2), floats(2)), token_ids)


def norm(size: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = floats(4, size, dtype=dtype), floats(size, dtype=weight_dtype)
    add_rms_norm(x, x, weight, 1e-5)
    norms_side_by_side(x, weight, 1e-5, x, weight, 1e-5)


def remember(shape: DeltaNetShape, dtype: torch.dtype, num_nodes: int | None) -> None:
    """Two texts of 32 rows, or trees of so many nodes."""
    rows, heads = 2 * (num_nodes or 32), shape.num_heads
    weights = DeltaNetWeights(
        shape, floats(shape.num_channels, shape.taps), floats(heads), floats(heads), floats(shape.value_dim), 1e-6
    )
    kept = floats(4, shape.taps - 1, shape.num_channels, dtype=dtype), floats(4, heads, shape.key_dim, shape.value_dim)
    visible = ids(rows, num_nodes, dtype=torch.bool) if num_nodes else None
    inputs, rates = floats(rows, shape.num_channels + shape.values_size, dtype=dtype), floats(rows, 2 * heads, dtype=dtype)
    memory, lineage = Memory(*kept, ids(2), ids(2, dtype=torch.bool)), Lineage(ids(2), ids(2), ids(rows), visible)
    delta_net(inputs, rates, weights, memory, lineage)


LLAMA, QWEN, GPT_OSS, GEMMA, PHI = (32, 8, 128), (14, 2, 64), (64, 8, 64), (8, 4, 256), (32, 32, 80)
GEMMA4 = (32, 4, 512)  # the layers of the 31B that see all of a text
LATENT = (20, 1, 576)  # GLM-4.7-Flash's
QWEN3_5 = DeltaNetShape(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128, taps=4)
BALANCED = Mixing(8, normalizes=True, by_sigmoid=True, scale=2.5, num_shared=1)
OSS_GATE = Gate(1.702, 7.0, shift=1.0)
# By what of a GPU they need: tiles that fit anywhere, or into a data centre's only, or none.
ATTENTION = [
    lambda: attend(LLAMA, BF16, Uniform(32, 32)),
    lambda: attend(LLAMA, BF16, Uniform(100, 100), page_size=16),
    lambda: attend(LLAMA, BF16, prompts(512)),
    lambda: attend(GPT_OSS, BF16, Uniform(60, 60), window=128, has_sinks=True),
    lambda: attend(GEMMA, BF16, Uniform(32, 32), window=1024),
    lambda: attend(PHI, FP16, Uniform(8, 8), page_size=64),
    lambda: attend(LATENT, BF16, Uniform(1, 1), page_size=64, value_dim=512),
    lambda: attend(LATENT, FP16, Uniform(32, 32), value_dim=512),
    lambda: attend(LATENT, BF16, prompts(512), value_dim=512),
    lambda: attend(LATENT, FP32, Uniform(8, 8), value_dim=512),
    lambda: attend(GEMMA4, BF16, Uniform(1, 1)),
    lambda: attend(GEMMA4, FP16, Uniform(32, 32)),
    lambda: attend(GEMMA4, BF16, prompts(512)),
    lambda: attend(GEMMA4, FP32, Uniform(8, 8)),
    lambda: attend(LLAMA, FP32, Uniform(32, 32)),
    lambda: attend(GEMMA, FP32, prompts(512)),
    lambda: remember(QWEN3_5, BF16, None),
    lambda: remember(QWEN3_5, BF16, 16),
    lambda: remember(QWEN3_5, FP16, 64),
    lambda: remember(QWEN3_5, FP32, 100),
]
PRODUCTS = [
    lambda: multiply(skinny_product, 1, SMALL_TILE, FP16),
    lambda: multiply(gated_product, 16, SMALL_TILE, FP16),
    lambda: turn_products(32, LLAMA, BF16, has_bias=False),
    lambda: turn_products(1, QWEN, FP16, has_bias=True),
    lambda: multiply_narrow("int4", 1, 1, BF16, out_size=4096, has_bias=True),
    lambda: multiply_narrow("offset4", 4, 64, BF16, out_size=256, has_bias=True),
    lambda: multiply_narrow("e2m1", 4, 32, FP16, out_size=4096),
    lambda: multiply_narrow("int8", 0, 16, BF16, out_size=4096),
    lambda: multiply_narrow("e4m3", 1, 200, BF16, out_size=256),
    lambda: mix(2, (2048, 768), SWIGLU, has_biases=False),
    lambda: mix(2, (5120, 8192), SWIGLU, has_biases=False, weighs_inputs=True),
    lambda: mix(512, (2880, 2880), OSS_GATE, has_biases=True),
    lambda: mix(2, (2880, 2880), OSS_GATE, "e2m1", 4, has_biases=True),
    lambda: mix(512, (2048, 768), SWIGLU, "int4", 1, has_biases=False),
]
LARGE_PRODUCTS = [
    lambda: multiply(skinny_product, 64, LARGE_TILE, BF16),
    lambda: multiply(gated_product, 32, LARGE_TILE, BF16),
]
OTHERS = [
    lambda: norm(4096, BF16, BF16),
    lambda: norm(5376, BF16, FP32),
    lambda: gated(floats(2, 2 * 14336, dtype=BF16), SWIGLU),
    lambda: gated(floats(2, 2 * 10240, dtype=FP16), GEGLU),
    lambda: turn(LLAMA, None),
    lambda: turn(LLAMA, False),
    lambda: turn(QWEN, True),
    lambda: turn(GEMMA4, False, norms_values=True),
    lambda: turn(PHI, None),
    lambda: turn_latents(768, BF16),
    lambda: turn_latents(1536, FP16),
    lambda: embed(ids(2), floats(16, 4096, dtype=BF16)),
    lambda: cos_sin(ids(2), floats(128), floats(128), BF16),
    lambda: route(floats(2, 128, dtype=BF16), Mixing(8, normalizes=True)),
    lambda: route(floats(2, 128), BALANCED, floats(128)),
    lambda: route(floats(2, 256), BALANCED._replace(num_groups=8, top_groups=4), floats(256)),
    lambda: route(floats(2, 256 + 1, dtype=BF16), Mixing(8, normalizes=True, num_shared=1, gates_shared=True)),
    lambda: choose(BF16),
    lambda: draft(8, 32000, FP32, has_noise=False),
    lambda: draft(4, 128256, BF16, has_noise=True),
    lambda: finish_tree(10, 8, 100),
    lambda: penalize_logits(None),
    lambda: penalize_logits(ids(32000)),
]
CALLS: dict[str, list[Callable[[], Any]]] = {
    "attention": ATTENTION, "products": PRODUCTS, "large_products": LARGE_PRODUCTS, "others": OTHERS
}  # fmt: skip


class NoGPU:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def spilled_bytes(cubin: bytes) -> int:
    """Those of a thread that its registers have no room for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "--dump-resource-usage", file.name]
        return int(re.search(r"STACK:(\d+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)[1])


def compile_all(calls: list[Callable[[], Any]]) -> list[dict[str, Any]]:
    """What the kernels that these launch take: the bytes of shared memory of a program, and those that a thread spills."""
    driver.set_active(NoGPU())
    compiled: dict[str, Any] = {}

    def launch_nothing(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            done = kernel.run(*args, grid=grid, warmup=True, **options)
            compiled[done.hash] = kernel.__module__.rpartition(".")[2], kernel.__name__, done

        return launch

    JITFunction.__getitem__ = launch_nothing
    for call in calls:
        call()
    return [
        {"module": module, "kernel": name, "shared": done.metadata.shared, "spilled": spilled_bytes(done.asm["cubin"])}
        for module, name, done in compiled.values()
    ]


if __name__ == "__main__":
    print(json.dumps(compile_all([call for name in sys.argv[1:] for call in CALLS[name]])))
