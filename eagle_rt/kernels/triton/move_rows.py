"""Moving the cache rows of accepted nodes to where the text goes on, one program for a path and layer; twin: `KVPool.move`."""

import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded


@triton.jit
def _move(
    storage,  # [L, S, SIZE]
    slots,  # [B, num_slots] int64
    path,  # [B, length] int64
    stride_layer,
    stride_sequence,
    length,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    # A node's number is never below its depth, so what is overwritten has been moved, or is not on the path.
    for depth in range(1, length):
        node = tl.load(path + sequence * length + depth)
        if node > depth:
            source = tl.load(slots + sequence * stride_sequence + node)
            destination = tl.load(slots + sequence * stride_sequence + depth)
            row = tl.load(storage + layer * stride_layer + source * SIZE + columns, mask=is_column)
            tl.store(storage + layer * stride_layer + destination * SIZE + columns, row, mask=is_column)


def move_rows(storage: Tensor, slots: Tensor, path: Tensor) -> None:
    """In every layer of storage [L, S, ...] copy row slots[b, path[b, i]] to slots[b, i], for all i where the path goes on.

    slots: [B, R] int64, those of the tree's nodes; path: [B, D + 1], node numbers that grow from 0, and -1 past its end.
    """
    num_layers, size = storage.shape[0], storage[0, 0].numel()
    _move[(len(path), num_layers)](
        storage, slots, path.contiguous(), storage.stride(0), slots.stride(0), path.shape[1], SIZE=size, BLOCK=padded(size)
    )
