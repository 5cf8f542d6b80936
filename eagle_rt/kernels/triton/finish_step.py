"""What a captured step leaves to the host and to the next one; the twin is what `StepInputs.advance` does in torch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded


@triton.jit
def _finish_step(
    tokens,  # [B, NUM_TOKENS] int64
    num_accepted,  # [B] int64
    scores,  # [B, NUM_NODES] float32
    states,  # [B] int64
    root_tokens,  # [B] int64
    num_cached,  # [B] int64
    rows,  # [B, NUM_TOKENS + 2] int64
    padding_state,
    NUM_TOKENS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    is_place = places < NUM_TOKENS
    accepted = tl.load(num_accepted + sequence)
    own = tl.load(tokens + sequence * NUM_TOKENS + places, mask=is_place, other=0)
    row = rows + sequence * (NUM_TOKENS + 2)
    tl.store(row, accepted + 1)
    is_broken = tl.zeros([], tl.int64)
    if NUM_NODES > 1:
        is_broken = (tl.load(scores + sequence * NUM_NODES + 1) == -float("inf")).to(tl.int64)
    tl.store(row + 1, is_broken)
    tl.store(row + 2 + places, own, mask=is_place)
    if tl.load(states + sequence) != padding_state:
        tl.store(root_tokens + sequence, tl.load(tokens + sequence * NUM_TOKENS + accepted))
        tl.store(num_cached + sequence, tl.load(num_cached + sequence) + accepted + 1)


def finish_step(
    tokens: Tensor,
    num_accepted: Tensor,
    scores: Tensor,
    states: Tensor,
    padding_state: int,
    root_tokens: Tensor,
    num_cached: Tensor,
) -> Tensor:
    """`StepOutcome.rows` [B, D + 3] of what was kept, tokens [B, D + 1] and num_accepted [B], of trees with scores [B, N].

    root_tokens and num_cached, each [B], become those of the next step where the state [B] is not the padding's.
    """
    batch_size, num_tokens = tokens.shape
    rows = torch.empty(batch_size, num_tokens + 2, dtype=torch.int64, device=tokens.device)
    _finish_step[(batch_size,)](
        tokens.contiguous(), num_accepted.contiguous(), scores.contiguous(), states, root_tokens, num_cached, rows, padding_state,
        NUM_TOKENS=num_tokens, NUM_NODES=scores.shape[1], BLOCK=padded(num_tokens), num_warps=1,
    )  # fmt: skip
    return rows
