"""One decode step: draft, verify, keep."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.cache.pool import KVPool
from eagle_rt.models.decoder import Decoder
from eagle_rt.speculate.drafter import TreeDrafter
from eagle_rt.speculate.operations import StepOperations
from eagle_rt.speculate.sequences import DecodeSequences
from eagle_rt.speculate.simulate import simulated_walk
from eagle_rt.speculate.texts import TextTable
from eagle_rt.tree.draft_tree import DraftTree, path_tokens, root_only
from eagle_rt.tree.verify import Acceptance
from eagle_rt.tree_shape import TreeShape


@dataclass(frozen=True)
class StepOutcome:
    """tree: what was drafted, whether by a head; acceptance: what was kept of it; logits: the target's [B, N, V]."""

    tree: DraftTree
    acceptance: Acceptance
    logits: Tensor
    has_head: bool

    @property
    def head_scores(self) -> Tensor:
        """[B, N] where a head has drafted, of the roots alone [B, 1] where none has."""
        return self.tree.scores if self.has_head else self.tree.scores[:, :1]

    @property
    def rows(self) -> Tensor:
        """[B, D + 3] int64, all that the host needs in one tensor: num_emitted, whether the head gave no numbers, then the
        tokens."""
        acceptance = self.acceptance
        is_draft_broken = torch.isneginf(self.head_scores[:, 1:2]).any(dim=1)
        return torch.cat((acceptance.num_emitted[:, None], is_draft_broken[:, None], acceptance.tokens), dim=1)


@dataclass(frozen=True)
class Stepper:
    """Everything that a decode step is made with, besides the sequences.

    tree: the shape of what is drafted. texts: what the sequences have said, where that is copied, too.
    simulated_length: make up what is accepted, so many tokens a step; for benchmarks only.
    """

    target: Decoder
    pool: KVPool
    backend: AttentionBackend
    operations: StepOperations
    drafter: TreeDrafter | None
    tree: TreeShape
    texts: TextTable | None = None
    simulated_length: float | None = None

    @property
    def max_depth(self) -> int:
        """Of the trees."""
        return self.tree.max_depth

    def sized(self, tree: TreeShape) -> "Stepper":
        """The same with trees of another shape."""
        return replace(self, tree=tree, drafter=self.drafter.sized(tree) if self.drafter else None)

    @property
    def simulates(self) -> bool:
        """Whether what is accepted is made up."""
        return self.drafter is not None and self.simulated_length is not None

    def step(self, sequences: DecodeSequences, mark: Callable[[str], None] = lambda part: None) -> StepOutcome:
        """Advance every sequence by the tokens that the target confirms: at least one, at most max_depth + 1.

        Nothing here reads a tensor on the host, but for what grammars rule out, and every shape follows from the batch size and
        the tree's. `mark(name)` is called after each part, for timing.
        """
        drafter, operations = self.drafter, self.operations
        tree = drafter.propose(sequences) if drafter else root_only(sequences.root_tokens)
        if self.texts and self.tree.num_copied:
            texts = self.texts.tokens, sequences.state_rows, sequences.positions
            tree = operations.graft(tree, *texts, self.tree.num_copied, self.tree.most_drafted)
        mark("draft")

        positions, tree_mask = operations.place(tree, sequences.positions, self.max_depth)
        batch = sequences.scratch_batch(tree.tokens, positions, 0, tree_mask)
        output = self.target.forward(batch, self.pool, self.backend, drafter.head.feature_layers if drafter else ())
        logits = judged = self.target.logits(output.hidden)
        if sequences.sampling.changes_logits:
            paths = path_tokens(tree, self.max_depth).flatten(0, 1)
            judged = sequences.sampling.judged(logits, sequences.owners(tree.num_nodes), paths)
        mark("verify")

        choice = operations.choose(judged.view(*tree.tokens.shape, -1), positions, sequences.sampling)
        if drafter and self.simulated_length is not None:
            acceptance = simulated_walk(tree, choice, self.max_depth, self.simulated_length)
        else:
            acceptance = operations.walk(tree, choice, self.max_depth)
        if self.pool.memories:
            firsts = torch.arange(0, tree.tokens.numel(), tree.num_nodes, device=logits.device)[:, None]
            self.pool.memories.keep(torch.where(acceptance.path < 0, -1, firsts + acceptance.path))
        if self.texts:
            self.texts.note(sequences.state_rows, sequences.positions, sequences.root_tokens, acceptance.tokens)
        if self.max_depth:
            operations.keep(self.pool, sequences.scratch_slots, acceptance.path)
            mark("accept")
        if drafter and output.features is not None:
            drafter.extend_accepted(sequences, acceptance, output.features.view(*tree.tokens.shape, -1))
            mark("extend")
        return StepOutcome(tree, acceptance, logits.view(*tree.tokens.shape, -1), has_head=self.tree.num_steps > 0)
