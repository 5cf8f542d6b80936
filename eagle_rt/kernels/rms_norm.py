"""Root-mean-square normalisation."""

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, the mean in float32 (Zhang and Sennrich, 2019)."""
    return functional.rms_norm(x, weight.shape, weight, eps)
