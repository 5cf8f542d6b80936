"""Root-mean-square normalisation."""

import math

import torch
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32 (Zhang and Sennrich, 2019).

    With the length |x| = sqrt(sum(x^2)) this is x / hypot(|x|, sqrt(size * eps)) * (sqrt(size) * weight): four operations, where
    the formula as it stands takes eight, each of which costs a CPU as much as a small matrix product.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self.weight = weight
        self._scaled_weight = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self._floor) * self._scaled_weight).to(x.dtype)
