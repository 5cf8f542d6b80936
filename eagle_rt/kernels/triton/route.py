"""Which experts a token takes, in one kernel; the twin is `kernels.experts.route`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import NO_KEY, float_key, key_float, padded, take_best


@triton.jit
def _route(
    logits,  # [R, COUNT]
    shares,  # [R, TOP_K] float32
    experts,  # [R, TOP_K] int32
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids, places = tl.arange(0, BLOCK), tl.arange(0, TOP_BLOCK)
    is_expert = ids < COUNT
    x = tl.load(logits + row * COUNT + ids, mask=is_expert, other=0.0).to(tl.float32)
    keys = tl.where(is_expert, float_key(x), NO_KEY)
    highest = key_float(tl.max(keys, 0))
    total = tl.sum(tl.where(is_expert, tl.exp(x - highest), 0.0), 0)
    powers, own_experts = tl.zeros([TOP_BLOCK], tl.float32), tl.zeros([TOP_BLOCK], tl.int32)
    for k in tl.static_range(TOP_K):
        key, best = take_best(keys, ids)
        keys = tl.where(ids == best, NO_KEY, keys)
        powers = tl.where(places == k, tl.exp(key_float(key) - highest), powers)
        own_experts = tl.where(places == k, best, own_experts)
    if NORMALIZES:
        total = tl.where(total == total, tl.sum(powers, 0), total)  # no row that has no numbers may get some
    is_wanted = places < TOP_K
    tl.store(shares + row * TOP_K + places, powers / total, mask=is_wanted)
    tl.store(experts + row * TOP_K + places, own_experts, mask=is_wanted)


def route(logits: Tensor, top_k: int, normalizes: bool) -> tuple[Tensor, Tensor]:
    """(shares [R, top_k] float32, experts [R, top_k] int32) of router logits [R, experts]."""
    num_rows, count = logits.shape
    shares = logits.new_empty(num_rows, top_k, dtype=torch.float32)
    experts = logits.new_empty(num_rows, top_k, dtype=torch.int32)
    _route[(num_rows,)](
        logits.contiguous(),
        shares,
        experts,
        COUNT=count,
        TOP_K=top_k,
        NORMALIZES=normalizes,
        BLOCK=padded(count),
        TOP_BLOCK=padded(top_k),
    )
    return shares, experts
