"""The parts of the GPU benchmark that time kernels by themselves."""

import itertools
from functools import partial

from benchmarks.gpu_bench import Bench, Jobs, Rows
from benchmarks.gpu_kernels import attention_row, expert_row, product_rows, small_kernel_rows, tiling_row
from eagle_rt.cache.pool import RowShape
from eagle_rt.kernels.experts import Mixing
from eagle_rt.kernels.skinny import tile_for
from eagle_rt.kernels.triton.tree_attention import Tiling
from eagle_rt.models.layer_kinds import ExpertShape

# Sequences, rows of each, nodes.
CUT_SHAPES = [(1, 512, 1), (1, 512, 32), (1, 8192, 1), (1, 8192, 32), (16, 1024, 32), (16, 8192, 32)]


def attention(bench: Bench) -> Jobs:
    """Of one layer, against FlashInfer's and torch's."""
    num_heads, num_kv_heads, head_dim = bench.heads
    return attention_jobs(bench, num_heads, RowShape(num_kv_heads, head_dim))


def latents(bench: Bench) -> Jobs:
    """The same over latents, of GLM-4.7-Flash's shape."""
    return attention_jobs(bench, 20, RowShape(1, 576, 512))


def attention_jobs(bench: Bench, num_heads: int, kept: RowShape) -> Jobs:
    batch_sizes, lengths, nodes = ([1], [64], [8]) if bench.is_quick else ([1, 16], [1024, 8192, 16384], [32, 64, 1, 16])

    def attended(batch_size: int, context: int, num_nodes: int) -> Rows:
        return [attention_row(bench.device, bench.models.dtype, num_heads, kept, [context] * batch_size, num_nodes)]

    return {
        f"batch {batch_size}, {context} rows, {num_nodes} nodes": partial(attended, batch_size, context, num_nodes)
        for num_nodes in nodes
        for batch_size in batch_sizes
        for context in lengths
    }


def tilings(bench: Bench) -> Jobs:
    """Ways to cut our attention."""
    shapes = [(1, 64, 8)] if bench.is_quick else CUT_SHAPES

    def cut(batch_size: int, context: int, num_nodes: int) -> Rows:
        num_heads, num_kv_heads, _ = bench.heads
        num_rows = num_nodes * num_heads // num_kv_heads
        sizes = [16] if num_rows <= 16 else [32] if num_rows <= 32 else [64, 128]
        tried = [
            Tiling(size, columns, split, warps, stages)
            for size in sizes
            for columns, split, warps, stages in itertools.product([64, 128], [64, 128, 256], [4, 8], [2, 3])
        ]
        tried = tried[:1] if bench.is_quick else tried
        return [tiling_row(bench.device, bench.models.dtype, bench.heads, [context] * batch_size, num_nodes, tried)]

    return {
        f"batch {batch_size}, {context} rows, {num_nodes} nodes": partial(cut, batch_size, context, num_nodes)
        for batch_size, context, num_nodes in shapes
    }


def products(bench: Bench) -> Jobs:
    """Of the target, for few rows."""

    def multiplied(num_rows: int) -> Rows:
        shape, vocab_size = bench.models.spec.shape, bench.models.spec.vocab_size
        num_heads = shape.num_heads + 2 * shape.num_kv_heads
        shapes = {
            "qkv": (num_heads * shape.head_dim, shape.hidden_size), "o": (shape.hidden_size, shape.num_heads * shape.head_dim),
            "gate_up": (2 * shape.intermediate_size, shape.hidden_size), "down": (shape.hidden_size, shape.intermediate_size),
            "lm_head": (vocab_size, shape.hidden_size),
        }  # fmt: skip
        able = {name: sizes for name, sizes in shapes.items() if sizes[1] % tile_for(sizes[0]).ins == 0}
        return list(product_rows(bench.device, bench.models.dtype, num_rows, able, bench.heads))

    return {f"{num_rows} rows": partial(multiplied, num_rows) for num_rows in ([2] if bench.is_quick else [1, 32, 8, 64])}


def experts(bench: Bench) -> Jobs:
    """Of one layer of the target; of Qwen3-30B-A3B where that has none."""
    spec = bench.models.spec
    hidden, shape = 2048, ExpertShape(128, 768, Mixing(8, True))
    if own := spec.experts[-1]:
        hidden, shape = spec.shape.hidden_size, own
    if bench.is_quick:
        hidden, shape = 64, ExpertShape(4, 32, Mixing(2, True))

    def mixed(num_rows: int) -> Rows:
        return [expert_row(bench.device, bench.models.dtype, num_rows, hidden, shape)]

    return {f"{num_rows} rows": partial(mixed, num_rows) for num_rows in ([2] if bench.is_quick else [1, 32, 4, 8, 64, 512])}


def kernels(bench: Bench) -> Jobs:
    """The small ones, against the bytes that they must move."""

    def timed(num_rows: int) -> Rows:
        spec = bench.models.spec
        sizes = (spec.shape.hidden_size, spec.shape.intermediate_size, spec.vocab_size)
        return list(small_kernel_rows(bench.device, bench.models.dtype, num_rows, *sizes))

    return {f"{num_rows} rows": partial(timed, num_rows) for num_rows in ([2] if bench.is_quick else [1, 32, 64, 8, 256])}
