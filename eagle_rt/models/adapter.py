"""Adapters of low rank (Hu et al., LoRA, 2021) as PEFT writes them, merged into a target's weights as these are read.

A weight W [out, in] becomes W + scale * B A, of `X.lora_A.weight` [r, in] and `X.lora_B.weight` [out, r]; any other tensor takes
the place of the target's of that name.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_rt.models.weights import ChangedCheckpoint, Checkpoint, Rename, open_tensor_file

FILES = ("adapter_model.safetensors", "adapter_model.bin")
LOW_RANK = r"(?P<module>.+?)(\.base_layer)?\.lora_(?P<part>[AB])(\.\w+)?\.weight"
WHOLE = r"(?P<module>.+?)(\.base_layer|\.modules_to_save(\.\w+)?)?\.(?P<kind>weight|bias)"
# What makes another sum of it.
UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "fan_in_fan_out",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "megatron_config",
)


class AdaptedCheckpoint(ChangedCheckpoint):
    """A target's tensors with what an adapter makes of them. rename: as of the target's.

    Raises:
        FileNotFoundError, ValueError: the adapter is incomplete or damaged, of a kind that is not known here, or it changes what
            the target does not have.
    """

    def __init__(self, tensors: Checkpoint, adapter_dir: Path, rename: Rename) -> None:
        super().__init__(tensors)
        self._adapter_dir = adapter_dir
        self._config = adapter_config(adapter_dir)
        self._factors: dict[str, dict[str, Tensor]] = {}
        self._whole: dict[str, Tensor] = {}
        self._scales: dict[str, float] = {}
        for stored, tensor in adapter_tensors(adapter_dir).items():
            own = stored.removeprefix("base_model.model.")
            if found := re.fullmatch(LOW_RANK, own):
                name = rename(f"{found['module']}.weight") or ""
                self._factors.setdefault(name, {})[found["part"]] = tensor
                self._scales[name] = self._scale(found["module"], tensor.shape[found["part"] == "B"])
            elif (found := re.fullmatch(WHOLE, own)) and "lora_" not in own:
                name = rename(f"{found['module']}.{found['kind']}") or ""
                self._whole[name] = tensor
            else:
                raise ValueError(f"{adapter_dir} holds {stored}: of adapters only pairs lora_A and lora_B are supported")
            if name not in tensors:
                raise ValueError(f"{adapter_dir} changes {own}, which the model does not have: it is another model's adapter")
        if single := [name for name, parts in self._factors.items() if len(parts) < 2]:
            raise ValueError(f"{adapter_dir} holds only one of lora_A and lora_B for {single[0]}: download it again")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = super().take(name, shape)
        if (own := self._whole.get(name)) is not None:
            self._check(name, own.shape, shape)
            return own.to(tensor)
        if parts := self._factors.get(name):
            a, b = parts["A"].to(tensor.device).float(), parts["B"].to(tensor.device).float()
            self._check(name, (b.shape[0], *a.shape[1:]), shape)
            # A tensor that is read again, as Gemma 4's that make keys and values, must be found as it was.
            return torch.addmm(tensor.float(), b, a, alpha=self._scales[name]).to(tensor.dtype)
        return tensor

    def _check(self, name: str, given: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if tuple(given) != shape:
            raise ValueError(f"{self._adapter_dir} changes {name} in the shape {list(given)}, but the model's is {list(shape)}")

    def _scale(self, module: str, rank: int) -> float:
        alphas = self._config.get("alpha_pattern") or {}
        alpha = next((own for key, own in alphas.items() if re.fullmatch(rf"(.*\.)?({key})", module)), self._config["lora_alpha"])
        return alpha / (rank**0.5 if self._config.get("use_rslora") else rank)


def adapter_config(adapter_dir: Path) -> dict[str, Any]:
    file = adapter_dir / "adapter_config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: {adapter_dir} is not an adapter's folder")
    config = json.loads(file.read_text())
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{adapter_dir} holds an adapter of type {kind}; only LORA is supported: merge it with PEFT")
    if odd := next((name for name in UNSUPPORTED if config.get(name)), None):
        raise ValueError(f"{adapter_dir} holds an adapter with {odd}, which is not supported: merge it with PEFT")
    return config


def adapter_tensors(adapter_dir: Path) -> dict[str, Tensor]:
    file = next((adapter_dir / name for name in FILES if (adapter_dir / name).is_file()), adapter_dir / FILES[0])
    opened = open_tensor_file(file)
    return opened if isinstance(opened, dict) else {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
