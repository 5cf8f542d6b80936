"""Which attention serves."""

import importlib.util
import os

import torch

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.attention.reference import ReferenceAttention


def attention_backend(name: str, device: str, dtype: torch.dtype) -> AttentionBackend:
    """auto is torch's own attention: the Triton kernel has not been measured on a GPU yet.

    Raises:
        ValueError: the backend cannot run here.
    """
    if name != "triton":
        return ReferenceAttention(dtype)
    if importlib.util.find_spec("triton") is None:
        raise ValueError("--attention-backend triton: triton is not installed here; pip install triton, or use torch")
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "--attention-backend triton needs a GPU; use torch, or set TRITON_INTERPRET=1 to try the kernel, slowly, on a CPU"
        )
    from eagle_rt.attention.triton import TritonAttention  # not everywhere is triton installed

    return TritonAttention()
