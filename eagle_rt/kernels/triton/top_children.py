"""The best children of every node: top-k of draft logits, scored by the log-probabilities on their paths.

A row is cut into splits. Each leaves its K best and its part of the softmax's denominator; a second kernel joins them. With noise
the target's own is added first, times the temperature (see `coupled_logits` in `speculate/sampler.py`). The twin is
`tree/expand.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import NO_KEY, float_key, key_float, padded, take_best
from eagle_rt.kernels.triton.noise import gumbel_noise

BLOCK = 2048


@dataclass(frozen=True)
class KernelNoise:
    """The target's noise for B sequences of Q nodes: temperatures and seeds [B]; thresholds and positions [B, Q]; token_ids [W]."""

    temperatures: Tensor
    seeds: Tensor
    thresholds: Tensor
    positions: Tensor
    token_ids: Tensor


@triton.jit
def _top_of_split(
    logits,  # [R, width]
    temperatures,  # [B] float32
    thresholds,  # [R] float32
    seeds,  # [B] int64
    positions,  # [R] int64
    token_ids,  # [width] int64
    top_keys,  # [R, num_splits, TOP_K] int32
    top_tokens,  # [R, num_splits, TOP_K] int32
    norms,  # [R, num_splits] float32: log of the split's sum of exponentials
    width,
    sharpness,  # float32
    ROWS_A_SEQUENCE: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = split * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < width
    x = tl.load(logits + row * width + tokens, mask=is_token, other=-float("inf")).to(tl.float32)
    if HAS_NOISE:
        sequence = row // ROWS_A_SEQUENCE
        temperature = tl.load(temperatures + sequence)
        if temperature > 0.0:
            ids = tl.load(token_ids + tokens, mask=is_token, other=0)
            noise = gumbel_noise(tl.load(seeds + sequence), tl.load(positions + row), ids)
            x = tl.div_rn(x, temperature)
            x = tl.where((x >= tl.load(thresholds + row)) | (x != x), (x + noise) * temperature, -float("inf"))
    x = x * sharpness
    place = row * tl.num_programs(1) + split
    has_nan = tl.sum((x != x).to(tl.int32), 0) > 0
    keys = tl.where(is_token, float_key(x), NO_KEY)
    highest = key_float(tl.max(keys, 0))
    base = tl.where(highest == -float("inf"), 0.0, highest)
    norm = tl.log(tl.sum(tl.exp(tl.where(is_token & (x == x), x, -float("inf")) - base), 0)) + base
    tl.store(norms + place, tl.where(has_nan, float("nan"), norm))
    for rank in tl.static_range(TOP_K):
        key, token = take_best(keys, tokens)
        tl.store(top_keys + place * TOP_K + rank, key)
        tl.store(top_tokens + place * TOP_K + rank, token)
        keys = tl.where(tokens == token, NO_KEY, keys)


@triton.jit
def _top_of_row(
    top_keys,
    top_tokens,
    norms,
    parent_scores,  # [R] float32
    tokens,  # [R, TOP_K] int64
    scores,  # [R, TOP_K] float32
    num_splits,
    TOP_K: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, PADDED_SPLITS)
    parts = tl.load(norms + row * num_splits + splits, mask=splits < num_splits, other=-float("inf"))
    has_nan = tl.sum((parts != parts).to(tl.int32), 0) > 0
    highest = tl.max(tl.where(parts == parts, parts, -float("inf")), 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    norm = tl.log(tl.sum(tl.exp(parts - base), 0)) + base
    parent_score = tl.load(parent_scores + row)

    entries = tl.arange(0, BLOCK)
    is_entry = entries < num_splits * TOP_K
    keys = tl.load(top_keys + row * num_splits * TOP_K + entries, mask=is_entry, other=NO_KEY)
    ids = tl.load(top_tokens + row * num_splits * TOP_K + entries, mask=is_entry, other=2147483647)
    for rank in tl.static_range(TOP_K):
        key, token = take_best(keys, ids)
        score = tl.where(has_nan, -float("inf"), parent_score + (key_float(key) - norm))
        # -inf among the logits, or a parent that is out already: -inf minus anything.
        score = tl.where(score == score, score, -float("inf"))
        tl.store(tokens + row * TOP_K + rank, token.to(tl.int64))
        tl.store(scores + row * TOP_K + rank, score)
        keys = tl.where(ids == token, NO_KEY, keys)


def top_children(
    logits: Tensor, parent_scores: Tensor, top_k: int, sharpness: float = 1.0, noise: KernelNoise | None = None
) -> tuple[Tensor, Tensor]:
    """Draft ids and float32 scores, both [B, Q, K], from draft logits [B, Q, W] after nodes with scores [B, Q].

    A child's score is its parent's and its own log-probability, of logits times `sharpness`. On a tie the lowest id comes first;
    the K ids are distinct; in a row with a NaN all scores are -inf.
    """
    batch_size, num_nodes, width = logits.shape
    num_rows, num_splits = batch_size * num_nodes, triton.cdiv(width, BLOCK)
    device = logits.device
    top_keys = torch.empty(num_rows, num_splits, top_k, dtype=torch.int32, device=device)
    top_tokens = torch.empty_like(top_keys)
    norms = torch.empty(num_rows, num_splits, dtype=torch.float32, device=device)
    tokens = torch.empty(batch_size, num_nodes, top_k, dtype=torch.int64, device=device)
    scores = torch.empty(batch_size, num_nodes, top_k, dtype=torch.float32, device=device)
    noise_inputs = (norms, norms, norms, norms, norms)
    if noise:
        noise_inputs = (noise.temperatures, noise.thresholds, noise.seeds, noise.positions.contiguous(), noise.token_ids)
    _top_of_split[(num_rows, num_splits)](
        logits.contiguous(), *noise_inputs, top_keys, top_tokens, norms, width, sharpness, ROWS_A_SEQUENCE=num_nodes, TOP_K=top_k,
        HAS_NOISE=noise is not None, BLOCK=BLOCK,
    )  # fmt: skip
    _top_of_row[(num_rows,)](
        top_keys, top_tokens, norms, parent_scores.contiguous(), tokens, scores, num_splits, TOP_K=top_k,
        PADDED_SPLITS=padded(num_splits), BLOCK=padded(num_splits * top_k),
    )  # fmt: skip
    return tokens, scores
