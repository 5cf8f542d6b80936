"""Token embeddings."""

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.dispatch import triton_kernel


def embed(tokens: Tensor, embedding: Tensor, scale: float = 1.0) -> Tensor:
    """[T, H] the rows of embedding [V, H] that tokens [T] name, multiplied with the scale."""
    kernel = triton_kernel("embed", embedding)
    rows = kernel(tokens, embedding) if kernel else functional.embedding(tokens, embedding)
    return rows if scale == 1 else rows * scale


def rounded_scale(scale: float, dtype: torch.dtype) -> float:
    """As numbers of a model of this precision are."""
    return torch.tensor(scale, dtype=dtype).item()
