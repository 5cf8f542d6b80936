"""What a decode step does to trees and tokens, in Triton kernels: few launches, fixed shapes, nothing read by the host."""

import torch
from torch import Tensor

from eagle_rt.batch import MaskWords
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels.triton import ancestors, filter_thresholds, gumbel_argmax, move_rows, select_beam, top_children
from eagle_rt.kernels.triton import rerank as rerank_kernel
from eagle_rt.kernels.triton import walk as walk_kernel
from eagle_rt.kernels.triton.graft_copies import graft_copies
from eagle_rt.kernels.triton.tree_attention import mask_words
from eagle_rt.speculate.operations import DraftNoise, keep
from eagle_rt.speculate.sampler import SamplingBatch
from eagle_rt.tree.draft_tree import DraftTree
from eagle_rt.tree.expand import Beam, Candidates, Level
from eagle_rt.tree.graft import MOST_MATCHED, MOST_SEARCHED
from eagle_rt.tree.verify import Acceptance


class TritonOperations:
    """See `StepOperations`. A beam's `visible` is [B, K, W] int64: a bit for every drafted row.

    sharpness: of the scores of drafts, see `tree.expand.top_children`.
    """

    def __init__(self, sharpness: float) -> None:
        self._sharpness = sharpness

    def first_level(self, logits: Tensor, top_k: int, num_rows: int, noise: DraftNoise | None) -> tuple[Candidates, Beam]:
        batch_size, device = len(logits), logits.device
        root_scores = torch.zeros(batch_size, 1, device=device)
        tokens, scores = top_children.top_children(logits, root_scores, top_k, self._sharpness, kernel_noise(logits, noise))
        nothing = torch.zeros(batch_size, 1, -(-max(num_rows, 1) // 64), dtype=torch.int64, device=device)
        level = Level(tokens.flatten(1), scores.flatten(1), torch.full((batch_size, top_k), -1, device=device))
        return (level,), beam_of(level, nothing, top_k, first_row=0, first_candidate=0)

    def next_level(self, candidates: Candidates, beam: Beam, logits: Tensor, noise: DraftNoise | None) -> tuple[Candidates, Beam]:
        top_k = beam.tokens.shape[1]
        tokens, scores = top_children.top_children(logits, beam.scores, top_k, self._sharpness, kernel_noise(logits, noise))
        parents = beam.candidates[:, :, None].expand(-1, -1, top_k).flatten(1)
        level = Level(tokens.flatten(1), scores.flatten(1), parents)
        num_before = sum(level.tokens.shape[1] for level in candidates)
        new_beam = beam_of(level, beam.visible, top_k, first_row=len(candidates) * top_k, first_candidate=num_before)
        return (*candidates, level), new_beam

    def rerank(self, candidates: Candidates, target_ids: Tensor, root_tokens: Tensor, num_nodes: int) -> DraftTree:
        tokens, scores, parents = (
            torch.cat([getattr(level, name) for level in candidates], dim=1) for name in ("tokens", "scores", "parents")
        )
        top_k = candidates[0].tokens.shape[1]
        return DraftTree(*rerank_kernel.rerank(scores, tokens, parents, target_ids, root_tokens, top_k, num_nodes))

    def graft(
        self, tree: DraftTree, texts: Tensor, state_rows: Tensor, places: Tensor, num_copied: int, most_drafted: int
    ) -> DraftTree:
        own, search = (tree.tokens, tree.parents, tree.depths, tree.scores), (MOST_MATCHED, MOST_SEARCHED)
        return DraftTree(*graft_copies(texts, state_rows, places, own, num_copied, most_drafted, *search))

    def place(self, tree: DraftTree, starts: Tensor, max_depth: int) -> tuple[Tensor, MaskWords]:
        words, positions = ancestors.ancestors(tree.parents, tree.depths, starts, max_depth)
        return positions, MaskWords(words, tree.num_nodes)

    def children(self, logits: Tensor, scores: Tensor, top_k: int, noise: DraftNoise | None) -> tuple[Tensor, Tensor]:
        return top_children.top_children(logits, scores, top_k, self._sharpness, kernel_noise(logits, noise))

    def beam_mask(self, visible: Tensor, num_rows: int) -> MaskWords:
        return MaskWords(visible, num_rows)

    def packed(self, visible: Tensor) -> Tensor:
        return mask_words(visible)

    def choose(self, logits: Tensor, positions: Tensor, sampling: SamplingBatch) -> Tensor:
        return gumbel_argmax.gumbel_argmax(logits, sampling.temperature, thresholds(logits, sampling), sampling.seeds, positions)

    def walk(self, tree: DraftTree, choice: Tensor, max_depth: int) -> Acceptance:
        return Acceptance(*walk_kernel.walk(tree.tokens, tree.parents, tree.scores, choice, max_depth))

    def keep(self, pool: KVPool, scratch_slots: Tensor, path: Tensor) -> None:
        if pool.is_part:  # the others hear of `move`
            keep(pool, scratch_slots, path)
        else:
            for storage in pool.storages.values():
                move_rows.move_rows(storage, scratch_slots, path)


def beam_of(level: Level, visible: Tensor, top_k: int, first_row: int, first_candidate: int) -> Beam:
    """The best top_k nodes of a level, as the rows from first_row on."""
    return Beam(*select_beam.select_beam(level.scores, level.tokens, visible, top_k, first_row, first_candidate))


def thresholds(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    return filter_thresholds.filter_thresholds(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def kernel_noise(logits: Tensor, noise: DraftNoise | None) -> top_children.KernelNoise | None:
    if noise is None:
        return None
    sampling = noise.sampling
    return top_children.KernelNoise(
        sampling.temperature, sampling.seeds, thresholds(logits, sampling), noise.positions, noise.target_ids
    )
