"""Capturing decode steps at start, for the batch sizes that were asked for."""

import time
from dataclasses import replace

import torch

from eagle_rt.config import EngineConfig
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.graphs import MOST_COPYING, GraphLimits, StepGraphs, copies_beside, default_batch_sizes
from eagle_rt.models.layer_kinds import has_gate
from eagle_rt.models.spec import ModelSpec
from eagle_rt.speculate.tree_choice import PayingTree, trees_within
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

DEFAULT_MAX_BATCH = 32
ATTENTION_PARTS_BYTES = 256 * 2**20
# What `PenaltyTables` hold of a token, and make of a logit.
TABLES_BYTES, PENALIZED_BYTES = 9, 4


def graph_batch_sizes(config: EngineConfig) -> list[int]:
    """The batch sizes to capture, of those that can occur."""
    if config.cuda_graph_bs:
        return sorted({min(size, config.max_running_requests) for size in config.cuda_graph_bs})
    return default_batch_sizes(min(config.cuda_graph_max_bs or DEFAULT_MAX_BATCH, config.max_running_requests))


def captured_trees(config: EngineConfig, tree_shape: TreeShape) -> list[TreeShape]:
    """The trees that a step may have, the largest first."""
    if config.sizes_trees:
        return trees_within(tree_shape)[::-1]
    stops_drafting = config.speculative_disable_by_batch_size is not None and tree_shape != NO_SPECULATION
    return [tree_shape, NO_SPECULATION] if stops_drafting else [tree_shape]


def graph_bytes(config: EngineConfig, spec: ModelSpec, tree_shape: TreeShape, dtype: torch.dtype) -> int:
    """About what the captured steps will take, so that the cache leaves it: the largest batch's logits, what penalties make of
    them, the attention's parts and a layer's activations, in which the smaller batches then live too."""
    if not config.captures_steps:
        return 0
    shape = spec.shape
    batch_size = max(graph_batch_sizes(config))
    num_rows = batch_size * max(tree_shape.num_nodes, tree_shape.top_k)
    if copies_beside(tree_shape):
        drafted = replace(tree_shape, num_copied=0)
        num_rows = max(min(batch_size, MOST_COPYING) * tree_shape.num_nodes, batch_size * max(drafted.num_nodes, drafted.top_k))
    logits = spec.vocab_size * (2 * (dtype.itemsize + 4) + PENALIZED_BYTES)
    # Of a row a gate and up and what they come to; of each of its experts that, and what it adds.
    gates = max(
        (own.mixing.num_taken * (4 * own.intermediate_size + shape.hidden_size) + own.count if own else 0)
        + (4 * layer_shape.intermediate_size if has_gate(own) else 0)
        for layer_shape, own in zip(spec.layer_shapes, spec.experts, strict=True)
    )
    attention = max(own.num_heads * own.head_dim for own in spec.layer_shapes)
    layer = (8 * shape.hidden_size + gates + 4 * attention) * dtype.itemsize
    if own := spec.delta_net:  # of whose layers all inputs are noted until it is known what is kept
        width, num_layers = own.num_channels + own.values_size, sum(map(bool, spec.delta_nets))
        layer += num_layers * (width + 2 * own.num_heads) * dtype.itemsize + 4 * (width + 2 * own.values_size)
    return num_rows * (logits + layer) + batch_size * spec.vocab_size * TABLES_BYTES + ATTENTION_PARTS_BYTES


def capture_steps(core: EngineCore, config: EngineConfig) -> list[str]:
    """Give the engine captured steps, and let it choose among their trees; what was captured, and in what time. Where capturing
    fails steps stay eager, unless --strict.

    Raises:
        ValueError: under --strict, capturing failed.
    """
    limits = core.scheduler.limits
    graph_limits = GraphLimits(
        page_size=limits.page_size,
        # A step is launched before it is known what the one ahead of it gains.
        max_pages=limits.pages_for(limits.context_length + limits.num_scratch + core.runner.tree_shape.max_depth + 1),
        num_scratch=limits.num_scratch,
        padding_page=limits.num_pages,
        padding_state=limits.max_running,
    )
    start, memory = time.perf_counter(), memory_in_use(config.device)
    try:
        stepper = core.runner.stepper
        steppers = {tree: stepper.sized(tree) for tree in captured_trees(config, core.runner.tree_shape)}
        graphs = StepGraphs(steppers, graph_batch_sizes(config), graph_limits, config.device)
        measured = graphs.measured_ms() if config.sizes_trees else {}
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        if config.strict:
            raise ValueError(f"capturing CUDA graphs failed, and --strict was given: {reason}") from error
        return [f"WARNING: capturing CUDA graphs failed, steps run eagerly: {reason}"]
    core.runner.use_graphs(graphs, PayingTree(measured) if config.sizes_trees else core.runner.choice)
    sizes, trees = ", ".join(map(str, graphs.batch_sizes)), ", ".join(map(str, graphs.trees))
    megabytes = (memory_in_use(config.device) - memory) / 2**20
    taken = f"in {time.perf_counter() - start:.1f} s; graphs take {megabytes:.0f} MiB"
    return [f"captured a step for batches of {sizes} with trees {trees} {taken}"]


def memory_in_use(device: str) -> int:
    """Bytes taken on the GPU, by whomever."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
