"""Rows of an embedding; the twin is `torch.nn.functional.embedding`, whose kernel takes three times as long for a few rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded


@triton.jit
def _embed(tokens, embedding, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    token = tl.load(tokens + row)
    tl.store(output + row * SIZE + columns, tl.load(embedding + token * SIZE + columns, mask=is_column), mask=is_column)


def embed(tokens: Tensor, embedding: Tensor) -> Tensor:
    """[T, H] the rows of embedding [V, H] that tokens [T] int64 name."""
    num_rows, size = len(tokens), embedding.shape[1]
    output = torch.empty(num_rows, size, dtype=embedding.dtype, device=embedding.device)
    block = min(1024, padded(size))
    _embed[(num_rows, triton.cdiv(size, block))](tokens.contiguous(), embedding, output, SIZE=size, BLOCK=block)
    return output
