"""Growing the candidates of a draft tree level by level: a beam of K nodes, K children each."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Level:
    """The nodes scored at one depth: K at depth 1, then K * K.

    tokens: [B, M] int64 draft-vocabulary ids; scores: [B, M] float32 cumulative log-probabilities; parents: [B, M] int64 numbers
    of candidates, which are counted through all levels from the top; -1 under the root.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


Candidates = tuple[Level, ...]


@dataclass(frozen=True)
class Beam:
    """The K nodes of one level whose children are drafted next.

    tokens: [B, K] draft-vocabulary ids; scores: [B, K]; candidates: [B, K] their numbers among the candidates;
    parent_rows: [B, K] which row of the previous beam each descends from;
    visible: [B, K, K * level] bool, the drafted rows (in the order they were fed) on each one's path, itself included.
    """

    tokens: Tensor
    scores: Tensor
    candidates: Tensor
    parent_rows: Tensor
    visible: Tensor


def top_children(logits: Tensor, top_k: int, sharpness: float = 1.0) -> tuple[Tensor, Tensor]:
    """The top_k tokens of [..., W] draft logits, and their log-probabilities over the draft vocabulary in float32.

    sharpness: what the logits are multiplied by first. The target chooses a head's favourite more often than the head's own
    probability says, so that paths of favourites are worth more than products of those.

    A row with a NaN has log-probabilities -inf throughout: its tokens are still distinct, and none of them will be accepted.
    """
    scores, tokens = torch.log_softmax(logits.float() * sharpness, dim=-1).topk(top_k, dim=-1)
    return scores.nan_to_num(nan=-torch.inf), tokens


def first_level(logits: Tensor, top_k: int, sharpness: float = 1.0) -> tuple[Candidates, Beam]:
    """Depth 1, from the draft logits [B, W] after the last certain token."""
    scores, tokens = top_children(logits, top_k, sharpness)
    batch_size, device = len(logits), logits.device
    numbers = torch.arange(top_k, device=device).expand(batch_size, top_k)
    visible = torch.eye(top_k, dtype=torch.bool, device=device).expand(batch_size, top_k, top_k)
    level = Level(tokens, scores, torch.full_like(tokens, -1))
    return (level,), Beam(tokens, scores, numbers, torch.zeros_like(tokens), visible)


def next_level(candidates: Candidates, beam: Beam, logits: Tensor, sharpness: float = 1.0) -> tuple[Candidates, Beam]:
    """One level deeper, from the draft logits [B, K, W] after every node of the beam.

    Source: EAGLE-2 (Li et al. 2024), section 4.1: a child's value is the product of the probabilities on its path,
    and the K best children of the whole level are expanded next.
    """
    batch_size, top_k = beam.tokens.shape
    child_scores, child_tokens = top_children(logits, top_k, sharpness)
    scores = (beam.scores[:, :, None] + child_scores).flatten(1)
    tokens = child_tokens.flatten(1)
    parents = beam.candidates[:, :, None].expand(-1, -1, top_k).flatten(1)

    best_scores, best = scores.topk(top_k, dim=-1)
    parent_rows = best // top_k
    inherited = beam.visible.gather(1, parent_rows[:, :, None].expand(-1, -1, beam.visible.shape[2]))
    itself = torch.eye(top_k, dtype=torch.bool, device=logits.device).expand(batch_size, top_k, top_k)
    visible = torch.cat((inherited, itself), dim=2)
    num_before = sum(level.tokens.shape[1] for level in candidates)
    beam = Beam(tokens.gather(1, best), best_scores, num_before + best, parent_rows, visible)
    return (*candidates, Level(tokens, scores, parents)), beam
