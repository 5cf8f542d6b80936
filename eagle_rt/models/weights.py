"""Reading tensors from Hugging Face checkpoints: one file or many shards, safetensors or weights-only pickles."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

FILE_PATTERNS = ["*.json", "*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "tokenizer*", "*.model", "*.jinja"]
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


def checkpoint_dir(path_or_id: str, revision: str | None = None) -> Path:
    """The folder itself, or the local copy of a hub repository.

    Raises:
        FileNotFoundError: neither a folder nor a hub id that can be fetched.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path_or_id.startswith((".", "/", "~")) or path_or_id.count("/") != 1:
        raise FileNotFoundError(f"checkpoint folder {path_or_id} does not exist")
    try:
        return Path(snapshot_download(path_or_id, revision=revision, allow_patterns=FILE_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise FileNotFoundError(f"{path_or_id} is neither a folder here nor a hub id that can be fetched: {reason}") from None


Rename = Callable[[str], str | None]


class Checkpoint:
    """The tensors of one checkpoint, taken by name; each is read from disk when it is taken.

    `rename` turns a stored name into the one that it is taken by, or into None for tensors that are none of the reader's concern.

    Raises (from any method):
        FileNotFoundError: a file that should hold tensors is missing.
        ValueError: a file is damaged, or a tensor is missing or of another shape than asked for.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: str, description: str, rename: Rename = str) -> None:
        self.model_dir = model_dir
        self._dtype, self.device = dtype, device
        self._file_of: dict[str, Path] = {}
        self._stored_name: dict[str, str] = {}
        for stored, file in tensor_files(model_dir).items():
            name = rename(stored)
            if name is None:
                continue
            if name in self._stored_name:
                raise ValueError(f"{model_dir} holds both {self._stored_name[name]} and {stored}, which mean the same tensor")
            self._file_of[name], self._stored_name[name] = file, stored
        self._open_files: dict[Path, dict[str, Tensor] | safe_open] = {}
        self._untaken = set(self._file_of)
        self._progress = tqdm(total=len(self._file_of), desc=f"loading {description}", unit="tensor", leave=False, disable=None)

    @property
    def names(self) -> list[str]:
        """As they are stored."""
        return list(self._stored_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor in the model's precision on the model's device."""
        return self._as_served(name, self.take_raw(name, shape))

    def take_vector(self, name: str, size: int) -> Tensor:
        """`take` of [size], whatever dimensions of 1 it is stored with besides."""
        return self._as_served(name, self._checked(name, self._read(name).flatten(), (size,)))

    def _as_served(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.itemsize == 1:
            raise ValueError(
                f"tensor {self._stored_name[name]} in {self._file_of[name]} is stored as {tensor.dtype}, and config.json does not "
                "say with which scales: use a checkpoint in bfloat16, float16 or float32"
            )
        return tensor.to(device=self.device, dtype=self._dtype)

    def take_optional(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return self.take(name, shape) if name in self else None

    def take_raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor as it is stored: for index tables."""
        if name not in self._file_of:
            raise ValueError(f"tensor {name} is missing from the checkpoint in {self.model_dir}")
        return self._checked(name, self._read(name), shape)

    def _checked(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(tensor.shape) != shape:
            stored = self._stored_name[name]
            raise ValueError(
                f"tensor {stored} in {self._file_of[name]} has shape {list(tensor.shape)}, but config.json implies {list(shape)}"
            )
        self._untaken.discard(name)
        self._progress.update()
        return tensor

    def _read(self, name: str) -> Tensor:
        file, stored = self._file_of[name], self._stored_name[name]
        opened = self._open(file)
        try:
            return opened[stored] if isinstance(opened, dict) else opened.get_tensor(stored)
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{file} is damaged or only partly downloaded ({error})") from None

    def skip(self, name: str) -> None:
        """Count a tensor that may be there as known, without reading it."""
        self._untaken.discard(name)

    def finish(self) -> list[str]:
        """Close the files; the names that nobody took."""
        self._progress.close()
        self._open_files.clear()
        return sorted(self._stored_name[name] for name in self._untaken)

    def _open(self, file: Path) -> "dict[str, Tensor] | safe_open":
        if file not in self._open_files:
            self._open_files[file] = open_tensor_file(file)
        return self._open_files[file]


class ChangedCheckpoint(Checkpoint):
    """Another one's tensors, which are changed as they are taken."""

    def __init__(self, tensors: Checkpoint) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def model_dir(self) -> Path:
        return self._tensors.model_dir

    @property
    def device(self) -> str:
        return self._tensors.device

    def skip(self, name: str) -> None:
        self._tensors.skip(name)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._tensors.take(name, shape)

    def take_raw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._tensors.take_raw(name, shape)


class MemoryCheckpoint(Checkpoint):
    """Tensors that are made, not read. Each is let go of when it is taken, and the rest when the reader has finished."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: str, description: str) -> None:
        self.model_dir, self._dtype, self.device = Path(description), dtype, device
        self._tensors = {name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype) for name, tensor in tensors}
        self._stored_name = {name: name for name in self._tensors}
        self._file_of = dict.fromkeys(self._tensors, self.model_dir)
        self._open_files, self._untaken = {}, set(self._tensors)
        self._progress = tqdm(total=len(self._tensors), desc=f"placing {description}", unit="tensor", leave=False, disable=None)

    def _read(self, name: str) -> Tensor:
        return self._tensors.pop(name)

    def finish(self) -> list[str]:
        self._tensors.clear()
        return super().finish()


def open_tensor_file(file: Path) -> "dict[str, Tensor] | safe_open":
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: the checkpoint is only partly downloaded")
    try:
        if file.suffix == ".safetensors":
            return safe_open(file, framework="pt")
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (SafetensorError, RuntimeError, OSError, EOFError) as error:
        raise ValueError(f"{file} is damaged or only partly downloaded ({error})") from None
    except Exception as error:  # torch raises pickle errors of several types for files that want to run code
        raise ValueError(f"{file} is not a plain file of tensors ({type(error).__name__}); it was not loaded") from None


def tensor_files(model_dir: Path) -> dict[str, Path]:
    """Which file holds each tensor of a checkpoint folder."""
    for single in SINGLE_FILES:
        index_file = model_dir / f"{single}.index.json"
        if index_file.is_file():
            weight_map = json.loads(index_file.read_text())["weight_map"]
            missing = sorted({name for name in weight_map.values() if not (model_dir / name).is_file()})
            if missing:
                raise FileNotFoundError(f"{model_dir / missing[0]} is missing: the checkpoint is only partly downloaded")
            return {name: model_dir / file for name, file in weight_map.items()}
        file = model_dir / single
        if file.is_file():
            return dict.fromkeys(open_tensor_file(file).keys(), file)
    raise FileNotFoundError(f"{model_dir} holds neither {' nor '.join(SINGLE_FILES)} (nor an index of shards)")
