"""Drafting a tree with an EAGLE head."""

from copy import copy

import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.batch import Batch
from eagle_rt.cache.pool import KVPool
from eagle_rt.models.heads.base import DraftHead, MaskRow
from eagle_rt.models.heads.block_spec import BlockSpec
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
        text and its own ancestors. A head that drafts in parallel is fed no beams.
        """
        if not self.tree.num_steps:
            return root_only(sequences.root_tokens)
        top_k, num_levels, token_map, operations = self.tree.top_k, self.tree.num_steps - 1, self.head.token_map, self._operations
        states = self._states[sequences.state_rows][:, None]
        ahead = self._logits_ahead(states, sequences)
        depths = torch.arange(num_levels + 1, device=states.device)[:, None, None].expand(-1, -1, top_k)
        positions = sequences.positions_at(depths)  # [L + 1, B, K]
        noise = self._noise(sequences, sequences.positions[:, None])
        paths = sequences.root_tokens[:, None, None][:, :, :0]
        logits = self._logits(states) if ahead is None else self._ahead_of(sequences.root_tokens[:, None], ahead[:, 0])
        candidates, beam = operations.first_level(self._judged(logits, sequences, paths), top_k, num_levels * top_k, noise)
        for level in range(num_levels):
            tokens = token_map.to_target(beam.tokens)
            if sequences.sampling.changes_logits:
                paths = paths.gather(1, beam.parent_rows[:, :, None].expand(-1, -1, level))
                paths = torch.cat((paths, tokens[:, :, None]), dim=2)
            if ahead is None:
                states = states.gather(1, beam.parent_rows[:, :, None].expand(-1, -1, states.shape[-1]))
                mask = operations.beam_mask(beam.visible, (level + 1) * top_k)
                batch = sequences.scratch_batch(tokens, positions[level], level * top_k, mask)
                states = self._states_after(states, batch)
                logits = self._logits(states)
            else:
                logits = self._ahead_of(tokens, ahead[:, level + 1])
            noise = self._noise(sequences, positions[level + 1])
            candidates, beam = operations.next_level(candidates, beam, self._judged(logits, sequences, paths), noise)
        return operations.rerank(candidates, token_map.target_ids, sequences.root_tokens, self.tree.num_draft_tokens)

    def _states_after(self, states: Tensor, batch: Batch) -> Tensor:
        """The head's states [B, Q, H] after a pass over nodes whose parents have these."""
        return self.head.forward(batch.tokens, states.flatten(0, 1), batch, self.pool, self._backend).view_as(states)

    def _logits(self, states: Tensor) -> Tensor:
        """[B, Q, W] after states [B, Q, H]."""
        return self.head.logits(states.flatten(0, 1)).unflatten(0, states.shape[:2])

    def _logits_ahead(self, states: Tensor, sequences: DecodeSequences) -> Tensor | None:
        """[B, D, W] after every level of trees whose roots have states [B, 1, H], whatever is drafted, of a head that drafts in
        parallel."""
        if self.head.block:
            return self._logits(self._guess_blocks(sequences, self.head.block))
        if not self.head.mask_row:
            return None
        if self.tree.num_steps > 1:
            states = torch.cat((states, self._masked_states(sequences, self.head.mask_row)), dim=1)
        return self._logits(states)

    def _ahead_of(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """[B, Q, W] below nodes with target ids [B, Q], given what is guessed [B, W] of that level."""
        logits = logits[:, None].expand(-1, tokens.shape[1], -1)
        if not (self.head.block and self.head.block.pair_rank):
            return logits
        return self.head.after(tokens.flatten(), logits.flatten(0, 1)).view_as(logits)

    def _masked_states(self, sequences: DecodeSequences, mask_row: MaskRow) -> Tensor:
        """[B, D - 1, H] of all levels but the first, by one pass over a row for each."""
        count, device = (sequences.batch_size, self.tree.num_steps - 1), self.pool.device
        tokens, hidden = torch.full(count, mask_row.token, device=device), mask_row.hidden.expand(*count, -1)
        positions = sequences.positions_at(torch.arange(count[1], device=device))
        return self._states_after(hidden, sequences.scratch_batch(tokens, positions, 0, tree_mask=None))

    def _guess_blocks(self, sequences: DecodeSequences, block: BlockSpec) -> Tensor:
        """[B, D, H] of all levels, by one pass over the root and masks."""
        batch_size, size, device = sequences.batch_size, block.num_rows(self.tree.num_steps), self.pool.device
        masks = torch.full((batch_size, size - 1), block.mask_token, device=device)
        tokens = torch.cat((sequences.root_tokens[:, None], masks), dim=1)
        visible = self._operations.packed(torch.ones(size, size, dtype=torch.bool, device=device))
        mask = self._operations.beam_mask(visible.repeat(batch_size, 1, 1), size)
        batch = sequences.scratch_batch(tokens, sequences.positions_at(torch.arange(size, device=device)), 0, mask)
        states = self.head.guess_block(batch.tokens, batch, self.pool, self._backend)
        return states.unflatten(0, (batch_size, size))[:, block.first_row :]

    def _judged(self, logits: Tensor, sequences: DecodeSequences, paths: Tensor) -> Tensor:
        """Logits [B, Q, W] after nodes that these tokens [B, Q, D] lead to, as the target will look at its own."""
        if not sequences.sampling.changes_logits:
            return logits
        owners, flat = sequences.owners(logits.shape[1]), logits.flatten(0, 1)
        return sequences.sampling.judged(flat, owners, paths.flatten(0, 1), self.head.token_map).view_as(logits)

    def _noise(self, sequences: DecodeSequences, positions: Tensor) -> DraftNoise | None:
        """What the children of nodes at positions [B, Q] are ranked under, besides the head's logits."""
        return DraftNoise(sequences.sampling, positions, self.head.token_map.target_ids) if self._couples else None
