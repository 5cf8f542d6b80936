"""The angles of rotary embeddings in one kernel instead of seven; the twin is `models.rope.Rope.cos_sin`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded, rounded


@triton.jit
def _cos_sin(positions, frequencies, scales, cos, sin, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    angles = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + columns, mask=is_column, other=0.0)
    scale = tl.load(scales + columns, mask=is_column, other=0.0)
    place = row * SIZE + columns
    tl.store(cos + place, rounded(tl.cos(angles) * scale, cos.dtype.element_ty), mask=is_column)
    tl.store(sin + place, rounded(tl.sin(angles) * scale, sin.dtype.element_ty), mask=is_column)


def cos_sin(positions: Tensor, frequencies: Tensor, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, head_dim] of positions [T] times frequencies [head_dim], times scales [head_dim], in this precision."""
    size = len(frequencies)
    cos, sin = (torch.empty(len(positions), 1, size, dtype=dtype, device=positions.device) for _ in range(2))
    _cos_sin[(len(positions),)](positions.contiguous(), frequencies, scales, cos, sin, SIZE=size, BLOCK=padded(size), num_warps=1)
    return cos, sin
