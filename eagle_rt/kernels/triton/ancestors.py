"""The ancestor masks of trees as bits, and the text positions of their nodes; twin: `ancestor_mask` in `tree/draft_tree.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded


@triton.jit
def _ancestors(
    parents,  # [B, N] int64
    depths,  # [B, N] int64
    starts,  # [B] int64
    words,  # [B, N, NUM_WORDS] int64
    positions,  # [B, N] int64
    max_depth,
    NUM_NODES: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK)
    is_node = nodes < NUM_NODES
    first = sequence * NUM_NODES
    depth = tl.load(depths + first + nodes, mask=is_node, other=0)
    tl.store(positions + first + nodes, tl.load(starts + sequence) + depth, mask=is_node)
    for word in tl.static_range(NUM_WORDS):
        bits = tl.zeros([BLOCK], tl.int64)
        ancestor = nodes.to(tl.int64)
        for _ in range(max_depth + 1):
            shift = ancestor - word * 64
            is_here = (ancestor >= 0) & (shift >= 0) & (shift < 64)
            bit = tl.full([BLOCK], 1, tl.int64) << tl.where(is_here, shift, 0)
            bits = bits | tl.where(is_here, bit, 0)
            ancestor = tl.load(parents + first + ancestor, mask=is_node & (ancestor >= 0), other=-1)
        tl.store(words + (first + nodes) * NUM_WORDS + word, bits, mask=is_node)


def ancestors(parents: Tensor, depths: Tensor, starts: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """(words [B, N, W], positions [B, N]), both int64, of trees with parents [B, N] and depths [B, N] whose roots stand at starts
    [B]. Bit j of word w: node 64 w + j is an ancestor, or the node itself."""
    batch_size, num_nodes = parents.shape
    num_words = triton.cdiv(num_nodes, 64)
    words = torch.empty(batch_size, num_nodes, num_words, dtype=torch.int64, device=parents.device)
    positions = torch.empty_like(parents)
    _ancestors[(batch_size,)](
        parents.contiguous(), depths.contiguous(), starts, words, positions, max_depth, NUM_NODES=num_nodes, NUM_WORDS=num_words,
        BLOCK=padded(num_nodes), num_warps=1,
    )  # fmt: skip
    return words, positions
