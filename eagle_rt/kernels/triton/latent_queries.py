"""Queries over latents in one kernel; the twin is `kernels.latents.latent_queries`."""

import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded
from eagle_rt.kernels.triton.write_latents import write_turned


@triton.jit
def _latent_queries(
    led,  # [T, heads, RANK]
    queries,  # [T, heads, ...], whose last 2 * HALF numbers are turned
    cos,  # [T, 2 * HALF]
    sin,  # [T, 2 * HALF]
    outputs,  # [T, heads, RANK + 2 * HALF]
    num_heads,
    stride_led,
    stride_led_head,
    stride_query,
    stride_query_head,
    FIRST_TURNED: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = outputs + (token * num_heads + head) * (RANK + 2 * HALF)
    columns = tl.arange(0, RANK_BLOCK)
    is_column = columns < RANK
    values = tl.load(led + token * stride_led + head * stride_led_head + columns, mask=is_column, other=0.0)
    tl.store(place + columns, values, mask=is_column)
    query, angle = queries + token * stride_query + head * stride_query_head + FIRST_TURNED, token * 2 * HALF
    write_turned(query, cos + angle, sin + angle, place + RANK, HALF, HALF_BLOCK)


def latent_queries(led: Tensor, queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See the twin."""
    (num_tokens, num_heads, rank), half = led.shape, cos.shape[-1] // 2
    outputs = queries.new_empty(num_tokens, num_heads, rank + 2 * half)
    _latent_queries[(num_tokens, num_heads)](
        led, queries, cos.contiguous(), sin.contiguous(), outputs, num_heads, led.stride(0), led.stride(1), queries.stride(0),
        queries.stride(1), FIRST_TURNED=queries.shape[2] - 2 * half, RANK=rank, HALF=half, RANK_BLOCK=padded(rank),
        HALF_BLOCK=padded(half), num_warps=1,
    )  # fmt: skip
    return outputs
