"""What a tuning run has measured on this machine, on disk: which trees pay, what steps cost, how acceptance is to be estimated."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_rt.config import EngineConfig
from eagle_rt.engine.load import ModelInfo, head_dir, resolve_dtype
from eagle_rt.kernels.processor import processor_name
from eagle_rt.models.spec import model_spec, read_config
from eagle_rt.resolve import DTYPES
from eagle_rt.speculate.acceptance import NUM_SHARED
from eagle_rt.speculate.costs import StepCosts, costs_from_json
from eagle_rt.tree_shape import TreeShape, num_tree_nodes

FORMAT = 8
# Of each file of weights, so much tells it from others.
NUM_HASHED_BYTES = 2**20


@dataclass(frozen=True)
class Subject:
    """What a profile is about. model and head: fingerprints of their checkpoints; quantization of the model's and the head's
    weights, and attention, the backend: as they are asked for, since what steps cost depends on them."""

    model: str
    head: str
    device: str
    dtype: str
    quantization: str
    draft_quantization: str
    attention: str
    tensor_parallel_size: int


@dataclass(frozen=True)
class Profile:
    """bounds: the adaptive trees that were best; fixed: the fixed tree that was. weights: of the acceptance estimator; best: one
    entry for every batch size and temperature that was tuned for."""

    subject: Subject
    bounds: TreeShape
    fixed: TreeShape
    costs: StepCosts
    weights: list[float]
    best: list[dict[str, Any]]

    def write(self, file: Path) -> None:
        document = {
            "format": FORMAT,
            "date": date.today().isoformat(),
            "versions": {"torch": torch.__version__},
            "subject": asdict(self.subject),
            "bounds": self.bounds.numbers,
            "fixed": self.fixed.numbers,
            "best": self.best,
            "costs": self.costs.to_json(),
            "estimator": self.weights,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        unfinished.replace(file)


def subject_of(config: EngineConfig, info: ModelInfo) -> Subject:
    """`config.device` must be resolved."""
    folder = head_dir(config) or info.directory
    device = torch.cuda.get_device_name() if config.device == "cuda" else f"{processor_name()}, {torch.get_num_threads()} threads"
    dtype = resolve_dtype(config, model_spec(read_config(info.directory)))
    name = next(name for name, known in DTYPES.items() if known == dtype)
    return Subject(
        model=fingerprint(info.directory, config.lora_path or ""),
        head=fingerprint(folder, str(config.speculative_token_map)),
        device=device,
        dtype=name,
        quantization=config.quantization,
        draft_quantization=config.speculative_draft_model_quantization,
        attention=config.attention_backend,
        tensor_parallel_size=config.tensor_parallel_size,
    )


def fingerprint(folder: Path, salt: str = "") -> str:
    """Tells checkpoints apart without reading all of them."""
    digest = hashlib.sha256(salt.encode())
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(NUM_HASHED_BYTES))
    return digest.hexdigest()[:16]


def default_file(subject: Subject) -> Path:
    """Where a profile is written, and where `auto` looks for it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(repr(subject).encode()).hexdigest()[:16]
    return cache / "eagle_rt" / f"profile_{name}.json"


def read_profile(file: Path, subject: Subject) -> Profile:
    """Raises ValueError where the file is no profile, of another format, or about another model, head, device or precision."""
    remedy = f"make one with bench_speculative.py --tune --profile-output {file}"
    try:
        document = json.loads(file.read_text())
        version = document["format"]
    except FileNotFoundError:
        raise ValueError(f"--speculative-profile {file} does not exist: {remedy}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--speculative-profile {file} cannot be read ({error!r}): {remedy}") from None
    if version != FORMAT:
        raise ValueError(f"--speculative-profile {file} is of format {version}, and this is format {FORMAT}: {remedy}")
    try:
        other = Subject(**document["subject"])
        bounds, fixed = TreeShape(**document["bounds"]), TreeShape(**document["fixed"])
        for tree in (bounds, fixed):
            if not 2 <= tree.num_draft_tokens <= num_tree_nodes(tree.num_steps, tree.top_k):
                raise ValueError(f"no such tree: {tree}")
        weights = [float(weight) for weight in document["estimator"]]
        if len(weights) <= NUM_SHARED or not np.isfinite(weights).all():
            raise ValueError(f"too few weights of the estimator, or some that are no numbers: {weights}")
        profile = Profile(other, bounds, fixed, costs_from_json(document["costs"]), weights, list(document["best"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--speculative-profile {file} is damaged ({error!r}): {remedy}") from None
    for name, value in asdict(subject).items():
        if getattr(other, name) != value:
            raise ValueError(
                f"--speculative-profile {file} was made for {name} {getattr(other, name)}, and this is {value}: {remedy}"
            )
    return profile


def find_profile(config: EngineConfig, info: ModelInfo) -> tuple[Profile | None, list[str]]:
    """The profile that the config asks for, and what there is to say about it.

    Raises:
        ValueError: a file was named and cannot be used.
    """
    if config.speculative_profile is None or not config.has_head:
        return None, []
    subject = subject_of(config, info)
    file = default_file(subject) if config.speculative_profile == "auto" else Path(config.speculative_profile)
    if config.speculative_profile == "auto" and not file.exists():
        return None, [f"no profile for this model and machine at {file}: bench_speculative.py --tune makes one"]
    profile = read_profile(file, subject)
    return profile, [f"profile {file}: adaptive trees up to {profile.bounds}, fixed tree {profile.fixed}"]


def with_profile(config: EngineConfig, profile: Profile | None) -> EngineConfig:
    """The profile's tree, where the user has given no number of it."""
    numbers = (config.speculative_num_steps, config.speculative_eagle_topk, config.speculative_num_draft_tokens)
    if not profile or config.tree_rule or any(number is not None for number in numbers):
        return config
    tree = profile.bounds if config.sizes_trees else profile.fixed
    return replace(
        config,
        speculative_num_steps=tree.num_steps,
        speculative_eagle_topk=tree.top_k,
        speculative_num_draft_tokens=tree.num_draft_tokens,
    )
