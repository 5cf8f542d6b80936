"""Norms and rotation of what latents are made of, and their writing to the cache, in one kernel.

The twins are `normed_queries` and `latent_rows` of `kernels/latents.py`, and `KVPool.write`.
"""

import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.rms_norm import RMSNorm
from eagle_rt.kernels.triton.add_rms_norm import norm_into
from eagle_rt.kernels.triton.common import padded, rounded
from eagle_rt.kernels.triton.rotate_and_write import turned


@triton.jit
def write_turned(row, cos, sin, place, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """The pairs (i, i + HALF) of a row; cos, sin: [2 * HALF], of which the second halves are read."""
    pairs = tl.arange(0, BLOCK)
    is_pair = pairs < HALF
    first = tl.load(row + pairs, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(row + HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    c = tl.load(cos + HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    s = tl.load(sin + HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    first, second = turned(first, second, c, s)
    tl.store(place + pairs, rounded(first, place.dtype.element_ty), mask=is_pair)
    tl.store(place + HALF + pairs, rounded(second, place.dtype.element_ty), mask=is_pair)


@triton.jit
def _write_latents(
    inputs,  # [T, NUM_QUERIES + RANK + 2 * HALF]
    query_weight,  # [NUM_QUERIES]
    weight,  # [RANK]
    cos,  # [T, 2 * HALF]
    sin,  # [T, 2 * HALF]
    slots,  # [T] int64
    queries,  # [T, NUM_QUERIES]
    storage,  # [S, RANK + 2 * HALF]
    eps,
    NUM_QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = inputs + token * (NUM_QUERIES + RANK + 2 * HALF)
    if tl.program_id(1) == 1:
        norm_into(row, query_weight, eps, queries + token * NUM_QUERIES, NUM_QUERIES, QUERY_BLOCK)
    else:
        latents, angle = row + NUM_QUERIES, token * 2 * HALF
        place = storage + tl.load(slots + token) * (RANK + 2 * HALF)
        norm_into(latents, weight, eps, place, RANK, RANK_BLOCK)
        write_turned(latents + RANK, cos + angle, sin + angle, place + RANK, HALF, HALF_BLOCK)


def write_latents(
    inputs: Tensor, query_norm: RMSNorm | None, norm: RMSNorm, cos: Tensor, sin: Tensor, storage: Tensor, slots: Tensor
) -> Tensor:
    """The first numbers [T, Q] of inputs [T, Q + rank + rope_dim], normed where they have a norm; the others go to the cache.

    cos, sin: [T, 1, rope_dim], with the first half of `sin` negated, which is not read; storage: one layer of the cache, [S, 1, 1,
    rank + rope_dim]; slots: [T].
    """
    inputs, rank, half = inputs.contiguous(), len(norm.weight), cos.shape[-1] // 2
    num_queries = inputs.shape[1] - storage.shape[3]
    queries = inputs.new_empty(len(inputs), num_queries) if query_norm else inputs
    _write_latents[(len(inputs), 2 if query_norm else 1)](
        inputs, query_norm.weight if query_norm else norm.weight, norm.weight, cos.contiguous(), sin.contiguous(), slots, queries,
        storage, norm.eps, NUM_QUERIES=num_queries, RANK=rank, HALF=half, QUERY_BLOCK=padded(num_queries if query_norm else 1),
        RANK_BLOCK=padded(rank), HALF_BLOCK=padded(half), num_warps=2,
    )  # fmt: skip
    return queries if query_norm else inputs[:, :num_queries]
