"""From a config to a running engine: load the models, size the cache, and say what was decided."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.cache.pool import KVPool
from eagle_rt.config import DTYPES, EngineConfig, TreeShape, resolve_device, resolve_tree, unused_options
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.runner import Runner
from eagle_rt.engine.scheduler import Scheduler, SchedulerLimits
from eagle_rt.models.decoder import Decoder, load_decoder
from eagle_rt.models.heads import DraftHead, load_eagle3_head
from eagle_rt.models.spec import LayerShape, ModelSpec, model_spec, read_config
from eagle_rt.models.tokenizer import end_token_ids, generation_config, load_tokenizer, sampling_defaults
from eagle_rt.models.weights import checkpoint_dir
from eagle_rt.speculate.drafter import TreeDrafter

BUILT_IN = Path(__file__).parents[1] / "demo" / "weights"
MEMORY_FRACTION = {"cpu": 0.3, "cuda": 0.85}


@dataclass(frozen=True)
class ModelInfo:
    """What the outside of an engine needs to know of its model."""

    name: str
    directory: Path
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any]


def model_info(config: EngineConfig) -> ModelInfo:
    """Find the model and read everything but its weights.

    Raises:
        FileNotFoundError, ValueError: there is no such checkpoint, or its config or tokenizer cannot be read.
    """
    directory = target_dir(config)
    tokenizer_dir = checkpoint_dir(config.tokenizer_path) if config.tokenizer_path else directory
    tokenizer = load_tokenizer(tokenizer_dir, trust_remote_code=config.trust_remote_code)
    generation = generation_config(directory)
    return ModelInfo(
        name=config.model_path or "eagle-rt-demo",
        directory=directory,
        tokenizer=tokenizer,
        eos_token_ids=end_token_ids(read_config(directory), generation, tokenizer),
        sampling_defaults=sampling_defaults(generation),
    )


def target_dir(config: EngineConfig) -> Path:
    return checkpoint_dir(config.model_path, config.revision) if config.model_path else BUILT_IN / "target"


def head_dir(config: EngineConfig) -> Path:
    """Raises ValueError if a head is needed and none was named."""
    if config.speculative_draft_model_path:
        return checkpoint_dir(config.speculative_draft_model_path, config.speculative_draft_model_revision)
    if config.model_path is None:
        return BUILT_IN / "eagle3"
    raise ValueError("--speculative-algorithm EAGLE3 needs --speculative-draft-model-path, the checkpoint of its head")


@dataclass(frozen=True)
class LoadedModels:
    """Weights in memory, ready to be given caches of any size and trees of any shape."""

    spec: ModelSpec
    target: Decoder
    head: DraftHead | None
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    context_length: int
    notes: list[str]


def load_models(config: EngineConfig, info: ModelInfo) -> LoadedModels:
    """Read target and head; `config.device` must be resolved.

    Raises:
        FileNotFoundError, ValueError: a checkpoint cannot be loaded, or the two do not fit, with the reason.
    """
    if config.speculative_algorithm in ("EAGLE", "NEXTN"):
        raise ValueError(
            f"--speculative-algorithm {config.speculative_algorithm} is not supported yet: use EAGLE3 with an EAGLE-3 head"
        )
    notes = []
    spec = model_spec(read_config(info.directory))
    dtype = resolve_dtype(config, spec)
    context_length = config.context_length or spec.max_position_embeddings
    if context_length > spec.max_position_embeddings:
        notes.append(f"--context-length {context_length} is beyond the {spec.max_position_embeddings} that the model was made for")
    target = load_decoder(info.directory, spec, context_length=context_length, dtype=dtype, device=config.device)
    head: DraftHead | None = None
    if config.speculative_algorithm:
        head, unused = load_eagle3_head(head_dir(config), target, dtype, config.device)
        if unused:
            notes.append(f"tensors of the head that nothing uses: {', '.join(unused)}")
    return LoadedModels(spec, target, head, info.eos_token_ids, dtype, context_length, notes)


def make_core(models: LoadedModels, config: EngineConfig) -> tuple[EngineCore, list[str]]:
    """An engine over loaded models: caches, tree shape and scheduler as `config` says; and what was decided for the user.

    Raises:
        ValueError: the tree cannot be drafted, or the cache is too small for it.
    """
    tree_shape, tree_notes = resolve_tree(config, config.device)
    spec, dtype, device = models.spec, models.dtype, config.device
    head = models.head if config.speculative_algorithm else None
    if head and tree_shape.top_k > (draft_vocab_size := len(head.token_map.target_ids)):
        raise ValueError(
            f"--speculative-eagle-topk {tree_shape.top_k} is more than the {draft_vocab_size} tokens that the head knows"
        )
    limits = scheduler_limits(config, spec, head, tree_shape, dtype, models.context_length)
    pool = make_pool(spec.num_layers, spec.shape, limits, dtype, device)
    backend = ReferenceAttention(dtype)
    drafter = None
    if head:
        drafter = TreeDrafter(
            head,
            make_pool(head.num_layers, head.shape, limits, dtype, device),
            backend,
            num_steps=tree_shape.num_steps,
            top_k=tree_shape.top_k,
            num_draft_tokens=tree_shape.num_draft_tokens,
            num_states=config.max_running_requests,
        )
    runner = Runner(models.target, pool, backend, drafter, tree_shape, config.page_size, device)
    scheduler = Scheduler(limits, models.eos_token_ids, use_prefix_cache=not config.disable_radix_cache)

    notes = unused_options(config) + models.notes + tree_notes
    if limits.context_length < models.context_length:
        notes.append(
            f"the cache holds one request of {limits.context_length} tokens: the context length is that instead of "
            f"{models.context_length}"
        )
    speculation = f"drafting with {config.speculative_algorithm}, tree {tree_shape}" if head else "no speculation"
    notes += [
        f"{spec.architecture} in {str(dtype).removeprefix('torch.')} on {device}, {speculation}",
        f"cache: {limits.num_pages} pages of {limits.page_size} = {limits.num_pages * limits.page_size} tokens; "
        f"context length {limits.context_length}; at most {limits.max_running} requests at once",
    ]
    return EngineCore(scheduler, runner, spec.vocab_size, config.random_seed), notes


def build_core(config: EngineConfig, info: ModelInfo) -> tuple[EngineCore, list[str]]:
    """Load the models and make an engine over them."""
    config = resolve_device(config)
    resolve_tree(config, config.device)  # a tree that cannot work is refused before anything is loaded
    return make_core(load_models(config, info), config)


def resolve_dtype(config: EngineConfig, spec: ModelSpec) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if config.device == "cpu":
        return torch.float32
    return spec.dtype if spec.dtype != torch.float32 else torch.bfloat16


def scheduler_limits(
    config: EngineConfig,
    spec: ModelSpec,
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
        shapes = [(spec.num_layers, spec.shape)] + ([(head.num_layers, head.shape)] if head else [])
        slot_bytes = sum(
            KVPool.bytes_per_slot(num_layers, shape.num_kv_heads, shape.head_dim, dtype) for num_layers, shape in shapes
        )
        useful = config.max_running_requests * (context_length + tree_shape.num_scratch_rows + config.page_size)
        num_tokens = min(cache_bytes(config) // slot_bytes, useful)
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
        )
    return replace(limits, context_length=min(context_length, longest))


def cache_bytes(config: EngineConfig) -> int:
    """Bytes that the cache may take, with the weights already in memory."""
    fraction = config.mem_fraction_static or MEMORY_FRACTION[config.device]
    if config.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(free - total * (1 - fraction))
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * fraction)


def make_pool(num_layers: int, shape: LayerShape, limits: SchedulerLimits, dtype: torch.dtype, device: str) -> KVPool:
    return KVPool(num_layers, limits.num_pages * limits.page_size, shape.num_kv_heads, shape.head_dim, dtype, device)
