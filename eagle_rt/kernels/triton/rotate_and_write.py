"""Query and key norm, rotary embedding and the write to the cache in one kernel.

The twin is what `models/layers.py` does in four operators: `HeadNorms`, `kernels/rotary.py`, `KVPool.write`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.rms_norm import HeadNorms
from eagle_rt.kernels.triton.common import padded, rounded


@triton.jit
def turned(first, second, cos, sin):
    """The halves of heads, turned by their positions' angles."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def normed(first, second, weight, eps, is_pair, HALF: tl.constexpr):
    """The halves of a head, over the length of both."""
    scale = 1.0 / tl.sqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
    first *= scale * tl.load(weight, mask=is_pair, other=0.0).to(tl.float32)
    return first, second * scale * tl.load(weight + HALF, mask=is_pair, other=0.0).to(tl.float32)


@triton.jit
def _rotate_and_write(
    qkv,  # [T, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]
    cos,  # [T, 2 * HALF]
    sin,  # [T, 2 * HALF]
    query_weight,  # [2 * HALF]
    key_weight,  # [2 * HALF]
    value_weight,  # [2 * HALF], read if NORMS_VALUES
    slots,  # [T] int64
    queries,  # [T, NUM_HEADS, 2 * HALF]
    storage,  # [S, 2, NUM_KV_HEADS, 2 * HALF]
    stride_slot,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_FOLLOWS: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, BLOCK)
    is_pair = pairs < HALF
    dtype: tl.constexpr = queries.dtype.element_ty
    place = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * 2 * HALF + pairs
    first = tl.load(place, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=is_pair, other=0.0).to(tl.float32)
    is_query = head < NUM_HEADS
    if head < NUM_HEADS + NUM_KV_HEADS:
        weight = (query_weight if is_query else key_weight) + pairs
        if HAS_NORM and not NORM_FOLLOWS:
            first, second = normed(first, second, weight, eps, is_pair, HALF)
            first, second = rounded(first, dtype).to(tl.float32), rounded(second, dtype).to(tl.float32)
        angle = token * 2 * HALF + HALF + pairs
        c = tl.load(cos + angle, mask=is_pair, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=is_pair, other=0.0).to(tl.float32)
        first, second = turned(first, second, c, s)
        if HAS_NORM and NORM_FOLLOWS:
            first, second = rounded(first, dtype).to(tl.float32), rounded(second, dtype).to(tl.float32)
            first, second = normed(first, second, weight, eps, is_pair, HALF)
    elif NORMS_VALUES:
        first, second = normed(first, second, value_weight + pairs, eps, is_pair, HALF)
    if is_query:
        target = queries + (token * NUM_HEADS + head) * 2 * HALF + pairs
    else:
        slot = tl.load(slots + token)
        target = storage + slot * stride_slot + (head - NUM_HEADS) * 2 * HALF + pairs
    tl.store(target, rounded(first, dtype), mask=is_pair)
    tl.store(target + HALF, rounded(second, dtype), mask=is_pair)


def rotate_and_write(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    storage: Tensor,
    slots: Tensor,
) -> Tensor:
    """The turned queries [T, heads, head_dim] of qkv [T, heads + 2 * kv heads, head_dim]; keys and values go to the cache.

    cos, sin: [T, 1, head_dim], with the first half of `sin` negated, which is not read; storage: one layer of the cache, [S, 2, kv
    heads, head_dim]; slots: [T].
    """
    qkv = qkv.contiguous()
    num_tokens, num_all, head_dim = qkv.shape
    queries = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    of_queries, of_keys, of_values, *_ = (*(norms.weights if norms else ()), cos, cos, cos)
    _rotate_and_write[(num_tokens, num_all)](
        qkv, cos.contiguous(), sin.contiguous(), of_queries, of_keys, of_values, slots, queries, storage, storage.stride(0),
        norms.eps if norms else 0.0,
        NUM_HEADS=num_heads, NUM_KV_HEADS=storage.shape[2], HALF=head_dim // 2, BLOCK=padded(head_dim // 2),
        HAS_NORM=norms is not None, NORM_FOLLOWS=norms is not None and norms.follow_turning,
        NORMS_VALUES=norms is not None and norms.values is not None, num_warps=1,
    )  # fmt: skip
    return queries
