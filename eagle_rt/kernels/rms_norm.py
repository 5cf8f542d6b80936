"""Root-mean-square normalisation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_rt.kernels.dispatch import kernel_for


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32 (Zhang and Sennrich, 2019).

    With the length |x| = sqrt(sum(x^2)) this is x / hypot(|x|, sqrt(size * eps)) * (sqrt(size) * weight): four operations, where
    the formula as it stands takes eight, each of which costs a CPU as much as a small matrix product. weight: [size], or for x of
    more axes what fits the last of them.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self._scaled_weight = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() == 2 and (kernel := kernel_for("add_rms_norm", x)):
            return kernel(x, None, self.weight, self.eps)[1]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self._floor) * self._scaled_weight).to(x.dtype)

    def after_adding(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x + delta, the norm of that) for [R, H]; delta None adds nothing."""
        if kernel := kernel_for("add_rms_norm", x):
            return kernel(x, delta, self.weight, self.eps)
        x = x if delta is None else x + delta
        return x, self(x)


@dataclass(frozen=True)
class HeadNorms:
    """Those of queries and of keys, and of values if these are normed, with one eps, over the numbers of a head. follow_turning:
    whether what has been turned is normed, as in Hunyuan; elsewhere what has been normed is turned."""

    queries: RMSNorm
    keys: RMSNorm
    follow_turning: bool = False
    values: RMSNorm | None = None

    @property
    def eps(self) -> float:
        return self.queries.eps

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Of queries, of keys, and of values if these are normed."""
        return tuple(norm.weight for norm in (self.queries, self.keys, self.values) if norm)

    def __call__(self, heads: Tensor, num_queries: int) -> Tensor:
        """Of heads [T, N, head_dim], of which the first are queries and the others keys."""
        return torch.cat((self.queries(heads[:, :num_queries]), self.keys(heads[:, num_queries:])), dim=1)


@dataclass(frozen=True)
class AllHeadNorms:
    """That of all queries of a row together, and that of its keys."""

    queries: RMSNorm
    keys: RMSNorm

    def __call__(self, qkv: Tensor) -> Tensor:
        """Of queries, keys and values side by side: [T, queries + 2 * keys]."""
        num_queries, num_keys = len(self.queries.weight), len(self.keys.weight)
        queries, keys, values = qkv.split((num_queries, num_keys, num_keys), dim=1)
        return torch.cat((self.queries(queries.contiguous()), self.keys(keys.contiguous()), values), dim=1)


def norms_side_by_side(x: Tensor, x_norm: RMSNorm, y: Tensor, y_norm: RMSNorm) -> Tensor:
    """[R, H + J] the norms of x [R, H] and of y [R, J]."""
    if kernel := kernel_for("norms_side_by_side", x):
        return kernel(x, x_norm.weight, x_norm.eps, y, y_norm.weight, y_norm.eps)
    return torch.cat((x_norm(x), y_norm(y)), dim=-1)
