"""A draw from every row's filtered softmax, as the argmax of logits / temperature + Gumbel noise; no probability is stored.

The twin is `target_choice` in `speculate/sampler.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded
from eagle_rt.kernels.triton.noise import gumbel_noise

BLOCK = 1024
MAX_SPLITS = 32


@triton.jit
def _best_of_split(
    logits,  # [R, vocab_size]
    temperatures,  # [B] float32
    thresholds,  # [R] float32
    seeds,  # [B] int64
    positions,  # [R] int64
    best_values,  # [R, num_splits] float32
    best_tokens,  # [R, num_splits] int64
    vocab_size,
    blocks_a_split,
    ROWS_A_SEQUENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = row // ROWS_A_SEQUENCE
    temperature = tl.load(temperatures + sequence)
    threshold, seed, position = tl.load(thresholds + row), tl.load(seeds + sequence), tl.load(positions + row)
    start = split * blocks_a_split * BLOCK
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_token = start + lanes
    for block in range(start, tl.minimum(start + blocks_a_split * BLOCK, vocab_size), BLOCK):
        tokens = block + lanes
        x = tl.load(logits + row * vocab_size + tokens, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)
        if temperature > 0.0:
            x = tl.div_rn(x, temperature)
            x = tl.where(x >= threshold, x + gumbel_noise(seed, position, tokens), -float("inf"))
        # A NaN among the target's logits is chosen, as torch's argmax does: no draft can then be accepted by chance.
        x = tl.where(x != x, float("inf"), x)
        is_better = x > best
        best_token = tl.where(is_better, tokens, best_token)
        best = tl.where(is_better, x, best)
    highest = tl.max(best, 0)
    token = tl.min(tl.where(best == highest, best_token, 2147483647), 0)
    place = row * tl.num_programs(1) + split
    tl.store(best_values + place, highest)
    tl.store(best_tokens + place, tl.minimum(token, vocab_size - 1).to(tl.int64))


@triton.jit
def _best_of_row(best_values, best_tokens, choice, num_splits, PADDED_SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, PADDED_SPLITS)
    is_split = splits < num_splits
    values = tl.load(best_values + row * num_splits + splits, mask=is_split, other=-float("inf"))
    tokens = tl.load(best_tokens + row * num_splits + splits, mask=is_split, other=9223372036854775807)
    highest = tl.max(values, 0)
    tl.store(choice + row, tl.min(tl.where(values == highest, tokens, 9223372036854775807), 0))


def gumbel_argmax(logits: Tensor, temperatures: Tensor, thresholds: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[B, N] tokens from logits [B, N, V] at text positions [B, N].

    temperatures [B] float32, 0 for the plain argmax; seeds [B] int64; thresholds [B, N] float32: what logits / temperature must
    reach, from `filter_thresholds`. On a tie the lowest token wins.
    """
    batch_size, num_nodes, vocab_size = logits.shape
    num_rows, num_blocks = batch_size * num_nodes, triton.cdiv(vocab_size, BLOCK)
    blocks_a_split = triton.cdiv(num_blocks, MAX_SPLITS)
    num_splits = triton.cdiv(num_blocks, blocks_a_split)
    best_values = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
    best_tokens = torch.empty(num_rows, num_splits, dtype=torch.int64, device=logits.device)
    choice = torch.empty(batch_size, num_nodes, dtype=torch.int64, device=logits.device)
    _best_of_split[(num_rows, num_splits)](
        logits.contiguous(), temperatures, thresholds, seeds, positions.contiguous(), best_values, best_tokens, vocab_size,
        blocks_a_split, ROWS_A_SEQUENCE=num_nodes, BLOCK=BLOCK,
    )  # fmt: skip
    _best_of_row[(num_rows,)](best_values, best_tokens, choice, num_splits, PADDED_SPLITS=padded(num_splits), num_warps=1)
    return choice
