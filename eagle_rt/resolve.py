"""What the options of a config come to on this machine."""

import importlib.util
from dataclasses import replace

import torch

from eagle_rt.config import DTYPE_NAMES, EngineConfig, flag_name, require
from eagle_rt.tree.paths import read_paths, shape_of, within
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape, num_tree_nodes

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
# steps, top-k, draft tokens when none is given: on two CPU cores the tree that paid on every prompt set; unmeasured on a GPU.
DEFAULT_TREE = {"cpu": (3, 2, 8), "cuda": (5, 4, 16)}
# A multi-token-prediction layer was trained for one step.
DEFAULT_MTP_TREE = (1, 1, 2)
# The largest tree of a draft that is sized by what it costs.
DEFAULT_BOUNDS = {"cpu": (6, 4, 24), "cuda": (5, 8, 32)}
# Nodes of the longest copy, the root among them, where no head drafts; and tokens of one beside a head's tree in captured steps,
# where the rows of few requests are nearly free.
DEFAULT_COPY, COPIED_BESIDE = 24, 16


def resolve_tree(config: EngineConfig, device: str) -> tuple[TreeShape, list[str]]:
    """The tree to draft, and what had to be decided or corrected for the user.

    Raises:
        ValueError: a number is out of range, or the tree cannot supply that many draft tokens.
    """
    given = (config.speculative_num_steps, config.speculative_eagle_topk, config.speculative_num_draft_tokens)
    if config.speculative_algorithm is None:
        if any(value is not None for value in given):
            raise ValueError("--speculative-num-steps, -eagle-topk and -num-draft-tokens need --speculative-algorithm")
        return NO_SPECULATION, []

    rule = config.tree_rule
    if rule and config.draws_tree:
        return static_tree(rule, given), []
    defaults = DEFAULT_BOUNDS if config.sizes_trees or rule else DEFAULT_TREE
    default = DEFAULT_MTP_TREE if config.drafts_with_own_layers else defaults[device]
    if not config.has_head:
        longest = given[2] or DEFAULT_COPY
        default = max(1, longest - 1), 1, longest
    default_steps, default_top_k, default_tokens = default
    num_steps = given[0] if given[0] is not None else default_steps
    top_k = given[1] if given[1] is not None else default_top_k
    require(num_steps >= 1, "speculative_num_steps", num_steps, "at least 1")
    require(top_k >= 1, "speculative_eagle_topk", top_k, "at least 1")
    # A rule may expand all nodes of a level, a beam top_k of them.
    supply = sum(top_k**depth for depth in range(num_steps + 1)) if rule else num_tree_nodes(num_steps, top_k)
    num_tokens = given[2] if given[2] is not None else min(default_tokens, supply) if top_k > 1 else supply
    require(num_tokens >= 2, "speculative_num_draft_tokens", num_tokens, "at least 2: the root and one draft")

    notes = []
    if top_k == 1 and num_tokens != num_steps + 1:
        notes.append(
            f"--speculative-eagle-topk 1 drafts a chain: --speculative-num-draft-tokens {num_tokens} becomes "
            f"{num_steps + 1} (steps + 1)"
        )
        num_tokens = num_steps + 1
    if num_tokens > supply:
        raise ValueError(
            f"--speculative-num-draft-tokens {num_tokens} is more than {num_steps} steps of top-k {top_k} can supply "
            f"({supply}, the root included): ask for at most {supply}, or for more steps or a larger top-k"
        )
    if not config.has_head:
        tree = TreeShape(0, 0, 1, num_copied=num_tokens - 1)
    else:
        copies_beside = config.captures_steps and config.sizes_trees and config.speculative_ngram == "auto"
        tree = TreeShape(num_steps, top_k, num_tokens, num_copied=COPIED_BESIDE if copies_beside else 0)
    if None in given:
        kind = "largest draft tree" if config.sizes_trees else "draft tree"
        notes.append(f"{kind} (steps, top-k, draft tokens): {tree}")
    return tree, notes


def static_tree(file: str, given: tuple[int | None, ...]) -> TreeShape:
    """The shape of the tree in a file; the numbers that are given may cut it."""
    paths = read_paths(file)
    whole = shape_of(paths)
    names = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"
    for name, value, most, least in zip(names, given, whole.numbers.values(), (1, 1, 2), strict=True):
        expectation = f"{least} to {most}, as in the tree {file}, or left out"
        require(value is None or least <= value <= most, name, value, expectation)
    bounds = (most if value is None else value for value, most in zip(given, whole.numbers.values(), strict=True))
    return shape_of(within(paths, TreeShape(*bounds)))


def resolve_device(config: EngineConfig) -> EngineConfig:
    """The same config with `device` decided, and on a GPU the attention.

    Raises:
        ValueError: a GPU was asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu or auto")
    device = ("cuda" if has_gpu else "cpu") if config.device == "auto" else config.device
    if device == "cuda":
        size, num_gpus = config.tensor_parallel_size, torch.cuda.device_count()
        require(size <= num_gpus, "tensor_parallel_size", size, f"at most {num_gpus}, the number of GPUs that torch sees here")
    attention = config.attention_backend
    if device == "cuda" and attention == "auto":
        can_run = importlib.util.find_spec("triton") and torch.cuda.get_device_capability() >= (8, 0)
        attention = "triton" if can_run else "torch"
    return replace(config, device=device, attention_backend=attention)


def unused_options(config: EngineConfig) -> list[str]:
    """One line for every option that is accepted but changes nothing, so that no one waits for its effect."""
    lines = []
    if config.torch_compile_max_bs is not None and not config.enable_torch_compile:
        lines.append("--torch-compile-max-bs: nothing is compiled without --enable-torch-compile")
    if not config.speculative_algorithm:
        if config.tree_rule:
            lines.append("--speculative-tree: nothing is drafted without --speculative-algorithm")
        for name in ("speculative_disable_by_batch_size", "speculative_profile"):
            if getattr(config, name) is not None:
                lines.append(f"{flag_name(name)}: nothing is drafted without --speculative-algorithm")
    elif not config.has_head:
        for name in ("speculative_token_map", "speculative_aux_layers", "speculative_profile"):
            if getattr(config, name) is not None:
                lines.append(f"{flag_name(name)}: --speculative-algorithm {config.speculative_algorithm} drafts without a head")
    elif config.tree_rule and config.speculative_profile is not None:
        lines.append(f"--speculative-profile: trees grow as --speculative-tree {config.tree_rule} says")
    elif config.sizes_trees and config.speculative_score_sharpness != EngineConfig.speculative_score_sharpness:
        lines.append("--speculative-score-sharpness: adaptive trees learn themselves how far to trust the head")
    if config.speculative_simulate_accept_length is not None and not config.speculative_algorithm:
        lines.append("--speculative-simulate-accept-length: nothing is drafted without --speculative-algorithm")
    if config.cuda_graph_max_bs is not None or config.cuda_graph_bs:
        if config.device == "cpu":
            lines.append("--cuda-graph-max-bs, --cuda-graph-bs: a CPU has no CUDA graphs")
        elif config.tensor_parallel_size > 1:
            lines.append("--cuda-graph-max-bs, --cuda-graph-bs: steps are not captured with --tensor-parallel-size")
        elif config.attention_backend != "triton":
            lines.append("--cuda-graph-max-bs, --cuda-graph-bs: CUDA graphs are captured with --attention-backend triton only")
    return lines
