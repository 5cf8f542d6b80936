"""Proof that speculation changes nothing: `python -m eagle_rt.bench.lossless --model-path M --speculative-draft-model-path H`.

Greedy text is compared with transformers' `generate`, and seeded text with our own decoding without speculation, token for token,
for many trees, batch sizes and cache settings. Where two texts part, the two best tokens at that place are compared: within
`NEAR_TIE` of each other the difference is rounding and is listed; otherwise it is a failure. Of a model whose weights are rounded
to eight bits greedy text, too, is compared with our own.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from eagle_rt.bench.sweep import Setting, core_for, costs_of
from eagle_rt.bench.workload import load_workload
from eagle_rt.config import EngineConfig, add_flags, config_from_args
from eagle_rt.engine.core import run_to_end
from eagle_rt.engine.load import LoadedModels, load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.prepare import penalties_of
from eagle_rt.engine.request import Request
from eagle_rt.kernels.narrow import narrowed
from eagle_rt.kernels.noise import gumbel_noise
from eagle_rt.kernels.products import Quantization, of_output_layer
from eagle_rt.models.families import READING_PARTS
from eagle_rt.models.reading import read_texts
from eagle_rt.resolve import resolve_device, resolve_tree
from eagle_rt.speculate.costs import StepCosts
from eagle_rt.speculate.sampler import filter_tokens
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

NEAR_TIE = 1e-4
# Beside weights of four bits numbers are rounded to eight: what the attention of many rows leaves to chance, 1e-7 of a number, may
# come to a step of those.
FOUR_BIT_NEAR_TIE = 0.1
TREES = [TreeShape(1, 1, 2), TreeShape(3, 1, 4), TreeShape(5, 4, 16), TreeShape(5, 8, 32), TreeShape(8, 10, 60)]
COPIES = [TreeShape(3, 1, 4), TreeShape(23, 1, 24)]  # where no head drafts
SETTINGS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 50},
    {"min_p": 0.05},
    {"frequency_penalty": 0.2, "presence_penalty": 0.2, "repetition_penalty": 1.05},
]

Text = list[int]


@dataclass(frozen=True)
class Variant:
    """One way of running the engine."""

    tree: TreeShape
    batch_size: int
    prefix_cache: bool
    chunk_size: int
    is_adaptive: bool = False
    rule: str | None = None

    def __str__(self) -> str:
        cache = "on" if self.prefix_cache else "off"
        kind = "adaptive trees up to" if self.is_adaptive else f"trees by {self.rule} up to" if self.rule else "tree"
        return f"{kind} {self.tree}, batch {self.batch_size}, prefix cache {cache}, prompts in chunks of {self.chunk_size}"


@dataclass(frozen=True)
class Difference:
    """Where a text first leaves its reference, and how far apart the two best tokens are there."""

    variant: Variant
    prompt: int
    position: int
    gap: float
    near_tie: float = NEAR_TIE

    @property
    def is_rounding(self) -> bool:
        return self.gap <= self.near_tie


PLAIN = Variant(NO_SPECULATION, 16, True, 512)


def drafting(config: EngineConfig, trees: list[TreeShape]) -> list[Variant]:
    """Every tree, adaptive ones up to the last of them unless a class of the user's drafts, and those by a rule of the user's."""
    found = [replace(PLAIN, tree=tree) for tree in trees]
    if not config.has_own_drafter:
        found.append(replace(PLAIN, tree=trees[-1], is_adaptive=True))
    if config.tree_rule:
        found.append(replace(PLAIN, tree=resolve_tree(config, config.device)[0], rule=config.tree_rule))
    return found


def in_all_settings(variants: list[Variant]) -> list[Variant]:
    """Alone and in a batch, with the prefix cache on and off, and with prompts in small chunks."""
    settings = [(1, False, 512), (16, True, 512), (16, False, 16)]
    return [
        replace(own, batch_size=batch_size, prefix_cache=prefix_cache, chunk_size=chunk_size)
        for own in variants
        for batch_size, prefix_cache, chunk_size in settings
    ]


def parting(text: Text, other: Text) -> int:
    """Where two texts first differ: at the end of the shorter one, if that is how the longer one begins."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(text), len(other)))


@torch.inference_mode()
def gaps_where_parted(models: LoadedModels, prompts: list[Text], texts: list[Text], others: list[Text]) -> list[float]:
    """For every prompt with two different greedy replies, how far apart the target's logits of both tokens are where they part;
    infinity where one reply just ends."""
    gaps = []
    for prompt, text, other in zip(prompts, texts, others, strict=True):
        if text == other:
            continue
        place = parting(text, other)
        if place == min(len(text), len(other)):
            gaps.append(float("inf"))
            continue
        hidden = read_texts(models.target, [prompt + text[:place]], ()).hidden[-1:]
        logits = models.target.logits(hidden)[0].float()
        gaps.append(abs(float(logits[text[place]] - logits[other[place]])))
    return gaps


def generate(
    models: LoadedModels,
    config: EngineConfig,
    variant: Variant,
    prompts: list[Text],
    params: list[SamplingParams],
    costs: StepCosts | None = None,
) -> list[Text]:
    """The replies of an engine that runs as `variant` says. costs: of steps, for adaptive trees."""
    config = replace(config, disable_radix_cache=not variant.prefix_cache, chunked_prefill_size=variant.chunk_size)
    core = core_for(models, config, Setting(variant.batch_size, variant.tree, variant.is_adaptive, variant.rule), costs)
    texts = run_to_end(core, prompts, params)
    core.scheduler.check_integrity()
    return texts


def transformers_model(model_dir: Path, models: LoadedModels) -> PreTrainedModel:
    """The same model there, with the angles of texts as long as those that are served: it would choose those of each text's length
    (see `rope.longrope_frequencies`)."""
    config = AutoConfig.from_pretrained(model_dir)
    if models.spec.rope.takes_long_factors(models.context_length):
        config.rope_parameters["short_factor"] = config.rope_parameters["long_factor"]
    kind = AutoModelForImageTextToText if models.spec.architecture in READING_PARTS else AutoModelForCausalLM
    return kind.from_pretrained(model_dir, config=config, dtype=models.dtype).eval()


@torch.inference_mode()
def transformers_greedy(
    model: PreTrainedModel, prompts: list[Text], max_new_tokens: int, eos_token_ids: frozenset[int]
) -> list[Text]:
    """What transformers writes, one prompt at a time."""
    eos = sorted(eos_token_ids)
    texts = []
    for prompt in tqdm(prompts, desc="transformers", unit="prompt", leave=False):
        tokens: Any = model.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor([prompt]),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,  # which the checkpoint may want
            eos_token_id=eos,
            pad_token_id=eos[0],
        )
        texts.append(tokens[0, len(prompt) :].tolist())
    return texts


@torch.inference_mode()
def round_weights(model: PreTrainedModel, quantization: Quantization) -> None:
    """To what so few bits hold of them, so that gaps are those of the model that is served, nearly."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            narrow = narrowed(module.weight.float(), of_output_layer(quantization) if name == "lm_head" else quantization)
            if narrow:
                module.weight = torch.nn.Parameter(narrow.widened().to(module.weight.dtype), requires_grad=False)


@torch.inference_mode()
def gap_at(model: PreTrainedModel, prompt: Text, reference: Text, position: int, params: SamplingParams) -> float:
    """How far apart the two best tokens are after reference[:position], by transformers' own logits."""
    text = prompt + reference[:position]
    logits: Tensor = model(torch.tensor([text])).logits[0, -1:].float()
    request = Request("", prompt, params, seed=0)
    request.tokens += reference[:position]
    logits = penalties_of([request], "cpu").applied_to(logits)
    if params.temperature > 0:
        scaled = filter_tokens(
            logits / params.temperature,
            torch.tensor([max(params.top_k, 0)]),
            torch.tensor([params.top_p]),
            torch.tensor([params.min_p]),
        )
        assert params.seed is not None
        logits = scaled + gumbel_noise(torch.tensor([params.seed]), torch.tensor([len(text) - 1]), torch.arange(logits.shape[1]))
    best = logits[0].topk(2).values
    return float(best[0] - best[1])


def differences(
    model: PreTrainedModel,
    variant: Variant,
    prompts: list[Text],
    params: list[SamplingParams],
    references: list[Text],
    texts: list[Text],
    near_tie: float,
) -> Iterator[Difference]:
    for index, (reference, text) in enumerate(zip(references, texts, strict=True)):
        if text != reference:
            position = parting(reference, text)
            yield Difference(variant, index, position, gap_at(model, prompts[index], reference, position, params[index]), near_tie)


def check(
    models: LoadedModels, config: EngineConfig, model_dir: Path, prompts: list[Text], max_new_tokens: int, trees: list[TreeShape]
) -> tuple[int, list[Difference]]:
    """(texts compared, where they part): greedy against transformers, then seeded against no speculation."""
    model = transformers_model(model_dir, models)
    is_exact = models.quantization == "none"
    if not is_exact:
        round_weights(model, models.quantization)
    near_tie = FOUR_BIT_NEAR_TIE if models.quantization in ("int4", "stored") else NEAR_TIE
    num_compared, found = 0, []
    variants = drafting(config, trees)
    costs = None if config.has_own_drafter else costs_of(models, config, 16, trees[-1])

    greedy = [SamplingParams(temperature=0, max_new_tokens=max_new_tokens)] * len(prompts)
    if is_exact:
        references = transformers_greedy(model, prompts, max_new_tokens, models.eos_token_ids)
    else:
        references = generate(models, config, PLAIN, prompts, greedy)
    for variant in tqdm(in_all_settings([PLAIN, *variants]), desc="greedy", unit="variant"):
        texts = generate(models, config, variant, prompts, greedy, costs)
        found += differences(model, variant, prompts, greedy, references, texts, near_tie)
        num_compared += len(texts)

    for temperature in (0.6, 1.0):
        for setting in SETTINGS:
            params = [
                SamplingParams(temperature=temperature, seed=1000 + index, max_new_tokens=max_new_tokens, **setting)
                for index in range(len(prompts))
            ]
            references = generate(models, config, PLAIN, prompts, params)
            for variant in tqdm(variants, desc=f"temperature {temperature}, {setting}", unit="tree"):
                texts = generate(models, config, variant, prompts, params, costs)
                found += differences(model, variant, prompts, params, references, texts, near_tie)
                num_compared += len(texts)
    return num_compared, found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="builtin", help="builtin, a .jsonl file, or a name in --dataset-dir")
    parser.add_argument("--dataset-dir", type=Path, help="folder with prompt files")
    parser.add_argument("--num-prompts", type=int, default=40, help="at most")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt")
    add_flags(parser)
    parser.set_defaults(dtype="float32")  # in others any two ways to the same token part at near-ties
    args = parser.parse_args(arguments)
    args.speculative_algorithm = args.speculative_algorithm or "EAGLE3"
    try:
        config = resolve_device(config_from_args(args))
        info = model_info(config)
        workload = load_workload(args.dataset, args.dataset_dir, info.tokenizer, args.num_prompts)
        models = load_models(config, info)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    trees = models.fitting(TREES) if config.has_head else COPIES
    num_compared, found = check(models, config, info.directory, workload.prompts, args.max_new_tokens, trees)
    for difference in found:
        kind = "rounding" if difference.is_rounding else "DIFFERENCE"
        print(f"{kind}: {difference.variant}, prompt {difference.prompt}, token {difference.position}, gap {difference.gap:.2e}")
    num_failures = sum(not difference.is_rounding for difference in found)
    print(f"{num_compared} texts compared, {len(found) - num_failures} part at near-ties, {num_failures} differ")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
