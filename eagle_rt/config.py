"""Every option once: engine keywords, command-line flags and their defaults all come from the fields of `EngineConfig`."""

import argparse
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

ALGORITHMS = ("EAGLE3", "EAGLE", "DFLASH", "NEXTN", "NGRAM")
DTYPE_NAMES = ("float32", "bfloat16", "float16")

QUANTIZATIONS = ("none", "int8", "int4")
TREES = ("auto", "adaptive", "fixed")
# SGLang's names, all but the last for the marks <think> and </think>; auto: which of them the model's chat template knows, if any.
REASONING_PARSERS = ("auto", "none", "deepseek-r1", "qwen3", "qwen3-thinking", "gpt-oss")


def option(group: str, help: str, default: Any = MISSING, **flag: Any) -> Any:
    """A dataclass field that is also a flag: `names` are further flag names, the rest goes to argparse."""
    return field(default=default, metadata={"group": group, "help": help, **flag})


@dataclass(frozen=True)
class EngineConfig:
    """What a user may set; None means that the engine decides and says so at start."""

    model_path: str | None = option(
        "model",
        "Hugging Face checkpoint: a folder or a hub id. Without it, the small built-in pair is served.",
        None,
        names=["--model"],
    )
    tokenizer_path: str | None = option("model", "Tokenizer folder or hub id, if it is not with the model.", None)
    chat_template: str | None = option(
        "model",
        "File with the chat template (Jinja), where the tokenizer has none or another one is wanted; or vicuna, for Vicuna's own.",
        None,
    )
    revision: str | None = option("model", "Hub branch, tag or commit.", None)
    lora_path: str | None = option(
        "model",
        "An adapter of low rank as PEFT writes it, a folder or a hub id: it is merged into the model's weights as they are read.",
        None,
    )
    trust_remote_code: bool = option("model", "Let the tokenizer run code from its checkpoint. Only for sources you trust.", False)
    dtype: str = option(
        "model",
        "Precision of weights and cache. auto: on a GPU the checkpoint's; on a CPU bfloat16 where that is faster. "
        "Half the bytes, half the time.",
        "auto",
        choices=["auto", *DTYPE_NAMES],
    )
    quantization: str = option(
        "model",
        "int8, int4: the model's weights are rounded to eight or four bits, so that half or a third as much is read a token. "
        "Its texts may be others then. Embeddings, norms and cache stay as they are. What a checkpoint has in four bits, or on "
        "a GPU in fp8, is not rounded, and is held in them without this.",
        "none",
        choices=list(QUANTIZATIONS),
    )
    device: str = option("model", "auto takes a GPU where there is one.", "auto", choices=["auto", "cpu", "cuda"])
    context_length: int | None = option("model", "Longest prompt plus reply, in tokens. Default: the model's own.", None)

    speculative_algorithm: str | None = option(
        "speculation",
        "EAGLE3, EAGLE (1 and 2) and DFLASH draft with a head; EAGLE without one, or NEXTN, drafts with the target's own "
        "multi-token-prediction layer. NGRAM drafts what the text has said before, with no head at all. FILE.py:CLASS or "
        "MODULE:CLASS: a class of your own drafts. Unset: one token a step.",
        None,
        metavar=f"{{{','.join(ALGORITHMS)},FILE.py:CLASS}}",
    )
    speculative_draft_model_path: str | None = option(
        "speculation", "Checkpoint of the head: a folder or a hub id.", None, names=["--speculative-draft-model"]
    )
    speculative_draft_model_revision: str | None = option("speculation", "Hub branch, tag or commit of the head.", None)
    speculative_draft_model_quantization: str = option(
        "speculation",
        "int8: the head's weights are rounded to eight bits. Drafting reads half as much; the text stays the same, since the "
        "target decides on every token. auto: int8 on a CPU with kernels for it.",
        "auto",
        choices=["auto", "none", "int8"],
    )
    speculative_num_steps: int | None = option(
        "speculation",
        "Depth of the head's draft tree. Each level is one pass of the head, or all levels are, if it drafts in parallel.",
        None,
        type=int,
    )
    speculative_eagle_topk: int | None = option(
        "speculation", "Children drafted per node, and nodes expanded per level. 1 drafts a chain.", None, type=int
    )
    speculative_num_draft_tokens: int | None = option(
        "speculation",
        "Nodes that the target verifies in one pass, the root included. Nearly free on a GPU up to about 64; "
        "on a CPU each one costs.",
        None,
        type=int,
    )
    speculative_token_map: str | None = option(
        "speculation",
        "Draft only these tokens (FR-Spec): a list of target ids as .pt, .safetensors or .json, a file here or hub repo/file. An "
        "EAGLE3 head drafts those of them that are in its own vocabulary.",
        None,
    )
    speculative_aux_layers: tuple[int, ...] | None = option(
        "speculation",
        "Target layers whose input an EAGLE3 or DFLASH head is fed with, low to high, instead of what its config says.",
        None,
        type=int,
        nargs="+",
    )
    speculative_coupling: str = option(
        "speculation",
        "auto: drafts for sampled requests are ranked under the noise that the target will draw with, which accepts more and "
        "changes no token. off: by the head's probabilities alone.",
        "auto",
        choices=["auto", "off"],
    )
    speculative_ngram: str = option(
        "speculation",
        "auto: adaptive trees draft what the text has said before after the same tokens, too, beside what the head does or in its "
        "place, where that pays. off: the head alone drafts.",
        "auto",
        choices=["auto", "off"],
    )
    speculative_score_sharpness: float = option(
        "speculation",
        "Fixed trees score their nodes by the head's logits times this. 1 is EAGLE-2's score; more trusts the head's favourites "
        "more, and drafts deeper.",
        1.75,
        type=float,
    )
    speculative_tree: str = option(
        "speculation",
        "adaptive: every step drafts what is expected to pay, up to the three numbers above, or nothing; captured steps choose "
        "among a few such trees. fixed: exactly those numbers. auto: adaptive on a CPU, and where steps are captured; else fixed. "
        "A tree of your own: FILE.json, the ranks that lead to each of its nodes, or the class of a rule by which trees grow up to "
        "those numbers, FILE.py:CLASS or MODULE:CLASS. Steps are not captured then.",
        "auto",
        metavar="{auto,adaptive,fixed,FILE.json,FILE.py:CLASS}",
    )
    speculative_disable_by_batch_size: int | None = option(
        "speculation", "Draft nothing while more requests than this are decoded together.", None, type=int
    )
    speculative_profile: str | None = option(
        "speculation",
        "What a tuning run has measured here (bench_speculative.py --tune): a file, or auto, the one in the cache folder if it is "
        "there. It gives the numbers of the tree, and adaptive trees their costs and estimates, which are otherwise measured at "
        "start and learned.",
        None,
    )
    speculative_simulate_accept_length: float | None = option(
        "speculation",
        "For benchmarks only: make up what is accepted, so many tokens a step on average, to see what a head would be worth. "
        "The texts mean nothing.",
        None,
        type=float,
    )
    speculative_fit_check: str = option(
        "speculation",
        "Measure at start how often the head foresees the target's next token: warn where it does not fit, or take the feature "
        "layers that fit better (auto).",
        "warn",
        choices=["off", "warn", "auto"],
    )

    mem_fraction_static: float | None = option(
        "memory",
        "Share of the device's memory for weights and cache together. Default: 0.85 on a GPU, 0.3 on the CPU.",
        None,
        type=float,
        names=["--mem-fraction"],
    )
    max_total_tokens: int | None = option("memory", "Size of the cache in tokens, instead of a share of memory.", None, type=int)
    page_size: int = option("memory", "Cache rows per page. Larger pages share fewer prompt tokens.", 16)
    disable_radix_cache: bool = option("memory", "Do not keep the cache of finished requests for prompts that begin alike.", False)

    max_running_requests: int = option("scheduling", "Requests decoded together; further ones wait in line.", 32)
    chunked_prefill_size: int = option(
        "scheduling", "Prompt tokens processed per step. Smaller keeps replies flowing while a long prompt is read.", 512
    )
    prefill_delay: str = option(
        "scheduling",
        "on: while others decode, a prompt waits for further ones that come soon, where reading all of them in one pass gains "
        "more than waiting costs. off: prompts are read at once. auto: on for a GPU; on a CPU rows take the time, not passes.",
        "auto",
        choices=["auto", "on", "off"],
    )
    random_seed: int = option("scheduling", "Seeds of requests that bring none are drawn from this one.", 0)

    attention_backend: str = option(
        "execution",
        "torch: torch's own attention, like sequences together. numba: our kernel for CPUs, row by row. "
        "triton: our kernel for GPUs, all sequences in one launch, and captured steps. flashinfer: its fa2 kernel, planned on the "
        "host. auto: triton on a GPU, numba on a CPU where heads and precision allow it, else torch.",
        "auto",
        choices=["auto", "torch", "numba", "triton", "flashinfer"],
    )
    tensor_parallel_size: int = option(
        "execution",
        "Processes that hold the model together, each on a GPU of its own, or on its share of a CPU's cores; the head is with the "
        "first. Steps are not captured then.",
        1,
        names=["--tp-size", "--tp"],
    )
    cuda_graph_max_bs: int | None = option(
        "execution",
        "Largest batch whose steps are captured as CUDA graphs, with --attention-backend triton. Default: 32.",
        None,
        type=int,
    )
    cuda_graph_bs: tuple[int, ...] | None = option(
        "execution", "Exactly these batch sizes are captured; a batch runs in the next larger one.", None, type=int, nargs="+"
    )
    disable_cuda_graph: bool = option("execution", "Run every step eagerly.", False)
    enable_torch_compile: bool = option(
        "execution",
        "Compile the passes of target and head with torch.compile at start; later starts find them in its cache.",
        False,
    )
    torch_compile_max_bs: int | None = option(
        "execution", "Largest batch to compile for. Default: 1 on the CPU, 8 on a GPU.", None, type=int
    )
    strict: bool = option("execution", "Refuse to start, instead of going on without, where compiling or capturing fails.", False)

    def __post_init__(self) -> None:
        for name in ("page_size", "max_running_requests", "chunked_prefill_size", "tensor_parallel_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in (
            "context_length",
            "max_total_tokens",
            "torch_compile_max_bs",
            "cuda_graph_max_bs",
            "speculative_disable_by_batch_size",
        ):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")
        size, expectation = self.tensor_parallel_size, "1, since --enable-torch-compile compiles whole passes"
        require(size == 1 or not self.enable_torch_compile, "tensor_parallel_size", size, expectation)
        sharpness = self.speculative_score_sharpness
        require(sharpness > 0, "speculative_score_sharpness", sharpness, "above 0")
        smallest = min(self.cuda_graph_bs or (1,))
        require(smallest >= 1, "cuda_graph_bs", smallest, "at least 1")
        fraction = self.mem_fraction_static
        require(fraction is None or 0 < fraction < 1, "mem_fraction_static", fraction, "between 0 and 1")
        for spec in fields(self):
            choices, value = spec.metadata.get("choices"), getattr(self, spec.name)
            require(choices is None or value in choices, spec.name, value, f"one of {', '.join(choices or ())}")
        algorithm = self.speculative_algorithm
        expectation = f"one of {', '.join(ALGORITHMS)}, or FILE.py:CLASS"
        require(algorithm in (None, *ALGORITHMS) or self.has_own_drafter, "speculative_algorithm", algorithm, expectation)
        tree, expectation = self.speculative_tree, f"one of {', '.join(TREES)}, a tree's FILE.json, or a rule's FILE.py:CLASS"
        require(tree in TREES or self.tree_rule is not None, "speculative_tree", tree, expectation)
        if algorithm and not self.has_head:
            for name in ("speculative_draft_model_path", "speculative_simulate_accept_length"):
                expectation = f"left out with --speculative-algorithm {algorithm}, which drafts without a head"
                require(getattr(self, name) is None, name, getattr(self, name), expectation)
        if self.has_own_drafter:
            expectation = f"left out with --speculative-algorithm {algorithm}, which decides itself what it drafts"
            require(tree in ("auto", "fixed"), "speculative_tree", tree, expectation)
            require(self.speculative_eagle_topk in (None, 1), "speculative_eagle_topk", self.speculative_eagle_topk, expectation)
        if self.copies_alone:
            top_k, expectation = self.speculative_eagle_topk, "1 with --speculative-algorithm NGRAM: what is copied is a chain"
            require(top_k in (None, 1), "speculative_eagle_topk", top_k, expectation)
            require(tree in TREES, "speculative_tree", tree, f"{expectation}; {', '.join(TREES)} are how long it is")
            expectation = "auto with --speculative-algorithm NGRAM, which drafts nothing else"
            require(self.speculative_ngram != "off", "speculative_ngram", self.speculative_ngram, expectation)

    @property
    def drafts_with_own_layers(self) -> bool:
        """The target's own multi-token-prediction layer drafts, and no head."""
        return bool(self.speculative_algorithm in ("EAGLE", "NEXTN") and self.model_path and not self.speculative_draft_model_path)

    @property
    def copies_alone(self) -> bool:
        """What texts repeat is all that is drafted."""
        return self.speculative_algorithm == "NGRAM"

    @property
    def has_head(self) -> bool:
        """Whether a head drafts, or a layer of the target's that serves as one."""
        return self.speculative_algorithm is not None and not (self.copies_alone or self.has_own_drafter)

    @property
    def has_own_drafter(self) -> bool:
        """A class of the user's drafts."""
        return ":" in (self.speculative_algorithm or "")

    @property
    def tree_rule(self) -> str | None:
        """The file or the class that trees are made by, if it is one of the user's."""
        name = self.speculative_tree
        return name if name.endswith(".json") or ":" in name else None

    @property
    def draws_tree(self) -> bool:
        """The tree is drawn in a file, the same in every step."""
        return (self.tree_rule or "").endswith(".json")

    @property
    def sizes_trees(self) -> bool:
        """Whether trees are adaptive; the device has been decided. Made-up acceptance says nothing about what pays."""
        if not self.speculative_algorithm or self.has_own_drafter or self.speculative_simulate_accept_length is not None:
            return False
        return self.speculative_tree == "adaptive" or (
            self.speculative_tree == "auto" and (self.device == "cpu" or self.captures_steps or self.copies_alone)
        )

    @property
    def delays_prefill(self) -> bool:
        """Whether prompts may wait for each other; the device has been decided."""
        return self.prefill_delay == "on" or (self.prefill_delay == "auto" and self.device == "cuda")

    @property
    def captures_steps(self) -> bool:
        """Whether decode steps are CUDA graphs: only our own kernels take all that they need from the device, which those ask for.
        Device and attention have been decided."""
        has_own_rule = bool(self.has_head and self.tree_rule and not self.draws_tree)
        is_alone, asks_user = self.tensor_parallel_size == 1, self.has_own_drafter or has_own_rule
        has_kernels = self.device == "cuda" and self.attention_backend == "triton"
        return has_kernels and is_alone and not asks_user and not self.disable_cuda_graph


def require(condition: bool, name: str, value: object, expectation: str) -> None:
    if not condition:
        raise ValueError(f"{flag_name(name)} is {value}, but must be {expectation}")


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of `EngineConfig`, grouped as the fields are."""
    groups: dict[str, Any] = {}
    for spec in fields(EngineConfig):
        metadata = dict(spec.metadata)
        group_name = metadata.pop("group")
        group = groups.setdefault(group_name, parser.add_argument_group(group_name))
        names = [flag_name(spec.name), *metadata.pop("names", [])]
        if isinstance(spec.default, bool):
            metadata["action"] = "store_true"
        elif "type" not in metadata and "choices" not in metadata:
            metadata["type"] = int if spec.name == "context_length" or isinstance(spec.default, int) else str
        group.add_argument(*names, dest=spec.name, default=spec.default, **metadata)


def config_from_args(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(**{spec.name: getattr(args, spec.name) for spec in fields(EngineConfig)})
