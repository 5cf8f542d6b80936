"""Drafting a tree with an EAGLE head."""

from copy import copy

import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool
from eagle_rt.models.heads.base import DraftHead
from eagle_rt.speculate.operations import DraftNoise, StepOperations
from eagle_rt.speculate.sequences import DecodeSequences
from eagle_rt.tree.draft_tree import DraftTree, root_only
from eagle_rt.tree.verify import Acceptance
from eagle_rt.tree_shape import TreeShape


class TreeDrafter:
    """Keeps the head's cache and, per running request, the head's state after the last certain token.

    tree: the shape of what is drafted. num_states: requests that may run at once. couples: guesses for sampled requests are ranked
    under the noise that the target will draw with.
    """

    def __init__(
        self,
        head: DraftHead,
        pool: KVPool,
        backend: AttentionBackend,
        operations: StepOperations,
        *,
        tree: TreeShape,
        num_states: int,
        couples: bool,
    ) -> None:
        self.head = head
        self.pool = pool
        self.tree = tree
        self._backend, self._operations = backend, operations
        self._couples = couples
        dtype, device = pool.layers[0].dtype, pool.device
        self._states = torch.zeros(num_states, head.shape.hidden_size, dtype=dtype, device=device)

    def sized(self, tree: TreeShape) -> "TreeDrafter":
        """One with the same head, cache and states that drafts trees of another shape. Without speculation it still follows what
        the target says, so that the next step may draft again."""
        other = copy(self)
        other.tree = tree
        return other

    def extend(self, batch: Batch, next_tokens: Tensor, features: Tensor, last_rows: Tensor, state_rows: Tensor) -> None:
        """Append rows made from the target's true features.

        next_tokens: [T], for every row the token one position later; features: [T, F * H] of the rows. The states of
        last_rows [R] are kept at state_rows [R], ready for `propose`.
        """
        states = self.head.forward(next_tokens, self.head.fuse(features), batch, self.pool, self._backend)
        self._states[state_rows] = states[last_rows]

    def extend_accepted(self, sequences: DecodeSequences, acceptance: Acceptance, features: Tensor) -> None:
        """`extend` by the tokens that a verification kept; features: [B, N, F * H] of the tree's nodes.

        The shape is that of the deepest possible path: rows past the accepted ones are written too, where the next tree
        will overwrite them.
        """
        batch_size, num_rows = acceptance.path.shape
        steps = torch.arange(num_rows, device=features.device)
        path = acceptance.path.clamp(min=0)[:, :, None].expand(-1, -1, features.shape[-1])
        batch = sequences.scratch_batch(acceptance.tokens, sequences.positions_at(steps), 0, tree_mask=None)
        last_rows = torch.arange(batch_size, device=features.device) * num_rows + acceptance.num_accepted
        self.extend(batch, batch.tokens, features.gather(1, path).flatten(0, 1), last_rows, sequences.state_rows)

    def propose(self, sequences: DecodeSequences) -> DraftTree:
        """The draft tree under every sequence's last token.

        A beam's rows live in the scratch rows: level l's K rows follow those of the levels above it, and each row sees the
        text and its own ancestors.
        """
        if not self.tree.num_steps:
            return root_only(sequences.root_tokens)
        top_k, num_levels, token_map, operations = self.tree.top_k, self.tree.num_steps - 1, self.head.token_map, self._operations
        states = self._states[sequences.state_rows][:, None]
        depths = torch.arange(num_levels + 1, device=states.device)[:, None, None].expand(-1, -1, top_k)
        positions = sequences.positions_at(depths)  # [L + 1, B, K]
        noise = self._noise(sequences, sequences.positions[:, None])
        paths = sequences.root_tokens[:, None, None][:, :, :0]
        candidates, beam = operations.first_level(self._logits(states, sequences, paths), top_k, num_levels * top_k, noise)
        for level in range(num_levels):
            states = states.gather(1, beam.parent_rows[:, :, None].expand(-1, -1, states.shape[-1]))
            tokens = token_map.to_target(beam.tokens)
            if sequences.sampling.changes_logits:
                paths = paths.gather(1, beam.parent_rows[:, :, None].expand(-1, -1, level))
                paths = torch.cat((paths, tokens[:, :, None]), dim=2)
            mask = operations.beam_mask(beam.visible, (level + 1) * top_k)
            batch = sequences.scratch_batch(tokens, positions[level], level * top_k, mask)
            outputs = self.head.forward(batch.tokens, states.flatten(0, 1), batch, self.pool, self._backend)
            states = outputs.view(sequences.batch_size, top_k, -1)
            noise = self._noise(sequences, positions[level + 1])
            candidates, beam = operations.next_level(candidates, beam, self._logits(states, sequences, paths), noise)
        return operations.rerank(candidates, token_map.target_ids, sequences.root_tokens, self.tree.num_draft_tokens)

    def _logits(self, states: Tensor, sequences: DecodeSequences, paths: Tensor) -> Tensor:
        """[B, Q, W] after states [B, Q, H] of nodes that these tokens [B, Q, D] lead to."""
        logits = self.head.logits(states.flatten(0, 1))
        if sequences.sampling.changes_logits:
            owners = sequences.owners(states.shape[1])
            logits = sequences.sampling.judged(logits, owners, paths.flatten(0, 1), self.head.token_map)
        return logits.unflatten(0, states.shape[:2])

    def _noise(self, sequences: DecodeSequences, positions: Tensor) -> DraftNoise | None:
        """What the children of nodes at positions [B, Q] are ranked under, besides the head's logits."""
        return DraftNoise(sequences.sampling, positions, self.head.token_map.target_ids) if self._couples else None
