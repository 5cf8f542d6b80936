"""The K children of a level that are expanded next, and what each of them sees; the twin is `next_level` in `tree/expand.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import NO_KEY, float_key, padded, take_best


@triton.jit
def _select_beam(
    scores,  # [B, NUM_CHILDREN] float32
    tokens,  # [B, NUM_CHILDREN] int64
    visible,  # [B, NUM_PARENTS, NUM_WORDS] int64
    best_tokens,  # [B, TOP_K] int64
    best_scores,  # [B, TOP_K] float32
    candidates,  # [B, TOP_K] int64
    parent_rows,  # [B, TOP_K] int64
    new_visible,  # [B, TOP_K, NUM_WORDS] int64
    first_row,
    first_candidate,
    NUM_CHILDREN: tl.constexpr,
    NUM_PARENTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    children = tl.arange(0, BLOCK)
    is_child = children < NUM_CHILDREN
    values = tl.load(scores + sequence * NUM_CHILDREN + children, mask=is_child, other=0.0)
    keys = tl.where(is_child, float_key(values), NO_KEY)
    for rank in tl.static_range(TOP_K):
        _, child = take_best(keys, children)
        place = sequence * TOP_K + rank
        parent = child // (NUM_CHILDREN // NUM_PARENTS)
        tl.store(best_tokens + place, tl.load(tokens + sequence * NUM_CHILDREN + child))
        tl.store(best_scores + place, tl.load(scores + sequence * NUM_CHILDREN + child))
        tl.store(candidates + place, (first_candidate + child).to(tl.int64))
        tl.store(parent_rows + place, (child // TOP_K).to(tl.int64))
        row = first_row + rank
        for word in tl.static_range(NUM_WORDS):
            bits = tl.load(visible + (sequence * NUM_PARENTS + parent) * NUM_WORDS + word)
            shift = row - word * 64
            is_here = (shift >= 0) & (shift < 64)
            itself = tl.where(is_here, tl.full([], 1, tl.int64) << tl.where(is_here, shift, 0).to(tl.int64), 0)
            tl.store(new_visible + place * NUM_WORDS + word, bits | itself)
        keys = tl.where(children == child, NO_KEY, keys)


def select_beam(
    scores: Tensor, tokens: Tensor, visible: Tensor, top_k: int, first_row: int, first_candidate: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of a `Beam`, each [B, top_k] and `visible` [B, top_k, W]: the top_k best of the children with scores and tokens
    [B, P * K], parent by parent.

    visible: [B, P, W] int64 words with a bit for every drafted row that a parent sees; the new beam's rows are numbered from
    first_row, and each also sees itself. The children are numbered from first_candidate. On a tie the lowest number wins.
    """
    batch_size, num_parents, num_words = visible.shape
    num_children = scores.shape[1]
    best_tokens = torch.empty(batch_size, top_k, dtype=torch.int64, device=scores.device)
    candidates, parent_rows = torch.empty_like(best_tokens), torch.empty_like(best_tokens)
    best_scores = torch.empty(batch_size, top_k, dtype=torch.float32, device=scores.device)
    new_visible = torch.empty(batch_size, top_k, num_words, dtype=torch.int64, device=scores.device)
    _select_beam[(batch_size,)](
        scores.contiguous(), tokens.contiguous(), visible.contiguous(), best_tokens, best_scores, candidates, parent_rows,
        new_visible, first_row, first_candidate, NUM_CHILDREN=num_children, NUM_PARENTS=num_parents, TOP_K=top_k,
        NUM_WORDS=num_words, BLOCK=padded(num_children),
    )  # fmt: skip
    return best_tokens, best_scores, candidates, parent_rows, new_visible
