"""Reading a head from disk: what is in the file decides what it is."""

import re
from pathlib import Path
from typing import Any

import torch

from eagle_rt.models.decoder import Decoder
from eagle_rt.models.experts import expert_name
from eagle_rt.models.families import HYBRIDS, NEXTN, architecture_of
from eagle_rt.models.heads.assistant import ASSISTANTS, load_assistant
from eagle_rt.models.heads.base import Head
from eagle_rt.models.heads.dflash import DFlashHead
from eagle_rt.models.heads.eagle import EagleHead
from eagle_rt.models.heads.eagle3 import Eagle3Head
from eagle_rt.models.heads.spec import head_spec, mtp_spec
from eagle_rt.models.quantized import open_checkpoint
from eagle_rt.models.rearranged import RearrangedCheckpoint
from eagle_rt.models.spec import ModelSpec, read_config
from eagle_rt.models.weights import Checkpoint, tensor_files

# Published names, by regular expression, and what they are called here.
HEAD_NAMES = {
    r"^model\.": "",
    r"^midlayer\.": "layers.0.",
    r"^aux_norm_low\.": "fc_norm.0.",
    r"^aux_norm_mid\.": "fc_norm.1.",
    r"^aux_norm_high\.": "fc_norm.2.",
    r"^draft_id_to_target_id$": "d2t",
}
# MiMo's, GLM's, DeepSeek's and Qwen3.5's, behind a prefix. Those of copies of the target's embeddings and output layer become none.
MTP_NAMES = {
    r"^(token_layernorm|pre_fc_norm_embedding)\.": "enorm.",
    r"^(hidden_layernorm|pre_fc_norm_hidden)\.": "hnorm.",
    r"^(input|eh)_proj\.": "fc.",
    r"^(final_layernorm|shared_head\.norm)\.": "norm.",
    r"^(self_attn|mlp|input_layernorm|post_attention_layernorm)\.": r"layers.0.\1.",
    r"^(embed_tokens|shared_head\.head)\..*": "",
}
HEADS = {"EAGLE": EagleHead, "EAGLE3": Eagle3Head, "DFLASH": DFlashHead}


def head_name(stored: str) -> str:
    for pattern, name in HEAD_NAMES.items():
        stored = re.sub(pattern, name, stored)
    return stored


def mtp_prefix(target: ModelSpec) -> str:
    """Of the tensors of its layer for multi-token prediction, which GLM and DeepSeek count behind the others."""
    if target.architecture in HYBRIDS:
        return "mtp."
    return f"model.layers.{target.num_layers}." if target.architecture in NEXTN else "model.mtp_layers.0."


def mtp_name(stored: str, target: ModelSpec) -> str | None:
    """None for tensors that are the target's own."""
    prefix = mtp_prefix(target)
    if not stored.startswith(prefix):
        return None
    name = stored.removeprefix(prefix)
    for pattern, ours in MTP_NAMES.items():
        name = re.sub(pattern, ours, name)
    return expert_name(name) or None


def head_kind(checkpoint: Checkpoint, config: dict[str, Any]) -> str:
    """Raises ValueError if this is no head at all."""
    name = architecture_of(config)
    if "dflash_config" in config or "DFlash" in name or "DSpark" in name:
        return "DFLASH"
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
    wanted = "EAGLE" if algorithm == "NEXTN" else algorithm
    if (name := architecture_of(config)) in ASSISTANTS:
        if wanted != "EAGLE":
            raise ValueError(f"{head_dir} holds a drafter of Gemma 4's: use --speculative-algorithm EAGLE, not {algorithm}")
        return load_assistant(head_dir, config, name, target, dtype, device)
    checkpoint = Checkpoint(head_dir, dtype, device, "head", head_name)
    try:
        kind = head_kind(checkpoint, config)
        if kind != wanted:
            raise ValueError(f"{head_dir} holds a head of kind {kind}: use --speculative-algorithm {kind}, not {algorithm}")
        head = HEADS[kind](checkpoint, head_spec(config, target.spec, kind), target)
    finally:
        unused = checkpoint.finish()
    head.join_layers()
    return head, unused


def has_mtp_layer(target_dir: Path, target: ModelSpec) -> bool:
    return any(name.startswith(mtp_prefix(target)) for name in tensor_files(target_dir))


def load_mtp_head(target_dir: Path, target: Decoder, dtype: torch.dtype, device: str) -> tuple[Head, list[str]]:
    """Read the multi-token-prediction layer that a target's own checkpoint holds."""
    spec = target.spec
    checkpoint = open_checkpoint(target_dir, spec.storage, dtype, device, "MTP layer", lambda name: mtp_name(name, spec))
    try:
        head = EagleHead(RearrangedCheckpoint(checkpoint, spec), mtp_spec(spec), target)
    finally:
        unused = checkpoint.finish()
    head.join_layers()
    return head, unused
