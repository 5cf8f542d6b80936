"""What texts have said before, found in them and grafted onto draft trees, one program a tree; the twin is `tree/graft.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded

BLOCK_SEARCHED = 1024


@triton.jit
def _longest_match(text, place, root, MOST_MATCHED: tl.constexpr, MOST_SEARCHED: tl.constexpr, BLOCK: tl.constexpr):
    """(how many of the last tokens of a text, which ends with `root` at `place`, stand in it before; what place follows them
    there): the latest of the longest."""
    most, start = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    first = tl.maximum(1, place - MOST_SEARCHED + 1)
    for block in range(first, place + 1, BLOCK):
        following = block + tl.arange(0, BLOCK)
        still_matches = following <= place
        lengths = tl.zeros([BLOCK], tl.int64)
        back = tl.full([], 0, tl.int64)
        last = root
        while (back < MOST_MATCHED) & (tl.max(still_matches.to(tl.int32), 0) > 0):
            tokens = tl.load(text + following - 1 - back, mask=still_matches, other=-1).to(tl.int64)
            still_matches = still_matches & (tokens == last)
            lengths += still_matches.to(tl.int64)
            back += 1
            # No token is before the first one.
            still_matches = still_matches & (following - 1 - back >= 0)
            last = tl.load(text + place - back, mask=place >= back, other=-2).to(tl.int64)
        longest = tl.max(lengths, 0)
        latest = tl.max(tl.where((lengths == longest) & (lengths > 0), following, 0), 0)
        start = tl.where(longest >= most, latest, start)
        most = tl.maximum(most, longest)
    return most, start


@triton.jit
def _graft_copies(
    texts,  # [S, STRIDE] int32
    states,  # [B] int64
    places,  # [B] int64
    tokens,  # [B, N] int64, and as the others below
    parents,
    depths,
    scores,
    new_tokens,  # [B, N + C] int64, and as the others below
    new_parents,
    new_depths,
    new_scores,
    stride_text,
    NUM_NODES: tl.constexpr,
    NUM_COPIED: tl.constexpr,
    MOST_MERGED: tl.constexpr,
    MOST_MATCHED: tl.constexpr,
    MOST_SEARCHED: tl.constexpr,
    BLOCK_SEARCHED: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_COPIED: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    nodes, first, new_first = tl.arange(0, BLOCK_NODES), sequence * NUM_NODES, sequence * (NUM_NODES + NUM_COPIED)
    is_node = nodes < NUM_NODES
    own_tokens = tl.load(tokens + first + nodes, mask=is_node, other=-1)
    own_parents = tl.load(parents + first + nodes, mask=is_node, other=-1)
    own_scores = tl.load(scores + first + nodes, mask=is_node, other=-float("inf"))
    tl.store(new_tokens + new_first + nodes, own_tokens, mask=is_node)
    tl.store(new_parents + new_first + nodes, own_parents, mask=is_node)
    tl.store(new_scores + new_first + nodes, own_scores, mask=is_node)
    tl.store(new_depths + new_first + nodes, tl.load(depths + first + nodes, mask=is_node, other=0), mask=is_node)

    place, root = tl.load(places + sequence), tl.load(tokens + first)
    text = texts + tl.load(states + sequence) * stride_text
    length, start = _longest_match(text, place, root, MOST_MATCHED, MOST_SEARCHED, BLOCK_SEARCHED)
    is_found, period = length > 0, tl.maximum(1, place + 1 - start)

    at, merged, still_merges = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), is_found
    for step in range(MOST_MERGED):
        where = start + step % period
        wanted = tl.where(where == place, root, tl.load(text + where, mask=where < place, other=-1).to(tl.int64))
        is_child = is_node & (own_parents == at) & (own_tokens == wanted) & (own_scores > -float("inf"))
        found = tl.min(tl.where(is_child, nodes, BLOCK_NODES), 0).to(tl.int64)
        still_merges = still_merges & (found < BLOCK_NODES)
        at = tl.where(still_merges, found, at)
        merged += still_merges.to(tl.int64)

    numbers = tl.arange(0, BLOCK_COPIED)
    new, is_new = new_first + NUM_NODES + numbers, numbers < NUM_COPIED
    is_real = numbers < tl.where(is_found, NUM_COPIED, 0)
    where = start + (merged + numbers) % period
    copied = tl.load(text + where, mask=is_real & (where < place), other=0).to(tl.int64)
    below = tl.where(numbers == 0, at, (NUM_NODES - 1 + numbers).to(tl.int64))
    score = tl.load(scores + first + at)
    tl.store(new_tokens + new, tl.where(is_real & (where != place), copied, root), mask=is_new)
    tl.store(new_parents + new, tl.where(is_real, below, 0), mask=is_new)
    tl.store(new_depths + new, tl.where(is_real, merged + 1 + numbers, 1), mask=is_new)
    tl.store(new_scores + new, tl.where(is_real, score, -float("inf")), mask=is_new)


def graft_copies(
    texts: Tensor,
    states: Tensor,
    places: Tensor,
    tree: tuple[Tensor, Tensor, Tensor, Tensor],
    num_copied: int,
    most_merged: int,
    most_matched: int,
    most_searched: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, parents, depths, scores) [B, N + num_copied] of trees with such [B, N], whose roots stand at `places` [B] of the
    texts [S, T] int32 in rows `states` [B]; see `tree.graft`. The roots themselves need not be in the texts."""
    tokens, parents, depths, scores = (own.contiguous() for own in tree)
    batch_size, num_nodes = tokens.shape
    new_tokens = tokens.new_empty(batch_size, num_nodes + num_copied)
    new = new_tokens, torch.empty_like(new_tokens), torch.empty_like(new_tokens), torch.empty_like(new_tokens, dtype=scores.dtype)
    _graft_copies[(batch_size,)](
        texts, states, places, tokens, parents, depths, scores, *new, texts.stride(0),
        NUM_NODES=num_nodes, NUM_COPIED=num_copied, MOST_MERGED=most_merged, MOST_MATCHED=most_matched,
        MOST_SEARCHED=most_searched, BLOCK_SEARCHED=BLOCK_SEARCHED, BLOCK_NODES=padded(num_nodes, least=2),
        BLOCK_COPIED=padded(num_copied, least=2), num_warps=4,
    )  # fmt: skip
    return new
