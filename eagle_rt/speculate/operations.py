"""What a decode step does to trees and tokens, in torch: the slow, obvious twin of `triton_operations.py`."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle_rt.batch import MaskWords
from eagle_rt.cache.pool import KVPool
from eagle_rt.speculate.sampler import SamplingBatch, coupled_logits, target_choice
from eagle_rt.tree import expand
from eagle_rt.tree.draft_tree import DraftTree, ancestor_mask
from eagle_rt.tree.expand import Beam, Candidates
from eagle_rt.tree.graft import copied_tokens, graft
from eagle_rt.tree.rerank import rerank
from eagle_rt.tree.verify import Acceptance, walk


@dataclass(frozen=True)
class DraftNoise:
    """The target's noise for the children of drafted nodes, which stand at text positions [B, Q]; draft ids mean target_ids [W]."""

    sampling: SamplingBatch
    positions: Tensor
    target_ids: Tensor


class StepOperations(Protocol):
    """Everything in a step that is neither a model's pass nor attention.

    What a beam's `visible` and a tree's mask look like is between these operations and the attention that they are used with.
    """

    def first_level(self, logits: Tensor, top_k: int, num_rows: int, noise: DraftNoise | None) -> tuple[Candidates, Beam]:
        """`tree.expand.first_level` of draft logits [B, 1, W]; the beams will fill num_rows rows in all."""
        ...

    def next_level(
        self, candidates: Candidates, beam: Beam, logits: Tensor, noise: DraftNoise | None
    ) -> tuple[Candidates, Beam]: ...

    def rerank(self, candidates: Candidates, target_ids: Tensor, root_tokens: Tensor, num_nodes: int) -> DraftTree: ...

    def graft(
        self, tree: DraftTree, texts: Tensor, state_rows: Tensor, places: Tensor, num_copied: int, most_drafted: int
    ) -> DraftTree:
        """The trees with num_copied nodes of what the texts [S, T] in state_rows [B], whose last tokens are the roots and stand at
        `places` [B], have said before. most_drafted: the depth of the trees so far."""
        ...

    def place(self, tree: DraftTree, starts: Tensor, max_depth: int) -> tuple[Tensor, Tensor | MaskWords]:
        """(text positions [B, N] of nodes whose roots stand at starts [B], what each node sees of its tree)."""
        ...

    def children(self, logits: Tensor, scores: Tensor, top_k: int, noise: DraftNoise | None) -> tuple[Tensor, Tensor]:
        """[B, Q, K] the best children of nodes with draft logits [B, Q, W] and scores [B, Q], best first, and their scores."""
        ...

    def beam_mask(self, visible: Tensor, num_rows: int) -> Tensor | MaskWords:
        """What a beam's rows, or those of a `packed` mask for each sequence, see of the num_rows rows drafted so far, their own
        included."""
        ...

    def packed(self, visible: Tensor) -> Tensor:
        """A mask [Q, C] bool as a beam's `visible` is, but for a single sequence."""
        ...

    def choose(self, logits: Tensor, positions: Tensor, sampling: SamplingBatch) -> Tensor:
        """`speculate.sampler.target_choice`."""
        ...

    def walk(self, tree: DraftTree, choice: Tensor, max_depth: int) -> Acceptance: ...

    def keep(self, pool: KVPool, scratch_slots: Tensor, path: Tensor) -> None:
        """Move the cache rows of the nodes on each path [B, D + 1] to scratch rows 0, 1, ..."""
        ...


class TorchOperations:
    """sharpness: of the scores of drafts, see `tree.expand.top_children`."""

    def __init__(self, sharpness: float) -> None:
        self._sharpness = sharpness

    def first_level(self, logits: Tensor, top_k: int, num_rows: int, noise: DraftNoise | None) -> tuple[Candidates, Beam]:
        return expand.first_level(coupled(logits, noise)[:, 0], top_k, self._sharpness)

    def next_level(self, candidates: Candidates, beam: Beam, logits: Tensor, noise: DraftNoise | None) -> tuple[Candidates, Beam]:
        return expand.next_level(candidates, beam, coupled(logits, noise), self._sharpness)

    def rerank(self, candidates: Candidates, target_ids: Tensor, root_tokens: Tensor, num_nodes: int) -> DraftTree:
        return rerank(candidates, target_ids, root_tokens, num_nodes)

    def graft(
        self, tree: DraftTree, texts: Tensor, state_rows: Tensor, places: Tensor, num_copied: int, most_drafted: int
    ) -> DraftTree:
        own = texts[state_rows].scatter(1, places[:, None], tree.tokens[:, :1].int())
        return graft(tree, *copied_tokens(own, places, most_drafted + num_copied), num_copied)

    def place(self, tree: DraftTree, starts: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
        return starts[:, None] + tree.depths, ancestor_mask(tree.parents, max_depth)

    def children(self, logits: Tensor, scores: Tensor, top_k: int, noise: DraftNoise | None) -> tuple[Tensor, Tensor]:
        own_scores, tokens = expand.top_children(coupled(logits, noise), top_k, self._sharpness)
        return tokens, scores[:, :, None] + own_scores

    def beam_mask(self, visible: Tensor, num_rows: int) -> Tensor:
        return visible

    def packed(self, visible: Tensor) -> Tensor:
        return visible

    def choose(self, logits: Tensor, positions: Tensor, sampling: SamplingBatch) -> Tensor:
        return target_choice(logits, positions, sampling)

    def walk(self, tree: DraftTree, choice: Tensor, max_depth: int) -> Acceptance:
        return walk(tree, choice, max_depth)

    def keep(self, pool: KVPool, scratch_slots: Tensor, path: Tensor) -> None:
        keep(pool, scratch_slots, path)


def keep(pool: KVPool, scratch_slots: Tensor, path: Tensor) -> None:
    """See `StepOperations`."""
    steps = torch.arange(path.shape[1], device=path.device)
    sources = scratch_slots.gather(1, torch.where(path >= 0, path, steps))
    pool.move(sources.flatten(), scratch_slots[:, : path.shape[1]].flatten())


def coupled(logits: Tensor, noise: DraftNoise | None) -> Tensor:
    return logits if noise is None else coupled_logits(logits, noise.positions, noise.sampling, noise.target_ids)
