"""Drafting with a head the tree that somebody has drawn, the same in every step: nothing is decided, so that it can be captured.
`tree_rules.StaticTree` is its twin on the host."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from eagle_rt.speculate.drafter import TreeDrafter
from eagle_rt.speculate.sequences import DecodeSequences
from eagle_rt.tree.draft_tree import DraftTree, root_only
from eagle_rt.tree.paths import RankPath, parents_first


@dataclass(frozen=True)
class DrawnLevel:
    """The N nodes at one depth of a drawn tree, of which Q have children.

    top_k: how many children of each row above are looked at, and chosen: [N] which of all of them the nodes are. inner: [Q] which
    nodes have children, and parent_rows: [Q] below which row above these stand. visible: what those rows see of all rows so far, as
    `StepOperations.packed` makes it of [Q, C] bool, and num_rows: C.
    """

    top_k: int
    chosen: Tensor
    inner: Tensor
    parent_rows: Tensor
    visible: Tensor
    num_rows: int


class DrawnTreeDrafter(TreeDrafter):
    """paths: of the tree; the others: see `TreeDrafter`."""

    def __init__(self, *args: Any, paths: list[RankPath], **options: Any) -> None:
        super().__init__(*args, **options)
        paths, device = parents_first(paths), self._states.device
        numbers = {path: number for number, path in enumerate([(), *paths])}
        self._parents = torch.tensor([-1, *(numbers[path[:-1]] for path in paths)], device=device)
        self._depths = torch.tensor([0, *map(len, paths)], device=device)
        self._levels = self._drawn_levels(paths)

    def _drawn_levels(self, paths: list[RankPath]) -> list[DrawnLevel]:
        def places(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self._states.device)

        have_children, levels = {path[:-1] for path in paths}, []
        rows: list[RankPath] = []  # all that the head is run for, below the root
        above: list[RankPath] = [()]
        for _, group in groupby(paths, key=len):
            nodes = list(group)
            top_k = 1 + max(path[-1] for path in nodes)
            inner = [path for path in nodes if path in have_children]
            rows += inner
            visible = torch.tensor([[path[: len(row)] == row for row in rows] for path in inner], dtype=torch.bool)
            levels.append(
                DrawnLevel(
                    top_k,
                    places([above.index(path[:-1]) * top_k + path[-1] for path in nodes]),
                    places([nodes.index(path) for path in inner]),
                    places([above.index(path[:-1]) for path in inner]),
                    self._operations.packed(visible.view(len(inner), len(rows)).to(self._states.device)),
                    len(rows),
                )
            )
            above = inner
        return levels

    def propose(self, sequences: DecodeSequences) -> DraftTree:
        """As `TreeDrafter.propose`: a level's rows follow those of the levels above it among the scratch rows."""
        if not self.tree.num_steps:
            return root_only(sequences.root_tokens)
        token_map, operations = self.head.token_map, self._operations
        tokens = [sequences.root_tokens[:, None]]
        scores = [torch.zeros_like(tokens[0], dtype=torch.float32)]
        states, row_scores = self._states[sequences.state_rows][:, None], scores[0]
        ahead = self._logits_ahead(states, sequences)
        logits = self._logits(states) if ahead is None else self._ahead_of(tokens[0], ahead[:, 0])
        paths, num_rows = tokens[0][:, :, None][:, :, :0], 0
        for depth, level in enumerate(self._levels):
            noise = self._noise(sequences, positions_of_level(sequences, depth, row_scores))
            children = operations.children(self._judged(logits, sequences, paths), row_scores, level.top_k, noise)
            drafted, drafted_scores = (own.flatten(1).index_select(1, level.chosen) for own in children)
            tokens.append(token_map.to_target(drafted))
            scores.append(drafted_scores)
            if not len(level.inner):
                break
            paths = paths.index_select(1, level.parent_rows)
            row_tokens, row_scores = (own[-1].index_select(1, level.inner) for own in (tokens, scores))
            paths = torch.cat((paths, row_tokens[:, :, None]), dim=2)
            if ahead is not None:
                logits = self._ahead_of(row_tokens, ahead[:, depth + 1])
                continue
            states = states.index_select(1, level.parent_rows)
            mask = operations.beam_mask(level.visible.repeat(sequences.batch_size, 1, 1), level.num_rows)
            batch = sequences.scratch_batch(row_tokens, positions_of_level(sequences, depth, row_tokens), num_rows, mask)
            states = self._states_after(states, batch)
            logits, num_rows = self._logits(states), level.num_rows
        return DraftTree(
            torch.cat(tokens, dim=1),
            self._parents.repeat(sequences.batch_size, 1),
            self._depths.repeat(sequences.batch_size, 1),
            torch.cat(scores, dim=1),
        )


def positions_of_level(sequences: DecodeSequences, depth: int, rows: Tensor) -> Tensor:
    """[B, Q] text positions so far below the roots, of rows [B, Q] that all stand there."""
    return (sequences.positions + depth)[:, None].repeat(1, rows.shape[1])
