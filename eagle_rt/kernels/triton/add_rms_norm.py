"""Residual addition and root-mean-square norm in one pass over a row; the twin is `kernels/rms_norm.py` after an addition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded, rounded


@triton.jit
def norm_of(values, weights, eps, SIZE: tl.constexpr):
    """Of a row of SIZE float32 values, with zeros past them."""
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / SIZE + eps)
    return values * scale * weights


@triton.jit
def norm_into(x, weight, eps, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Of SIZE numbers, at their places."""
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    values = tl.load(x + columns, mask=is_column, other=0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(output + columns, rounded(norm_of(values, weights, eps, SIZE), output.dtype.element_ty), mask=is_column)


@triton.jit
def _add_rms_norm(x, delta, weight, total, normed, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    values = tl.load(x + row * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(delta + row * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
        total_values = rounded(values, total.dtype.element_ty)
        tl.store(total + row * SIZE + columns, total_values, mask=is_column)
        values = total_values.to(tl.float32)
    tl.store(normed + row * SIZE + columns, rounded(norm_of(values, weights, eps, SIZE), normed.dtype.element_ty), mask=is_column)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, the norm of that) for x and delta [R, H]; without delta (x, its norm)."""
    x = x.contiguous()
    delta = None if delta is None else delta.contiguous()
    total, normed = (x if delta is None else torch.empty_like(x)), torch.empty_like(x)
    num_rows, size = x.shape
    block = padded(size)
    _add_rms_norm[(num_rows,)](
        x, x if delta is None else delta, weight, total, normed, eps, SIZE=size, BLOCK=block, ADDS=delta is not None,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return total, normed
