"""Running engines and their parts in tests."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_rt.config import EngineConfig
from eagle_rt.engine.build import build_core
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.load import model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.request import TokenEvent
from eagle_rt.models.decoder import Decoder, load_decoder
from eagle_rt.models.reading import read_texts
from eagle_rt.models.spec import model_spec, read_config

Tree = tuple[int, int, int]


def make_config(target_dir: Path, head_dir: Path | None = None, tree: Tree | None = None, **options: Any) -> EngineConfig:
    """In float32, so that texts can be compared; with a tree (steps, top-k, tokens) the engine drafts, with the head's weights as
    they are."""
    if tree:
        options = {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(head_dir),
            "speculative_num_steps": tree[0],
            "speculative_eagle_topk": tree[1],
            "speculative_num_draft_tokens": tree[2],
            "speculative_draft_model_quantization": "none",
            **options,
        }
    defaults = {"dtype": "float32", "max_total_tokens": 4096, "device": "cpu"}
    defaults |= {"speculative_fit_check": "off", "speculative_tree": "fixed"}
    return EngineConfig(model_path=str(target_dir), **{**defaults, **options})


def make_core(target_dir: Path, head_dir: Path | None = None, tree: Tree | None = None, **options: Any) -> EngineCore:
    config = make_config(target_dir, head_dir, tree, **options)
    return build_core(config, model_info(config))[0]


def run(core: EngineCore, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    """Submit all prompts at once and run them to their ends, checking the cache's books at every step."""
    settings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    outputs: dict[str, list[int]] = {}
    for index, (prompt, setting) in enumerate(zip(prompts, settings, strict=True)):
        outputs[f"r{index}"] = []
        core.submit(f"r{index}", prompt, setting)
    while core.has_work:
        collect(core.step(), outputs)
        core.scheduler.check_integrity()
    return list(outputs.values())


def collect(events: list[TokenEvent], outputs: dict[str, list[int]]) -> None:
    for event in events:
        outputs[event.request_id] += event.tokens


def random_prompts(count: int, seed: int = 0, longest: int = 60, vocab_size: int = 262) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(6, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def load_target(directory: Path, context_length: int = 512, dtype: torch.dtype = torch.float32) -> Decoder:
    spec = model_spec(read_config(directory))
    return load_decoder(directory, spec, context_length=context_length, dtype=dtype, device="cpu")


@torch.inference_mode()
def text_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    """[T, V] logits after every token of a text."""
    return decoder.logits(read_texts(decoder, [tokens], ()).hidden).float()
