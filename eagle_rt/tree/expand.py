"""Growing the candidates of a draft tree level by level: a beam of K nodes, K children each."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Every node scored so far, level after level: K of depth 1, then K * K of each further depth.

    tokens: [B, C] int64 draft-vocabulary ids; scores: [B, C] float32 cumulative log-probabilities;
    parents: [B, C] int64 candidate numbers, -1 under the root; depths: [C] int64.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    depths: Tensor


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


def top_children(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The top_k tokens of [..., W] draft logits and their log-probabilities over the draft vocabulary, in float32.

    A row with a NaN has log-probabilities -inf throughout: its tokens are still distinct, and none of them will be accepted.
    """
    log_probabilities = torch.log_softmax(logits.float(), dim=-1).nan_to_num(nan=-torch.inf)
    scores, tokens = log_probabilities.topk(top_k, dim=-1)
    return scores, tokens


def first_level(logits: Tensor, top_k: int) -> tuple[Candidates, Beam]:
    """Depth 1, from the draft logits [B, W] after the last certain token."""
    scores, tokens = top_children(logits, top_k)
    batch_size, device = len(logits), logits.device
    numbers = torch.arange(top_k, device=device).expand(batch_size, top_k)
    candidates = Candidates(tokens, scores, torch.full_like(tokens, -1), torch.ones(top_k, dtype=torch.int64, device=device))
    visible = torch.eye(top_k, dtype=torch.bool, device=device).expand(batch_size, top_k, top_k)
    return candidates, Beam(tokens, scores, numbers, torch.zeros_like(tokens), visible)


def next_level(candidates: Candidates, beam: Beam, logits: Tensor) -> tuple[Candidates, Beam]:
    """One level deeper, from the draft logits [B, K, W] after every node of the beam.

    Source: EAGLE-2 (Li et al. 2024), section 4.1: a child's value is the product of the probabilities on its path,
    and the K best children of the whole level are expanded next.
    """
    batch_size, top_k = beam.tokens.shape
    child_scores, child_tokens = top_children(logits, top_k)
    scores = (beam.scores[:, :, None] + child_scores).flatten(1)
    tokens = child_tokens.flatten(1)
    first_number = candidates.tokens.shape[1]
    depth = candidates.depths[-1:] + 1
    grown = Candidates(
        torch.cat((candidates.tokens, tokens), dim=1),
        torch.cat((candidates.scores, scores), dim=1),
        torch.cat((candidates.parents, beam.candidates.repeat_interleave(top_k, dim=1)), dim=1),
        torch.cat((candidates.depths, depth.expand(top_k * top_k))),
    )
    best_scores, best = scores.topk(top_k, dim=-1)
    parent_rows = best // top_k
    inherited = beam.visible.gather(1, parent_rows[:, :, None].expand(-1, -1, beam.visible.shape[2]))
    itself = torch.eye(top_k, dtype=torch.bool, device=logits.device).expand(batch_size, top_k, top_k)
    visible = torch.cat((inherited, itself), dim=2)
    return grown, Beam(tokens.gather(1, best), best_scores, first_number + best, parent_rows, visible)
