"""From a config to models in memory: find the checkpoints, read them, and say what was decided."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle_rt.config import EngineConfig
from eagle_rt.kernels.processor import has_bfloat16_products
from eagle_rt.kernels.products import Quantization, can_round, has_narrow_kernels, has_own_kernels, takes_own_kernel
from eagle_rt.models.decoder import Decoder, load_decoder
from eagle_rt.models.families import READING_PARTS
from eagle_rt.models.heads.base import Head
from eagle_rt.models.heads.load import has_mtp_layer, load_head, load_mtp_head
from eagle_rt.models.heads.spec import check_feature_layers
from eagle_rt.models.layer_kinds import has_gate
from eagle_rt.models.layer_shape import LayerShape
from eagle_rt.models.quantized import Storage
from eagle_rt.models.spec import ModelSpec, model_spec, read_config
from eagle_rt.models.tokenizer import end_token_ids, generation_config, load_tokenizer, sampling_defaults
from eagle_rt.models.weights import checkpoint_dir
from eagle_rt.parallel.lead import load_shared_decoder
from eagle_rt.resolve import DTYPES
from eagle_rt.token_map.load import load_token_map, with_tokens
from eagle_rt.tree_shape import TreeShape

BUILT_IN = Path(__file__).parents[1] / "demo" / "weights"
# Below this, float32 products of one row are as fast on a CPU as bfloat16 ones that are not our own, and every other operator is
# faster.
MIN_BFLOAT16_WEIGHTS = 50_000_000
BITS = {"int8": "eight", "int4": "four"}
# What a weight that is rounded to four bits takes, with what belongs to its group.
FOUR_BITS = 5
BUILT_IN_HEADS = {"EAGLE3": "eagle3", "EAGLE": "eagle2", "NEXTN": "eagle2"}


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
    tokenizer = load_tokenizer(tokenizer_dir, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template)
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


def head_dir(config: EngineConfig) -> Path | None:
    """The folder of the head that was named; None if the target's own layers are to draft.

    Raises:
        ValueError: the algorithm needs a head and none was named.
    """
    if config.speculative_draft_model_path:
        return checkpoint_dir(config.speculative_draft_model_path, config.speculative_draft_model_revision)
    if config.drafts_with_own_layers:
        return None
    algorithm = config.speculative_algorithm
    if config.model_path is None and algorithm in BUILT_IN_HEADS:
        return BUILT_IN / BUILT_IN_HEADS[algorithm]
    raise ValueError(f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path, the checkpoint of its head")


@dataclass(frozen=True)
class LoadedModels:
    """Weights in memory, ready to be given caches of any size and trees of any shape."""

    spec: ModelSpec
    target: Decoder
    head: Head | None
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    context_length: int
    quantization: Quantization
    notes: list[str]

    def fitting(self, trees: Iterable[TreeShape]) -> list[TreeShape]:
        """Those that are no deeper than the head guesses."""
        block = self.head.block if self.head else None
        return [tree for tree in trees if not block or tree.num_steps <= block.most_steps]


def load_models(config: EngineConfig, info: ModelInfo) -> LoadedModels:
    """Read target and head; `config.device` must be resolved.

    Raises:
        FileNotFoundError, ValueError: a checkpoint cannot be loaded, or the two do not fit, with the reason.
    """
    notes = []
    spec = model_spec(read_config(info.directory))
    dtype = resolve_dtype(config, spec)
    context_length = config.context_length or spec.usual_length
    if spec.longest_text and context_length > spec.longest_text:
        raise ValueError(
            f"--context-length is {context_length}, but past {spec.longest_text} tokens {spec.architecture} attends in another "
            "way (within chunks of a text, by scaled queries), which is not supported: at most that many are served"
        )
    if context_length > spec.max_position_embeddings:
        notes.append(f"--context-length {context_length} is beyond the {spec.max_position_embeddings} that the model was made for")
    if spec.usual_length < min(context_length, spec.max_position_embeddings):
        notes.append(
            f"past {spec.usual_length} tokens queries are scaled by their positions, which takes a step of its own in each layer"
        )
    if info.tokenizer.chat_template is None:
        notes.append(
            "the tokenizer has no chat template (--chat-template brings one): dialogues are refused, and measurements ask in "
            "plain text, of which a chat model and its head foresee little"
        )
    if spec.architecture in READING_PARTS:
        notes.append(f"of {spec.architecture} the part that reads is served: it takes no images")
    if spec.rope.takes_long_factors(context_length):
        notes.append(
            f"angles are those for long texts, of up to {context_length} tokens; with --context-length {spec.rope.trained_length} "
            "they are those for shorter ones, with which these may come out better"
        )
    quantization = resolve_quantization(config, spec, torch.empty(0, dtype=dtype, device=config.device))
    require_room(spec, dtype, config.device, config.tensor_parallel_size, quantization)
    if is_rounded(quantization):
        notes.append(f"--quantization {quantization}: the model's weights are rounded to {BITS[quantization]} bits")
    if config.tensor_parallel_size > 1:
        notes.append(f"--tensor-parallel-size {config.tensor_parallel_size}: so many processes hold the model together")
    options = {"context_length": context_length, "dtype": dtype, "quantization": quantization}
    if config.lora_path:
        options["adapter_dir"] = checkpoint_dir(config.lora_path)
        notes.append(f"--lora-path {config.lora_path}: merged into the model's weights; its head was made for the model without it")
    target = load_target(config, info.directory, spec, **options)
    head = None
    with ExitStack() as failing:
        failing.callback(target.close)
        if spec.storage:
            notes.append(storage_note(spec.storage, quantization, target, dtype))
        if config.has_head:
            head, head_notes = load_draft_head(config, info, target, dtype)
            notes += head_notes
        failing.pop_all()
    return LoadedModels(spec, target, head, info.eos_token_ids, dtype, context_length, quantization, notes)


def resolve_quantization(config: EngineConfig, spec: ModelSpec, weight: Tensor) -> Quantization:
    """How the target's weights are held, given any weight of its precision.

    Raises:
        ValueError: they cannot be rounded as it was asked for.
    """
    if config.quantization != "none":
        require_rounding("--quantization", config.quantization, weight)
        return cast(Quantization, config.quantization)
    if spec.storage and (has_narrow_kernels(weight) or takes_own_kernel(weight)):
        return "stored"
    return "none"


def storage_note(storage: Storage, quantization: Quantization, target: Decoder, dtype: torch.dtype) -> str:
    """What has become of weights that a checkpoint stores so."""
    start = f"the checkpoint's weights are quantized ({storage.method}, {storage.bits} bits)"
    counts = target.count_bits()
    held = [f"{number} are held in {bits}" for bits, number in counts.items() if bits]
    if quantization not in ("stored", "int4") or not held:
        return f"{start}; they are widened to {dtype}"
    return f"{start}: of {counts.total()} products of its layers {', '.join(held)}"


def load_target(config: EngineConfig, model_dir: Path, spec: ModelSpec, **options: Any) -> Decoder:
    """options: of `load_decoder`."""
    size = config.tensor_parallel_size
    if size == 1:
        return load_decoder(model_dir, spec, device=config.device, **options)
    return load_shared_decoder(size, model_dir=model_dir, spec=spec, device=config.device, **options)


def require_room(
    spec: ModelSpec, dtype: torch.dtype, device: str, num_shards: int = 1, quantization: Quantization = "none"
) -> None:
    """Raises ValueError if the target's weights alone, or the first shard's of so many, are more than the GPU has free."""
    if device != "cuda":
        return
    is_shared = spec.tie_word_embeddings and not is_rounded(quantization)
    embeddings = 0 if is_shared else spec.vocab_size * spec.shape.hidden_size
    if own := spec.layer_inputs:
        embeddings += own.vocab_size * own.size * spec.num_layers
    held = weight_bytes(spec, dtype, quantization, of_all_experts=True) + embeddings * dtype.itemsize
    needed, (free, total) = held // num_shards, torch.cuda.mem_get_info()
    if needed > free:
        raise ValueError(
            f"the target's weights take {needed / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')}"
            f"{'' if quantization == 'none' else ' and few bits'}, and the GPU has "
            f"{free / 2**30:.1f} of its {total / 2**30:.1f} GiB free: use a larger GPU, more of them "
            "(--tensor-parallel-size), a smaller model, --dtype bfloat16, or --quantization"
        )


def load_draft_head(config: EngineConfig, info: ModelInfo, target: Decoder, dtype: torch.dtype) -> tuple[Head, list[str]]:
    """The head that the config asks for, fed from the layers and narrowed to the tokens that it asks for."""
    algorithm = config.speculative_algorithm
    assert algorithm
    folder = head_dir(config)
    if folder is not None:
        head, unused = load_head(folder, target, algorithm, dtype, config.device)
        if not head.rows and config.tensor_parallel_size > 1:
            size = config.tensor_parallel_size
            raise ValueError(
                f"--tensor-parallel-size {size}: a drafter of Gemma 4's looks at all keys, and no process has them; use 1"
            )
    elif has_mtp_layer(info.directory, target.spec):
        head, unused = load_mtp_head(info.directory, target, dtype, config.device)
    else:
        raise ValueError(
            f"{config.model_path} has no multi-token-prediction layers of its own: --speculative-algorithm {algorithm} needs "
            "--speculative-draft-model-path, the checkpoint of an EAGLE head"
        )
    notes = [f"tensors of the head that nothing uses: {', '.join(unused)}"] if unused else []
    if head.mask_row or head.block:
        notes.append("the head drafts in parallel: it guesses all levels in one pass")

    if config.speculative_aux_layers:
        layers = tuple(config.speculative_aux_layers)
        if head.spec.kind not in ("EAGLE3", "DFLASH") or len(layers) != len(head.feature_layers):
            raise ValueError(
                f"--speculative-aux-layers names {len(layers)} layers, but this {head.spec.kind} head takes the features of "
                f"{len(head.feature_layers)}, by default {head.feature_layers}"
            )
        check_feature_layers(layers, target.spec.num_layers)
        head = head.with_spec(feature_layers=layers)

    if config.speculative_token_map:
        vocab_size = len(head.token_map.target_ids)
        ids = load_token_map(config.speculative_token_map, target.spec.vocab_size)
        head = head.narrowed(with_tokens(ids, info.eos_token_ids))
        notes.append(f"--speculative-token-map: the head drafts with {len(head.token_map.target_ids)} of its {vocab_size} tokens")
    return (head.quantized() if quantizes_head(config, target.embedding) else head), notes


def quantizes_head(config: EngineConfig, weight: Tensor) -> bool:
    """Whether the head's weights are rounded to eight bits, given any weight of its precision.

    Raises:
        ValueError: that was asked for and cannot be.
    """
    quantization = config.speculative_draft_model_quantization
    if quantization == "int8":
        require_rounding("--speculative-draft-model-quantization", quantization, weight)
    return quantization == "int8" or (quantization == "auto" and has_own_kernels(weight))


def require_rounding(flag: str, asked: str, weight: Tensor) -> None:
    """Raises ValueError if weights of this one's precision cannot be rounded here, as a flag asks for."""
    if not can_round(weight):
        raise ValueError(
            f"{flag} {asked} needs an x86 CPU, numba, and float32 or bfloat16, or a GPU of compute capability 8.0 on, triton, "
            f"and bfloat16 or float16, not {weight.device.type} and {str(weight.dtype).removeprefix('torch.')}: leave it out"
        )


def resolve_dtype(config: EngineConfig, spec: ModelSpec) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if config.device == "cpu":
        # Ours read a weight in bfloat16 in half the time, and where the processor can't multiply that they widen what they read.
        has_own = takes_own_kernel(torch.empty(0, dtype=torch.bfloat16))
        pays = has_own or (has_bfloat16_products() and num_weights(spec) >= MIN_BFLOAT16_WEIGHTS)
        return torch.bfloat16 if pays else torch.float32
    return spec.dtype if spec.dtype != torch.float32 else torch.bfloat16


def is_rounded(quantization: Quantization) -> bool:
    return quantization in BITS


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, quantization: Quantization, *, of_all_experts: bool = False) -> int:
    """About how many bytes `num_weights` are."""
    whole, stored = 8 * dtype.itemsize, spec.storage.bits if spec.storage else 0
    bits = {"none": whole, "int8": 8, "int4": FOUR_BITS, "stored": stored}[quantization]
    outputs = spec.vocab_size * spec.shape.hidden_size
    layers = num_weights(spec, of_all_experts=of_all_experts) - outputs
    return (layers * bits + outputs * (8 if is_rounded(quantization) else whole)) // 8


def attention_weights(shape: LayerShape) -> int:
    size, num_heads = shape.hidden_size, shape.num_heads
    if own := shape.latent:
        of_queries = own.query_rank * (size + num_heads * own.query_dim) if own.query_rank else size * num_heads * own.query_dim
        of_heads = own.rank * (own.nope_dim + own.value_dim) + own.value_dim * size
        return of_queries + size * (own.rank + own.rope_dim) + num_heads * of_heads
    num_kept = 0 if shape.shares_rows else 2 * shape.num_kv_heads
    return size * shape.head_dim * ((2 + shape.gates_attention) * num_heads + num_kept)


def num_weights(spec: ModelSpec, *, of_all_experts: bool = False) -> int:
    """About how many weights one token of the target reads; of all experts, how many there are but for embeddings."""
    outputs, size = spec.vocab_size, spec.shape.hidden_size
    for shape, experts, delta_net in zip(spec.layer_shapes, spec.experts, spec.delta_nets, strict=True):
        if spec.layer_inputs:
            outputs += 3 * spec.layer_inputs.size
        if has_gate(experts):
            outputs += 3 * shape.intermediate_size
        if experts:
            routed = experts.count if of_all_experts else experts.mixing.top_k
            outputs += experts.count + (routed + experts.mixing.num_shared) * 3 * experts.intermediate_size
        if delta_net:
            outputs += delta_net.num_channels + 2 * delta_net.values_size + 2 * delta_net.num_heads
        else:
            outputs += attention_weights(shape) // size
    return size * outputs
