"""Penalties that tables of the whole vocabulary tell of, in one kernel; the twin is `speculate.penalties.changed`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _penalize(
    logits,
    counts,
    is_seen,
    bias,
    frequency,
    presence,
    repetition,
    token_ids,
    output,
    num_rows,
    table_size,
    SIZE: tl.constexpr,
    IS_MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = row // num_rows
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    places = sequence * table_size + columns
    if IS_MAPPED:
        places = sequence * table_size + tl.load(token_ids + columns, mask=is_column, other=0)
    values = tl.load(logits + row * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    count = tl.load(counts + places, mask=is_column, other=0).to(tl.float32)
    own_repetition = tl.load(repetition + sequence)
    repeated = tl.where(values > 0, tl.div_rn(values, own_repetition), values * own_repetition)
    values = tl.where(tl.load(is_seen + places, mask=is_column, other=0) != 0, repeated, values)
    values = values - tl.load(frequency + sequence) * count
    values = values - tl.load(presence + sequence) * (count > 0).to(tl.float32)
    values = values + tl.load(bias + places, mask=is_column, other=0.0)
    tl.store(output + row * SIZE + columns, values, mask=is_column)


def penalize(
    logits: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    strengths: tuple[Tensor, Tensor, Tensor],
    token_ids: Tensor | None,
) -> Tensor:
    """[B * Q, W] float32 from the logits of Q rows of each sequence, one sequence after the other.

    tables: [B, V] counts int32, whether a text has the token bool, and biases float32; strengths: [B] frequency, presence and
    repetition; token_ids: [W] int64, of which tokens the logits are, None: of 0, 1, ...
    """
    logits = logits.contiguous()
    counts, is_seen, bias = tables
    total, size = logits.shape
    output = logits.new_empty(total, size, dtype=torch.float32)
    if total == 0:
        return output
    _penalize[(total, triton.cdiv(size, BLOCK))](
        logits,
        counts,
        is_seen.view(torch.uint8),
        bias,
        *strengths,
        counts if token_ids is None else token_ids,
        output,
        total // len(counts),
        counts.stride(0),
        SIZE=size,
        IS_MAPPED=token_ids is not None,
        BLOCK=BLOCK,
        # A product and a sum in one would be rounded otherwise than in the twin, and text depends on it.
        enable_fp_fusion=False,
    )
    return output
