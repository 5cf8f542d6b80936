"""One decode step: draft, verify, keep."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.cache.pool import KVPool
from eagle_rt.models.decoder import Decoder
from eagle_rt.speculate.drafter import TreeDrafter
from eagle_rt.speculate.sampler import target_choice
from eagle_rt.speculate.sequences import DecodeSequences
from eagle_rt.tree.draft_tree import DraftTree, ancestor_mask, root_only
from eagle_rt.tree.verify import Acceptance, walk


@dataclass(frozen=True)
class StepOutcome:
    """tree: what was drafted; acceptance: what was kept of it; is_draft_broken: [B] bool, the head gave no numbers."""

    tree: DraftTree
    acceptance: Acceptance
    is_draft_broken: Tensor


def decode_step(
    sequences: DecodeSequences,
    target: Decoder,
    pool: KVPool,
    backend: AttentionBackend,
    drafter: TreeDrafter | None,
    max_depth: int,
    mark: Callable[[str], None],
) -> StepOutcome:
    """Advance every sequence by the tokens that the target confirms: at least one, at most max_depth + 1.

    Nothing here reads a tensor on the host, and every shape follows from the batch size and the tree's. `mark(name)` is called
    after each part, for timing.
    """
    tree = drafter.propose(sequences) if drafter else root_only(sequences.root_tokens)
    mark("draft")

    positions = sequences.positions_at(tree.depths)
    batch = sequences.scratch_batch(tree.tokens, positions, 0, ancestor_mask(tree.parents, max_depth))
    output = target.forward(batch, pool, backend, drafter.head.feature_layers if drafter else ())
    logits = target.logits(output.hidden).view(*tree.tokens.shape, -1)
    mark("verify")

    choice = target_choice(logits, positions, sequences.sampling)
    acceptance = walk(tree, choice, max_depth)
    is_draft_broken = torch.isneginf(tree.scores[:, 1:2]).any(dim=1)
    if drafter and output.features is not None:
        pool.move(*sequences.accepted_moves(acceptance.path))
        mark("accept")
        drafter.extend_accepted(sequences, acceptance, output.features.view(*tree.tokens.shape, -1))
        mark("extend")
    return StepOutcome(tree, acceptance, is_draft_broken)
