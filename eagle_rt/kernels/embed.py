"""Token embeddings."""

from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.dispatch import triton_kernel


def embed(tokens: Tensor, embedding: Tensor) -> Tensor:
    """[T, H] the rows of embedding [V, H] that tokens [T] name."""
    if kernel := triton_kernel("embed", embedding):
        return kernel(tokens, embedding)
    return functional.embedding(tokens, embedding)
