"""Which attention serves."""

import importlib.util
import os

import torch

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.attention.grouped import GroupedAttention
from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.cache.pool import RowShape


def attention_backend(name: str, device: str, dtype: torch.dtype, rows: set[RowShape]) -> AttentionBackend:
    """auto is our kernel for CPUs where it serves, and else torch's own attention; for a GPU `resolve_device` has decided.
    reference is nothing that users ask for: the slow, obvious twin of all. rows: of the caches that it is to read.

    Raises:
        ValueError: the backend cannot run here, or not with such rows.
    """
    if name == "auto" and device == "cpu" and importlib.util.find_spec("numba") and not why_not_numba(dtype, rows):
        name = "numba"
    if name == "numba":
        return numba_attention(device, dtype, rows)
    if name == "triton":
        return triton_attention(device)
    if name == "flashinfer":
        return flashinfer_attention(device, dtype, rows)
    return ReferenceAttention(dtype) if name == "reference" else GroupedAttention(dtype)


def numba_attention(device: str, dtype: torch.dtype, rows: set[RowShape]) -> AttentionBackend:
    if device != "cpu":
        raise ValueError("--attention-backend numba is for a CPU; use triton")
    if why_not := why_not_numba(dtype, rows):
        raise ValueError(f"--attention-backend numba {why_not}; use torch")
    require_package("numba")
    from eagle_rt.attention.rows import RowAttention  # not everywhere is numba installed

    return RowAttention(dtype)


def why_not_numba(dtype: torch.dtype, rows: set[RowShape]) -> str | None:
    """What keeps our kernel for CPUs from serving."""
    if dtype not in (torch.bfloat16, torch.float32):
        return f"reads bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    # Halves of a row are whole vectors: twice the kernel's LANES, which cannot be imported without numba.
    odd = sorted(dim for row in rows for dim in (row.head_dim, row.output_dim) if dim % 16)
    return f"takes heads of 16, 32, 48, ... dimensions, not {odd[0]}" if odd else None


def triton_attention(device: str) -> AttentionBackend:
    require_package("triton")
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "--attention-backend triton needs a GPU; use torch, or set TRITON_INTERPRET=1 to try the kernel, slowly, on a CPU"
        )
    from eagle_rt.attention.triton import TritonAttention  # not everywhere is triton installed

    return TritonAttention()


def flashinfer_attention(device: str, dtype: torch.dtype, rows: set[RowShape]) -> AttentionBackend:
    from eagle_rt.attention.flashinfer import HEAD_DIMS, FlashInferAttention, wrappers_on

    if device != "cuda":
        raise ValueError("--attention-backend flashinfer needs a GPU; use torch")
    if dtype == torch.float32:
        raise ValueError("--attention-backend flashinfer computes in bfloat16 or float16 only; add --dtype bfloat16, or use triton")
    if any(row.value_dim or row.scale for row in rows):
        raise ValueError(
            "--attention-backend flashinfer is not connected for latents, or scores that are scaled otherwise; use triton"
        )
    unsupported = sorted({row.head_dim for row in rows} - set(HEAD_DIMS))
    if unsupported:
        raise ValueError(f"--attention-backend flashinfer has no kernel for heads of {unsupported[0]} dimensions; use triton")
    require_package("flashinfer")
    return FlashInferAttention(wrappers_on(device))


def require_package(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        package = "flashinfer-python" if name == "flashinfer" else name
        raise ValueError(f"--attention-backend {name}: {name} is not installed here; pip install {package}, or use torch")
