"""An engine over loaded models: caches, tree shape and scheduler."""

import os
from dataclasses import replace

import torch

from eagle_rt.attention.select import attention_backend
from eagle_rt.cache.pool import KVPool
from eagle_rt.cache.saved import SavedMemories
from eagle_rt.config import EngineConfig
from eagle_rt.engine.capture import graph_bytes
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.gathering import Gathering
from eagle_rt.engine.load import LoadedModels
from eagle_rt.engine.runner import Runner
from eagle_rt.engine.scheduler import Scheduler, SchedulerLimits
from eagle_rt.models.decoder import Decoder
from eagle_rt.models.heads.base import DraftHead
from eagle_rt.models.spec import ModelSpec
from eagle_rt.resolve import resolve_tree, unused_options
from eagle_rt.speculate.acceptance import SHARPNESS
from eagle_rt.speculate.copy_policy import Copying, FixedCopies
from eagle_rt.speculate.drafter import TreeDrafter
from eagle_rt.speculate.drawn_drafter import DrawnTreeDrafter
from eagle_rt.speculate.headless_step import HeadlessStepper
from eagle_rt.speculate.host_drafter import HostDrafter
from eagle_rt.speculate.host_step import HostStepper
from eagle_rt.speculate.host_verifier import HostVerifier
from eagle_rt.speculate.operations import StepOperations, TorchOperations
from eagle_rt.speculate.own_drafts import OwnStepper, feature_layers_of, load_drafter
from eagle_rt.speculate.policy import FixedPolicy
from eagle_rt.speculate.step import Stepper
from eagle_rt.speculate.texts import TextTable
from eagle_rt.speculate.tree_rules import RuledPolicy, StaticTree, load_rule
from eagle_rt.tree_shape import TreeShape

MEMORY_FRACTION = {"cpu": 0.3, "cuda": 0.85}


def make_core(models: LoadedModels, config: EngineConfig) -> tuple[EngineCore, list[str]]:
    """An engine over loaded models: caches, tree shape and scheduler as `config` says; and what was decided for the user.

    Raises:
        ValueError: the tree cannot be drafted, or the cache is too small for it.
    """
    tree_shape, tree_notes = resolve_tree(config, config.device)
    check_simulation(config, tree_shape)
    spec, dtype, device = models.spec, models.dtype, config.device
    head = models.head if config.has_head else None
    if head and tree_shape.top_k > (draft_vocab_size := len(head.token_map.target_ids)):
        raise ValueError(
            f"--speculative-eagle-topk {tree_shape.top_k} is more than the {draft_vocab_size} tokens that the head knows"
        )
    if head and head.block and tree_shape.num_steps > head.block.most_steps:
        raise ValueError(
            f"--speculative-num-steps {tree_shape.num_steps} is more than the head guesses: it was trained with blocks of "
            f"{head.block.size} tokens, the first of which is known; use at most {head.block.most_steps}"
        )
    limits = scheduler_limits(config, models.target, head, tree_shape, dtype, models.context_length)
    num_slots = (limits.num_pages + 1) * limits.page_size  # with a page for the padding of captured steps
    num_states = config.max_running_requests + 1  # and one for the padding of captured steps
    saved_rows = range(num_states, num_states + num_saved(config, spec))
    pool = models.target.make_pool(num_slots, num_states + len(saved_rows))
    rows = {*models.target.rows, *(head.rows if head else ())}
    backend = attention_backend(config.attention_backend, device, dtype, rows)
    operations = step_operations(config.attention_backend, config.speculative_score_sharpness)
    rule = load_rule(config.tree_rule, tree_shape) if head and config.tree_rule else None
    drafter = None
    if head:
        head_pool = KVPool(head.rows, num_slots, dtype, device) if head.rows else pool
        parts = head, head_pool, backend, operations
        options = {"tree": tree_shape, "num_states": num_states, "couples": config.speculative_coupling == "auto"}
        is_drawn = isinstance(rule, StaticTree)
        drafter = DrawnTreeDrafter(*parts, paths=rule.paths, **options) if is_drawn else TreeDrafter(*parts, **options)
    texts = None
    if tree_shape.num_copied and config.captures_steps:
        # A step that follows a request's last one, which the host has not read yet, may write past the end, too.
        texts = TextTable(num_states, limits.context_length + 2 * (tree_shape.max_depth + 2), device)
    simulated_length = config.speculative_simulate_accept_length
    stepped = tree_shape if texts else replace(tree_shape, num_copied=0)
    stepper = Stepper(models.target, pool, backend, operations, drafter, stepped, texts, simulated_length)
    host_stepper = headless = None
    largest_batch = config.speculative_disable_by_batch_size
    # Our kernels need the host for nothing: without captured steps the same fixed shapes run eagerly.
    if drafter and (config.sizes_trees or rule or device == "cpu" or config.attention_backend != "triton"):
        host_stepper = HostStepper(
            HostVerifier(models.target, pool, backend, drafter.head.feature_layers, simulated_length),
            HostDrafter(
                drafter.head,
                drafter.pool,
                backend,
                sharpness=SHARPNESS if config.sizes_trees else config.speculative_score_sharpness,
                couples=config.speculative_coupling == "auto",
            ),
            RuledPolicy(rule, largest_batch) if rule else FixedPolicy(largest_batch),
        )
    elif config.has_own_drafter:
        assert config.speculative_algorithm
        own = load_drafter(config.speculative_algorithm, models.target)
        headless = OwnStepper(HostVerifier(models.target, pool, backend, feature_layers_of(own)), own, largest_batch)
    elif not drafter and (config.copies_alone or device == "cpu"):
        copying = Copying(FixedCopies(largest_batch)) if config.copies_alone else None
        headless = HeadlessStepper(HostVerifier(models.target, pool, backend), copying)
    runner = Runner(stepper, host_stepper, headless, tree_shape, config.page_size, device, largest_batch)
    scheduler = Scheduler(
        limits,
        models.eos_token_ids,
        use_prefix_cache=not config.disable_radix_cache,
        would_draft=runner.would_draft,
        gathering=gathering_for(runner, limits) if config.delays_prefill else None,
        saved=SavedMemories(saved_rows, config.page_size) if saved_rows else None,
    )

    notes = unused_options(config) + models.notes + tree_notes
    if spec.delta_net:
        notes.append(
            f"what layers without attention remember takes {models.target.bytes_per_text / 2**20:.1f} MiB for each of "
            f"{num_states - 1} requests (--max-running-requests) and of {len(saved_rows)} texts that others may begin with"
        )
    if stepper.simulates:
        notes.append(
            f"WARNING: SIMULATED: --speculative-simulate-accept-length {config.speculative_simulate_accept_length} makes up what "
            "is accepted. The texts mean nothing; never serve anyone like this"
        )
    if limits.context_length < models.context_length:
        notes.append(
            f"the cache holds one request of {limits.context_length} tokens: the context length is that instead of "
            f"{models.context_length}"
        )
    size = "trees up to" if config.sizes_trees else f"trees by {config.tree_rule} up to" if rule else "tree"
    speculation = (
        f"drafting with {config.speculative_algorithm}, {size} {tree_shape}" if config.speculative_algorithm else "no speculation"
    )
    notes += [
        f"{spec.architecture} in {str(dtype).removeprefix('torch.')} on {device}, {speculation}",
        f"cache: {limits.num_pages} pages of {limits.page_size} = {limits.num_pages * limits.page_size} tokens; "
        f"context length {limits.context_length}; at most {limits.max_running} requests at once",
    ]
    return EngineCore(scheduler, runner, spec.vocab_size, config.random_seed), notes


def num_saved(config: EngineConfig, spec: ModelSpec) -> int:
    """For how many texts' beginnings what is remembered of them is saved: as many as run together."""
    return config.max_running_requests if spec.delta_net and not config.disable_radix_cache else 0


def gathering_for(runner: Runner, limits: SchedulerLimits) -> Gathering:
    return Gathering(lambda rows: runner.pass_costs.ms(rows), limits.chunk_size, lambda: runner.clock.elapsed_ms)


def check_simulation(config: EngineConfig, tree_shape: TreeShape) -> None:
    """Raises ValueError where what shall be simulated is more than the tree can yield, or there is no tree."""
    length = config.speculative_simulate_accept_length
    if length is None or config.speculative_algorithm is None:
        return
    longest = tree_shape.max_depth + 1
    if not 1 <= length <= longest:
        raise ValueError(
            f"--speculative-simulate-accept-length is {length}, but a step of the tree {tree_shape} gains between 1 and {longest} "
            "tokens"
        )


def scheduler_limits(
    config: EngineConfig,
    target: Decoder,
    head: DraftHead | None,
    tree_shape: TreeShape,
    dtype: torch.dtype,
    context_length: int,
) -> SchedulerLimits:
    """Size the cache: as asked, or a share of memory, but no more than all running requests can fill.

    Raises:
        ValueError: not even one short request fits.
    """
    num_tokens = config.max_total_tokens
    if num_tokens is None:
        slot_bytes = target.bytes_per_slot
        if head:
            slot_bytes += sum(row.num_numbers for row in head.rows) * dtype.itemsize
        useful = config.max_running_requests * (context_length + tree_shape.num_scratch_rows + config.page_size)
        spared = graph_bytes(config, target.spec, tree_shape, dtype)
        spared += target.bytes_per_text * (config.max_running_requests + 1 + num_saved(config, target.spec))
        num_tokens = min(max(0, cache_bytes(config) - spared) // slot_bytes, useful)
    limits = SchedulerLimits(
        page_size=config.page_size,
        num_pages=num_tokens // config.page_size,
        num_scratch=tree_shape.num_scratch_rows,
        max_running=config.max_running_requests,
        chunk_size=config.chunked_prefill_size,
        context_length=context_length,
    )
    longest = limits.num_pages * limits.page_size - limits.num_scratch
    if longest < 2:
        raise ValueError(
            f"the cache would hold {num_tokens} tokens, and the draft tree alone needs {limits.num_scratch}: raise "
            "--max-total-tokens or --mem-fraction-static, or draft a smaller tree"
            + (", or capture steps of smaller batches (--cuda-graph-max-bs)" if config.captures_steps else "")
        )
    return replace(limits, context_length=min(context_length, longest))


def cache_bytes(config: EngineConfig) -> int:
    """Bytes that the cache may take in this process, with the weights already in memory."""
    fraction = config.mem_fraction_static or MEMORY_FRACTION[config.device]
    if config.device == "cuda":
        torch.cuda.empty_cache()  # what loading has taken for a while
        free, total = torch.cuda.mem_get_info()
        return int(free - total * (1 - fraction))
    # Processes on one CPU share its memory.
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * fraction) // config.tensor_parallel_size


def step_operations(attention: str, sharpness: float) -> StepOperations:
    """Our kernels for all of a step where they are asked for."""
    if attention != "triton":
        return TorchOperations(sharpness)
    from eagle_rt.speculate.triton_operations import TritonOperations  # not everywhere is triton installed

    return TritonOperations(sharpness)
