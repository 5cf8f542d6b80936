"""Root-mean-square normalisation."""

import math

import torch
from torch import Tensor

from eagle_rt.kernels import dispatch


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32 (Zhang and Sennrich, 2019).

    With the length |x| = sqrt(sum(x^2)) this is x / hypot(|x|, sqrt(size * eps)) * (sqrt(size) * weight): four operations, where
    the formula as it stands takes eight, each of which costs a CPU as much as a small matrix product.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self.weight, self.eps = weight, eps
        self._scaled_weight = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() == 2 and self._has_kernel(x):
            return self._in_one_kernel(x, None)[1]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self._floor) * self._scaled_weight).to(x.dtype)

    def after_adding(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x + delta, the norm of that) for [R, H]; delta None adds nothing."""
        if self._has_kernel(x):
            return self._in_one_kernel(x, delta)
        x = x if delta is None else x + delta
        return x, self(x)

    @staticmethod
    def _has_kernel(x: Tensor) -> bool:
        return dispatch.prefers_triton(x) or dispatch.prefers_compiled(x, x.dtype)

    def _in_one_kernel(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        # Not everywhere is triton or numba installed.
        if x.is_cuda:
            from eagle_rt.kernels.triton.add_rms_norm import add_rms_norm
        else:
            from eagle_rt.kernels.cpu.add_rms_norm import add_rms_norm

        return add_rms_norm(x, delta, self.weight, self.eps)
