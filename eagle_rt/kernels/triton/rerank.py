"""Choosing the candidates that are verified, by counting for each how many come before it; the twin is `tree/rerank.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import NO_KEY, float_key, padded

ROWS, COLUMNS = 32, 256


@triton.jit
def _number(
    scores,  # [B, C] float32
    ranks,  # [B, C] int32: how many candidates come before
    num_candidates,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = tile * ROWS + tl.arange(0, ROWS)
    is_own = own < num_candidates
    keys = float_key(tl.load(scores + sequence * num_candidates + own, mask=is_own, other=0.0))
    rank = tl.zeros([ROWS], tl.int32)
    for block in range(0, num_candidates, COLUMNS):
        other = block + tl.arange(0, COLUMNS)
        is_other = other < num_candidates
        other_keys = float_key(tl.load(scores + sequence * num_candidates + other, mask=is_other, other=0.0))
        other_keys = tl.where(is_other, other_keys, NO_KEY)
        is_before = (other_keys[None, :] > keys[:, None]) | (
            (other_keys[None, :] == keys[:, None]) & (other[None, :] < own[:, None])
        )
        rank += tl.sum(is_before.to(tl.int32), 1)
    tl.store(ranks + sequence * num_candidates + own, rank, mask=is_own)


@triton.jit
def _place(
    ranks,  # [B, C] int32
    node_of,  # [B, C] int32: how many chosen candidates there are up to this one, which for a chosen one is its node number
    num_candidates,
    NUM_NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    candidates = tl.arange(0, BLOCK)
    is_candidate = candidates < num_candidates
    rank = tl.load(ranks + sequence * num_candidates + candidates, mask=is_candidate, other=2147483647)
    node = tl.cumsum((rank < NUM_NODES - 1).to(tl.int32), 0)
    tl.store(node_of + sequence * num_candidates + candidates, node, mask=is_candidate)


@triton.jit
def _build(
    ranks,  # [B, C] int32
    node_of,  # [B, C] int32
    candidate_scores,  # [B, C] float32
    candidate_tokens,  # [B, C] int64, draft ids
    candidate_parents,  # [B, C] int64
    target_ids,  # [W] int64
    root_tokens,  # [B] int64
    tokens,  # [B, N] int64
    parents,  # [B, N] int64
    depths,  # [B, N] int64
    scores,  # [B, N] float32
    num_candidates,
    TOP_K: tl.constexpr,
    NUM_NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    first = sequence * NUM_NODES
    tl.store(tokens + first, tl.load(root_tokens + sequence))
    tl.store(parents + first, tl.full([], -1, tl.int64))
    tl.store(depths + first, tl.full([], 0, tl.int64))
    tl.store(scores + first, 0.0)

    candidates = tl.arange(0, BLOCK)
    is_candidate = candidates < num_candidates
    place = sequence * num_candidates + candidates
    rank = tl.load(ranks + place, mask=is_candidate, other=2147483647)
    is_chosen = rank < NUM_NODES - 1
    node = tl.load(node_of + place, mask=is_chosen, other=0)
    token = tl.load(candidate_tokens + place, mask=is_chosen, other=0)
    tl.store(tokens + first + node, tl.load(target_ids + token, mask=is_chosen, other=0), mask=is_chosen)
    tl.store(scores + first + node, tl.load(candidate_scores + place, mask=is_chosen, other=0.0), mask=is_chosen)
    # Level 1 has TOP_K candidates, every later one TOP_K of each.
    depth = tl.where(candidates < TOP_K, 1, 2 + (candidates - TOP_K) // (TOP_K * TOP_K))
    tl.store(depths + first + node, depth.to(tl.int64), mask=is_chosen)

    # A parent is always chosen; under the root it is -1.
    parent = tl.load(candidate_parents + place, mask=is_chosen, other=-1)
    parent_node = tl.load(node_of + sequence * num_candidates + parent, mask=is_chosen & (parent >= 0), other=0)
    tl.store(parents + first + node, parent_node.to(tl.int64), mask=is_chosen)


def rerank(
    scores: Tensor, tokens: Tensor, parents: Tensor, target_ids: Tensor, root_tokens: Tensor, top_k: int, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tree of the root [B] and the num_nodes - 1 best of C candidates: (tokens, parents, depths, scores), each [B, N].

    scores [B, C] float32; tokens [B, C] draft ids, named in target_ids [W]; parents [B, C] candidate numbers, -1 under the root.
    Candidates stand level by level, top_k at depth 1 and top_k**2 at every other. On a tie the lower number, which is no deeper,
    goes first.
    """
    batch_size, num_candidates = scores.shape
    device = scores.device
    scores = scores.contiguous()
    ranks = torch.empty(batch_size, num_candidates, dtype=torch.int32, device=device)
    _number[(batch_size, triton.cdiv(num_candidates, ROWS))](scores, ranks, num_candidates, ROWS=ROWS, COLUMNS=COLUMNS)
    node_of, block = torch.empty_like(ranks), padded(num_candidates)
    _place[(batch_size,)](ranks, node_of, num_candidates, NUM_NODES=num_nodes, BLOCK=block)
    node_tokens = torch.empty(batch_size, num_nodes, dtype=torch.int64, device=device)
    node_parents, depths = torch.empty_like(node_tokens), torch.empty_like(node_tokens)
    node_scores = torch.empty(batch_size, num_nodes, dtype=torch.float32, device=device)
    _build[(batch_size,)](
        ranks, node_of, scores, tokens.contiguous(), parents.contiguous(), target_ids, root_tokens, node_tokens, node_parents,
        depths, node_scores, num_candidates, TOP_K=top_k, NUM_NODES=num_nodes, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return node_tokens, node_parents, depths, node_scores
