"""The target in steps whose trees the host has decided on: it verifies them, and its cache keeps what it confirms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from eagle_rt.attention.base import AttentionBackend
from eagle_rt.batch import slots_at
from eagle_rt.cache.pool import KVPool
from eagle_rt.models.decoder import Decoder
from eagle_rt.speculate.copies import Chains
from eagle_rt.speculate.forest import Bools, Candidates, Choose, Ints, PackedTrees, pack
from eagle_rt.speculate.sampler import SamplingBatch, target_choice
from eagle_rt.speculate.sequences import HostSequence, packed_scratch_batch
from eagle_rt.speculate.simulate import simulated_paths


@dataclass(frozen=True)
class Drafted:
    """What was verified: the trees, and the candidates that they were made of. is_copied: which of these no head has drafted;
    has_chances: whether their values say how likely each is to be accepted."""

    trees: PackedTrees
    nodes: Candidates
    is_copied: Bools
    has_chances: bool

    @classmethod
    def of(cls, sequences: Sequence[HostSequence], nodes: Candidates, kept: Ints, first_copy: int, has_chances: bool) -> "Drafted":
        """Those of the nodes that have the numbers `kept`; from first_copy on they are copies."""
        roots, chosen = np.array([sequence.text[-1] for sequence in sequences]), nodes[kept]
        return cls(pack(roots, chosen, kept), chosen, kept >= first_copy, has_chances)

    @classmethod
    def of_chains(cls, sequences: Sequence[HostSequence], chains: Chains, kept: Ints) -> "Drafted":
        """Of copies alone those with the numbers `kept`; with each those before it."""
        trees, chosen = chains.packed(np.array([sequence.text[-1] for sequence in sequences]), kept)
        return cls(trees, chosen, np.ones(len(kept), dtype=np.bool_), has_chances=True)

    @property
    def counts(self) -> list[int]:
        """[B] how many drafts were verified of each sequence."""
        return [stop - first - 1 for first, stop in pairwise(self.trees.starts)]


@dataclass(frozen=True)
class HostOutcome:
    """For each sequence the tokens that it gains, how many drafts were verified, and whether the head gave no numbers; whether
    heads have read anything; the target's logits [T, V], and for each token in the rows of which of them it was chosen; what was
    drafted, None where nothing was."""

    tokens: list[list[int]]
    num_drafted: list[int]
    is_broken: list[bool]
    has_read: bool
    logits: Tensor
    rows: list[list[int]]
    drafted: Drafted | None = None


@dataclass(frozen=True)
class Confirmed:
    """paths: of each tree the rows of what is confirmed, from the root down; tokens: that each sequence gains; logits: [T, V] of
    all rows; features: [sum of paths, F] of those that are confirmed, one sequence after the other, if any are asked for."""

    paths: list[list[int]]
    tokens: list[list[int]]
    logits: Tensor
    features: Tensor | None


class HostVerifier:
    """The target, its cache, and its attention; feature_layers: of which layers features are asked for.

    simulated_length: make up what is accepted, so many tokens a step; for benchmarks only.
    """

    def __init__(
        self,
        target: Decoder,
        pool: KVPool,
        backend: AttentionBackend,
        feature_layers: tuple[int, ...] = (),
        simulated_length: float | None = None,
    ) -> None:
        self.target, self.pool, self.feature_layers = target, pool, feature_layers
        self._backend, self._simulated_length = backend, simulated_length

    def plain_step(self, sequences: list[HostSequence], sampling: SamplingBatch) -> tuple[list[int], Tensor, Tensor | None]:
        """The next token of each of B sequences, none of which drafts, the logits [B, V] that it was chosen by, and features [B, F]
        if any are asked for. sampling: their settings."""
        roots, counts = np.array([sequence.text[-1] for sequence in sequences]), [1] * len(sequences)
        zeros = np.zeros_like(roots)
        batch = packed_scratch_batch(sequences, counts, counts, roots, zeros, zeros, None, self._device)
        output = self.target.forward(batch, self.pool, self._backend, self.feature_layers)
        logits = self.target.logits(output.hidden)
        choice = target_choice(sampling.judged(logits)[:, None], batch.positions[:, None], sampling)
        return choice[:, 0].tolist(), logits, output.features

    def verify(
        self, sequences: list[HostSequence], sampling: SamplingBatch, trees: PackedTrees, mark: Callable[[str], None]
    ) -> Confirmed:
        """One pass over the trees, and the cache rows of what it confirms where the texts go on. mark("verify") is called
        in between."""
        choose, logits, features = self._pass(sequences, sampling, trees)
        length = self._simulated_length
        paths, tokens = trees.walk(choose) if length is None else simulated_paths(trees, choose, length)
        mark("verify")
        if features is not None:
            rows = list(chain.from_iterable(paths))
            features = features if len(rows) == len(features) else features[self._tensor(rows)]
        if not trees.is_plain:
            self._keep(sequences, trees, paths)
        return Confirmed(paths, tokens, logits, features)

    def _pass(
        self, sequences: list[HostSequence], sampling: SamplingBatch, trees: PackedTrees
    ) -> tuple[Choose, Tensor, Tensor | None]:
        """What the target chooses after nodes, and the nodes' logits [T, V] and features [T, F]."""
        counts = [stop - start for start, stop in pairwise(trees.starts)]
        visible = None if trees.is_plain else trees.visible
        batch = packed_scratch_batch(sequences, counts, counts, trees.tokens, trees.depths, trees.places, visible, self._device)
        output = self.target.forward(batch, self.pool, self._backend, self.feature_layers)
        logits = self.target.logits(output.hidden)
        paths = trees.paths if sampling.changes_logits else None

        def chosen_after(rows: slice | list[int]) -> list[int]:
            owners, own = self._tensor(trees.owners[rows]), rows if isinstance(rows, slice) else self._tensor(rows)
            judged = logits[own] if paths is None else sampling.judged(logits[own], owners, self._tensor(paths[rows]))
            settings = sampling if trees.is_plain else sampling.rows(owners)
            return target_choice(judged[:, None], batch.positions[own, None], settings)[:, 0].tolist()

        # To draw, or to see what a grammar rules out, for rows that nobody asks for takes longer than to be asked several times.
        if not (trees.is_plain or logits.is_cuda) and (len(sampling.sampled) or sampling.grammars):
            return chosen_after, logits, output.features
        choice = chosen_after(slice(None))
        return lambda rows: [choice[row] for row in rows], logits, output.features

    def _keep(self, sequences: list[HostSequence], trees: PackedTrees, paths: list[list[int]]) -> None:
        """Move the cache rows of confirmed nodes to where the text goes on."""
        if self.pool.memories:
            most = max(map(len, paths))
            self.pool.memories.keep(self._tensor([path + [-1] * (most - len(path)) for path in paths]))
        sources, targets = [], []
        for sequence, start, path in zip(sequences, trees.starts, paths, strict=False):
            moved = [(row - start, place) for place, row in enumerate(path) if row - start != place]
            if moved:
                places = np.array(moved) + sequence.num_cached
                sources.append(slots_at(sequence.slots, places[:, 0]))
                targets.append(slots_at(sequence.slots, places[:, 1]))
        if sources:
            self.pool.move(self._tensor(np.concatenate(sources)), self._tensor(np.concatenate(targets)))

    def _tensor(self, values: Ints | Sequence) -> Tensor:
        return torch.as_tensor(values, device=self._device)

    @property
    def _device(self) -> torch.device:
        return self.pool.device
