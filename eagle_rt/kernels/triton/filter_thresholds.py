"""What a token's scaled logit must reach under top-k, top-p and min-p, found without sorting.

Floats are looked at as integers that order alike, and the threshold is found by bisection over those: 32 counts, or sums, over
the row. The twin is `filter_tokens` in `speculate/sampler.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import MINUS_INF_KEY, float_key, key_float

BLOCK = 4096


@triton.jit
def _scaled(logits, row, block, vocab_size, temperature, BLOCK: tl.constexpr):
    tokens = block + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab_size + tokens, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)
    # Rounded as everywhere: a plain division is off in the last bit, and a token could miss the threshold that it sets.
    return tl.div_rn(x, temperature)


@triton.jit
def _mass_above(logits, row, key, best, vocab_size, temperature, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have a higher key, or the sum of their probabilities, that of the best one being 1."""
    mass = tl.zeros([BLOCK], tl.float32)
    for block in range(0, vocab_size, BLOCK):
        x = _scaled(logits, row, block, vocab_size, temperature, BLOCK)
        weight = tl.full([BLOCK], 1.0, tl.float32)
        if not COUNTS:
            weight = tl.exp(x - best)
        mass += tl.where(float_key(x) > key, weight, 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _least_key(logits, row, low, best, allowed, vocab_size, temperature, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The least key, from `low` up to the best one's, above which there is less than `allowed`."""
    high = float_key(best).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        is_enough = _mass_above(logits, row, middle, best, vocab_size, temperature, COUNTS, BLOCK) < allowed
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    return low


@triton.jit
def _thresholds(
    logits,  # [R, vocab_size]
    temperatures,  # [B] float32
    top_ks,  # [B] int64
    top_ps,  # [B] float32
    min_ps,  # [B] float32
    thresholds,  # [R] float32
    vocab_size,
    ROWS_A_SEQUENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = row // ROWS_A_SEQUENCE
    temperature = tl.load(temperatures + sequence)
    top_k, top_p, min_p = tl.load(top_ks + sequence), tl.load(top_ps + sequence), tl.load(min_ps + sequence)
    tl.store(thresholds + row, -float("inf"))
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        highest = tl.full([BLOCK], -float("inf"), tl.float32)
        for block in range(0, vocab_size, BLOCK):
            highest = tl.maximum(highest, _scaled(logits, row, block, vocab_size, temperature, BLOCK))
        best = tl.max(highest, 0)
        low = tl.full([], MINUS_INF_KEY, tl.int64)
        if top_k > 0:
            low = _least_key(logits, row, low, best, top_k, vocab_size, temperature, True, BLOCK)
        if top_p < 1.0:
            allowed = _mass_above(logits, row, low - 1, best, vocab_size, temperature, False, BLOCK) * top_p
            low = _least_key(logits, row, low, best, allowed, vocab_size, temperature, False, BLOCK)
        threshold = key_float(low.to(tl.int32))
        if min_p > 0.0:
            threshold = tl.maximum(threshold, best + tl.log(min_p))
        tl.store(thresholds + row, threshold)


def filter_thresholds(logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """[B, N] float32: tokens of logits [B, N, V] whose logit / temperature is below are ruled out; -inf rules out nothing.

    Settings are [B]: temperature 0, top_k 0 (int64), top_p 1 and min_p 0 are off.
    """
    batch_size, num_nodes, vocab_size = logits.shape
    thresholds = torch.empty(batch_size, num_nodes, dtype=torch.float32, device=logits.device)
    _thresholds[(batch_size * num_nodes,)](
        logits.contiguous(), temperatures, top_ks, top_ps, min_ps, thresholds, vocab_size, ROWS_A_SEQUENCE=num_nodes, BLOCK=BLOCK
    )
    return thresholds
