"""Reading a reduced draft vocabulary (FR-Spec) from a file: the target ids that are worth drafting, most frequent first."""

import json
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle_rt.token_map.token_map import check_target_ids


def load_token_map(path_or_id: str, target_vocab_size: int) -> Tensor:
    """[R] int64 target ids from a .pt list or tensor, a .safetensors file of one tensor, or a .json list.

    Raises:
        FileNotFoundError: neither a file nor `owner/repository/file` on the hub.
        ValueError: the file is no list of distinct ids below target_vocab_size.
    """
    file = find_file(path_or_id)
    values = read_values(file)
    try:
        ids = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(0)
    if ids.dim() != 1 or len(ids) == 0 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{file} is no token map: it should hold one list of token ids")
    check_target_ids(ids.to(torch.int64), target_vocab_size, str(file))
    return ids.to(torch.int64)


def find_file(path_or_id: str) -> Path:
    path = Path(path_or_id).expanduser()
    if path.is_file():
        return path
    parts = path_or_id.split("/")
    if path_or_id.startswith((".", "/", "~")) or len(parts) < 3:
        raise FileNotFoundError(f"token map {path_or_id} does not exist; give a file, or owner/repository/file on the hub")
    try:
        return Path(hf_hub_download("/".join(parts[:2]), "/".join(parts[2:])))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise FileNotFoundError(f"token map {path_or_id} is neither a file here nor can it be fetched: {reason}") from None


def read_values(file: Path) -> object:
    try:
        if file.suffix == ".json":
            return json.loads(file.read_text())
        if file.suffix == ".safetensors":
            tensors = list(load_file(file).values())
            return tensors[0] if len(tensors) == 1 else None
        return torch.load(file, map_location="cpu", weights_only=True)
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"{file} is damaged or no token map ({error})") from None
    except Exception as error:  # torch raises pickle errors of several types for files that want to run code
        raise ValueError(f"{file} is not a plain file of token ids ({type(error).__name__}); it was not loaded") from None


def with_tokens(ids: Tensor, needed: frozenset[int]) -> Tensor:
    """The ids and, after them, those of `needed` that are missing: without its end tokens a head cannot foresee an end."""
    missing = sorted(needed - set(ids.tolist()))
    return torch.cat((ids, torch.tensor(missing, dtype=torch.int64)))
