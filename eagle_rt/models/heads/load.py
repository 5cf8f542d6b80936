"""Reading a head from disk: what is in the file decides what it is."""

import re
from pathlib import Path

import torch

from eagle_rt.models.decoder import Decoder
from eagle_rt.models.heads.base import Head
from eagle_rt.models.heads.eagle import EagleHead
from eagle_rt.models.heads.eagle3 import Eagle3Head
from eagle_rt.models.heads.spec import head_spec, mtp_spec
from eagle_rt.models.quantized import open_checkpoint
from eagle_rt.models.spec import read_config
from eagle_rt.models.weights import Checkpoint, tensor_files

MTP_PREFIX = "model.mtp_layers.0."
# Published names, by regular expression, and what they are called here.
HEAD_NAMES = {
    r"^model\.": "",
    r"^midlayer\.": "layers.0.",
    r"^aux_norm_low\.": "fc_norm.0.",
    r"^aux_norm_mid\.": "fc_norm.1.",
    r"^aux_norm_high\.": "fc_norm.2.",
    r"^draft_id_to_target_id$": "d2t",
}
MTP_NAMES = {
    r"^token_layernorm\.": "enorm.",
    r"^hidden_layernorm\.": "hnorm.",
    r"^input_proj\.": "fc.",
    r"^final_layernorm\.": "norm.",
    r"^(self_attn|mlp|input_layernorm|post_attention_layernorm)\.": r"layers.0.\1.",
}


def head_name(stored: str) -> str:
    for pattern, name in HEAD_NAMES.items():
        stored = re.sub(pattern, name, stored)
    return stored


def mtp_name(stored: str) -> str | None:
    """None for tensors that are the target's own."""
    if not stored.startswith(MTP_PREFIX):
        return None
    name = stored.removeprefix(MTP_PREFIX)
    for pattern, ours in MTP_NAMES.items():
        name = re.sub(pattern, ours, name)
    return name


def head_kind(checkpoint: Checkpoint) -> str:
    """Raises ValueError if this is no head at all."""
    if "layers.0.hidden_norm.weight" in checkpoint:
        return "EAGLE3"
    if "fc.weight" in checkpoint:
        return "EAGLE"
    raise ValueError(
        f"{checkpoint.model_dir} holds no EAGLE head: it has neither fc.weight nor midlayer.hidden_norm.weight, but "
        f"{', '.join(checkpoint.names[:3])} ..."
    )


def load_head(head_dir: Path, target: Decoder, algorithm: str, dtype: torch.dtype, device: str) -> tuple[Head, list[str]]:
    """Read a head from a folder of its own; also returns the names of tensors that were not used.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is incomplete or damaged, does not fit its target, or is a head of another
            kind than `algorithm` says.
    """
    config = read_config(head_dir)
    checkpoint = Checkpoint(head_dir, dtype, device, "head", head_name)
    try:
        kind = head_kind(checkpoint)
        wanted = "EAGLE" if algorithm == "NEXTN" else algorithm
        if kind != wanted:
            raise ValueError(f"{head_dir} holds an {kind} head: use --speculative-algorithm {kind}, not {algorithm}")
        head_class = Eagle3Head if kind == "EAGLE3" else EagleHead
        head = head_class(checkpoint, head_spec(config, target.spec, kind), target)
    finally:
        unused = checkpoint.finish()
    head.join_layers()
    return head, unused


def has_mtp_layer(target_dir: Path) -> bool:
    return any(name.startswith(MTP_PREFIX) for name in tensor_files(target_dir))


def load_mtp_head(target_dir: Path, target: Decoder, dtype: torch.dtype, device: str) -> tuple[Head, list[str]]:
    """Read the multi-token-prediction layer that a target's own checkpoint holds."""
    checkpoint = open_checkpoint(target_dir, target.spec.storage, dtype, device, "MTP layer", mtp_name)
    try:
        head = EagleHead(checkpoint, mtp_spec(target.spec), target)
    finally:
        unused = checkpoint.finish()
    head.join_layers()
    return head, unused
