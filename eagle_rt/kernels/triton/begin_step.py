"""Where a decode step writes and how long its sequences then are; the twin is `speculate.sequences.scratch_rows`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded


@triton.jit
def _begin_step(
    num_cached,  # [B] int64
    pages,  # [B, P] int32
    kv_lens,  # [NUM_SCRATCH + 1, B] int32
    slots,  # [B, NUM_SCRATCH] int64
    page_size,
    num_sequences,
    stride_sequence,
    NUM_SCRATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, BLOCK)
    is_row = rows < NUM_SCRATCH
    row = tl.load(num_cached + sequence) + rows
    tl.store(kv_lens + rows * num_sequences + sequence, row.to(tl.int32), mask=rows <= NUM_SCRATCH)
    page = tl.load(pages + sequence * stride_sequence + row // page_size, mask=is_row, other=0).to(tl.int64)
    tl.store(slots + sequence * NUM_SCRATCH + rows, page * page_size + row % page_size, mask=is_row)


def begin_step(num_cached: Tensor, pages: Tensor, page_size: int, num_scratch: int) -> tuple[Tensor, Tensor]:
    """(kv_lens [R + 1, B] int32 with 0 to R scratch rows, slots [B, R] int64 of those) of sequences with num_cached [B] rows on
    pages [B, P]."""
    batch_size, device = len(num_cached), num_cached.device
    kv_lens = torch.empty(num_scratch + 1, batch_size, dtype=torch.int32, device=device)
    slots = torch.empty(batch_size, num_scratch, dtype=torch.int64, device=device)
    _begin_step[(batch_size,)](
        num_cached.contiguous(), pages, kv_lens, slots, page_size, batch_size, pages.stride(0),
        NUM_SCRATCH=num_scratch, BLOCK=padded(num_scratch + 1), num_warps=1,
    )  # fmt: skip
    return kv_lens, slots
