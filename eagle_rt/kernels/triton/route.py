"""Which experts a token takes, in one kernel; the twin is `kernels.experts.route`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.experts import LEAST_TOTAL, Mixing
from eagle_rt.kernels.triton.common import NO_KEY, float_key, key_float, padded, take_best

LEAST = tl.constexpr(LEAST_TOTAL)


@triton.jit
def is_of_best_group(keys, ids, SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BY_TWO: tl.constexpr):
    """Of experts by how much they are wanted, see `kernels.experts.of_best_groups`."""
    group_of, best_keys = ids // SIZE, tl.full(ids.shape, NO_KEY, tl.int32)  # of group i at place i
    for group in tl.static_range(NUM_GROUPS):
        own = tl.where(group_of == group, keys, NO_KEY)
        best_key, best = take_best(own, ids)
        total = key_float(best_key)
        if BY_TWO:
            total += key_float(tl.max(tl.where(ids == best, NO_KEY, own), 0))
        best_keys = tl.where(ids == group, float_key(total), best_keys)
    is_best = ids < 0
    for _ in tl.static_range(TOP_GROUPS):
        _, best = take_best(best_keys, ids)
        best_keys = tl.where(ids == best, NO_KEY, best_keys)
        is_best = is_best | (group_of == best)
    return is_best


@triton.jit
def _route(
    logits,  # [R, COUNT], and one more if GATES_SHARED
    choice_bias,  # [COUNT] float32, read if HAS_BIAS
    shares,  # [R, TOP_K + NUM_SHARED] float32
    experts,  # [R, TOP_K + NUM_SHARED] int32
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    GATES_SHARED: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BY_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids, places = tl.arange(0, BLOCK), tl.arange(0, TOP_BLOCK)
    is_expert, row_of_logits = ids < COUNT, logits + row * (COUNT + GATES_SHARED)
    x = tl.load(row_of_logits + ids, mask=is_expert, other=0.0).to(tl.float32)
    if BY_SIGMOID:
        likely = tl.sigmoid(x)
        wanted = likely
    else:
        # By their logits, of which more differ than of their parts of all.
        highest = key_float(tl.max(tl.where(is_expert, float_key(x), NO_KEY), 0))
        likely, wanted = tl.exp(x - highest), x
    if HAS_BIAS:
        wanted += tl.load(choice_bias + ids, mask=is_expert, other=0.0)
    keys = tl.where(is_expert, float_key(wanted), NO_KEY)
    if NUM_GROUPS > 1:
        keys = tl.where(is_of_best_group(keys, ids, COUNT // NUM_GROUPS, NUM_GROUPS, TOP_GROUPS, BY_SIGMOID), keys, NO_KEY)
    # Of those that are shared, too, the places behind those that are chosen.
    counts, own_experts = tl.full([TOP_BLOCK], 1.0, tl.float32), COUNT + places - TOP_K
    for k in tl.static_range(TOP_K):
        _, best = take_best(keys, ids)
        keys = tl.where(ids == best, NO_KEY, keys)
        counts = tl.where(places == k, tl.sum(tl.where(ids == best, likely, 0.0), 0), counts)
        own_experts = tl.where(places == k, best, own_experts)
    is_chosen = places < TOP_K
    all_likely = tl.sum(tl.where(is_expert, likely, 0.0), 0)
    if NORMALIZES:
        # No row that has no numbers may get some.
        total = tl.where(all_likely == all_likely, tl.sum(tl.where(is_chosen, counts, 0.0), 0) + LEAST, all_likely)
    elif BY_SIGMOID:
        total = tl.where(all_likely == all_likely, 1.0, all_likely)
    else:
        total = all_likely
    of_shared = counts
    if GATES_SHARED:
        of_shared *= tl.sigmoid(tl.load(row_of_logits + COUNT).to(tl.float32))
    counts = tl.where(is_chosen, counts / total * SCALE, of_shared)
    is_taken = places < TOP_K + NUM_SHARED
    tl.store(shares + row * (TOP_K + NUM_SHARED) + places, counts, mask=is_taken)
    tl.store(experts + row * (TOP_K + NUM_SHARED) + places, own_experts, mask=is_taken)


def route(logits: Tensor, mixing: Mixing, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(shares float32, experts int32), both [R, num_taken], of router logits [R, experts], and a gate where `gates_shared`."""
    num_rows, count = len(logits), logits.shape[1] - mixing.gates_shared
    shares = logits.new_empty(num_rows, mixing.num_taken, dtype=torch.float32)
    experts = torch.empty_like(shares, dtype=torch.int32)
    _route[(num_rows,)](
        logits.contiguous(),
        shares if choice_bias is None else choice_bias,
        shares,
        experts,
        COUNT=count,
        TOP_K=mixing.top_k,
        NUM_SHARED=mixing.num_shared,
        GATES_SHARED=mixing.gates_shared,
        NORMALIZES=mixing.normalizes,
        BY_SIGMOID=mixing.by_sigmoid,
        HAS_BIAS=choice_bias is not None,
        SCALE=mixing.scale,
        NUM_GROUPS=mixing.num_groups,
        TOP_GROUPS=mixing.top_groups,
        BLOCK=padded(count),
        TOP_BLOCK=padded(mixing.num_taken),
    )
    return shares, experts
