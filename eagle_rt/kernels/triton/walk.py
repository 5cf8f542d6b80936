"""Following the target's choices down a tree, one program a tree; the twin is `tree/verify.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded


@triton.jit
def _walk(
    tokens,  # [B, N] int64
    parents,  # [B, N] int64
    scores,  # [B, N] float32
    choice,  # [B, N] int64
    path,  # [B, MAX_DEPTH + 1] int64
    chosen,  # [B, MAX_DEPTH + 1] int64
    num_accepted,  # [B] int64
    NUM_NODES: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    first, row = sequence * NUM_NODES, sequence * (MAX_DEPTH + 1)
    nodes = tl.arange(0, BLOCK)
    is_draft = (nodes > 0) & (nodes < NUM_NODES)
    own_tokens = tl.load(tokens + first + nodes, mask=is_draft, other=-1)
    own_parents = tl.load(parents + first + nodes, mask=is_draft, other=-1)
    is_allowed = is_draft & (tl.load(scores + first + nodes, mask=is_draft, other=-float("inf")) > -float("inf"))
    root_choice = tl.load(choice + first)
    tl.store(path + row, tl.full([], 0, tl.int64))
    tl.store(chosen + row, root_choice)

    node, wanted, accepted = tl.full([], 0, tl.int64), root_choice, tl.full([], 0, tl.int64)
    still_going = tl.full([], 1, tl.int64)
    for depth in range(1, MAX_DEPTH + 1):
        is_next = is_allowed & (own_parents == node) & (own_tokens == wanted)
        found = tl.min(tl.where(is_next, nodes, BLOCK), 0).to(tl.int64)
        still_going = still_going * (found < BLOCK).to(tl.int64)
        node = tl.where(still_going > 0, found, node)
        wanted = tl.load(choice + first + node)
        accepted += still_going
        tl.store(path + row + depth, tl.where(still_going > 0, node, -1))
        tl.store(chosen + row + depth, tl.where(still_going > 0, wanted, root_choice))
    tl.store(num_accepted + sequence, accepted)


def walk(tokens: Tensor, parents: Tensor, scores: Tensor, choice: Tensor, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """(path [B, D + 1], num_accepted [B], tokens [B, D + 1]) of trees with tokens, parents and scores [B, N], where `choice` [B, N]
    is what the target puts after each node: the fields of `Acceptance`."""
    batch_size, num_nodes = tokens.shape
    path = torch.empty(batch_size, max_depth + 1, dtype=torch.int64, device=tokens.device)
    chosen, num_accepted = torch.empty_like(path), torch.empty_like(path[:, 0])
    _walk[(batch_size,)](
        tokens.contiguous(), parents.contiguous(), scores.contiguous(), choice.contiguous(), path, chosen, num_accepted,
        NUM_NODES=num_nodes, MAX_DEPTH=max_depth, BLOCK=padded(num_nodes, least=2), num_warps=1,
    )  # fmt: skip
    return path, num_accepted, chosen
