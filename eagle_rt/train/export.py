"""Between a trainable head and a checkpoint in the published layout, which SGLang and vLLM load too."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def export_head(config: dict[str, Any], weights: dict[str, Tensor], output_dir: Path, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors. `weights` are a trainee's state; its `draft_tokens` become `d2t` and `t2d`."""
    tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items() if name != "draft_tokens"}
    if "draft_tokens" in weights:
        draft_tokens = weights["draft_tokens"].cpu()
        is_used = torch.zeros(config["vocab_size"], dtype=torch.bool)
        is_used[draft_tokens] = True
        tensors["d2t"] = draft_tokens - torch.arange(len(draft_tokens))
        tensors["t2d"] = is_used
    output_dir.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output_dir / "model.safetensors", metadata={"format": "pt"})
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    (output_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def exported_weights(head_dir: Path) -> dict[str, Tensor]:
    """What `export_head` wrote, as the weights of a trainee.

    Raises:
        FileNotFoundError: there is no model.safetensors in the folder.
    """
    file = head_dir / "model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: --start-from takes a head that `export` wrote")
    weights = load_file(file)
    weights.pop("t2d", None)
    if "d2t" in weights:
        offsets = weights.pop("d2t")
        weights["draft_tokens"] = torch.arange(len(offsets)) + offsets
    return weights
