"""Tokenizer, chat template, end tokens and sampling defaults of a checkpoint, all by transformers."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")


def load_tokenizer(model_dir: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Raises ValueError if the folder holds no tokenizer that transformers can load."""
    try:
        return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types here, most of them without naming the folder
        raise ValueError(f"no tokenizer could be loaded from {model_dir}: {error}") from None


def generation_config(model_dir: Path) -> dict[str, Any]:
    """generation_config.json, or an empty dictionary."""
    file = model_dir / "generation_config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def end_token_ids(config: dict[str, Any], generation: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a reply: of generation_config.json, config.json and the tokenizer together."""
    ids: set[int] = set()
    for value in (generation.get("eos_token_id"), config.get("eos_token_id"), tokenizer.eos_token_id):
        ids |= set(value) if isinstance(value, list) else {value} if value is not None else set()
    return frozenset(ids)


def sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """The model's own sampling settings, for requests that leave them open."""
    if generation.get("do_sample") is False:
        return {}
    return {name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None}
