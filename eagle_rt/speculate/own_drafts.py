"""Steps in which a class of the user's drafts, with no head of ours: whatever it says, the text stays the same."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from eagle_rt.models.decoder import Decoder
from eagle_rt.models.heads.spec import check_feature_layers
from eagle_rt.speculate.forest import Candidates, joined
from eagle_rt.speculate.headless_step import HeadlessStepper
from eagle_rt.speculate.host_verifier import Drafted, HostOutcome, HostVerifier
from eagle_rt.speculate.plug_ins import Trust, made_of
from eagle_rt.speculate.sampler import SamplingBatch
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

Nodes = tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Sequence[float]]


class Node(NamedTuple):
    """parent: its place among the nodes of its tree, -1 for the text; log_chance: given the parent, score: of its whole path."""

    token: int
    parent: int
    depth: int
    log_chance: float
    score: float


TEXT = Node(-1, -1, 0, 0.0, 0.0)


class Drafter(Protocol):
    """It may also have

    `start(target: Decoder)`, which is called once, before anything else;
    `feature_layers`, the layers whose input it wants to see, as `Decoder` numbers them, and with it
    `read(sequence_id: str, start: int, features: Tensor)`, which is given that, [n, len(feature_layers) * H] of the rows from
    `start` on of a text: each row once, in order, before the next draft; from row 0 again where a text is read anew;
    `forget(sequence_id: str)`, which is told of each sequence that has left.
    """

    def draft(self, sequences: Sequence[HostSequence]) -> Sequence[Nodes]:
        """For each sequence the tokens that may follow its text, as a tree: (tokens, parents) or (tokens, parents, chances).

        Parents are places among these tokens, each before its children, and -1 under the text; chances, of each node given its
        parent, are what traces show. ([], []) drafts nothing. Where the bounds of a sequence have no room for all, the first ones
        count.
        """
        ...


def load_drafter(name: str, target: Decoder) -> Drafter:
    """Of the class that is called so, ready to draft for this target.

    Raises:
        ValueError: there is no such class, it is none of a drafter, or it wants what the target does not have.
    """
    flag = f"--speculative-algorithm {name}"
    drafter = made_of("--speculative-algorithm", name, ("draft",))
    if hasattr(drafter, "start"):
        try:
            drafter.start(target)
        except Exception as error:
            raise ValueError(f"{flag} can't start: {type(error).__name__}: {error}") from error
    if layers := feature_layers_of(drafter):
        if not callable(getattr(drafter, "read", None)):
            raise ValueError(f"{flag} has feature_layers and no method read, see docs/extending.md")
        try:
            check_feature_layers(layers, target.spec.num_layers)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{flag} has feature_layers {layers}: {error}") from error
    return drafter


def feature_layers_of(drafter: Drafter) -> tuple[int, ...]:
    """None where it sees nothing of the target."""
    return tuple(getattr(drafter, "feature_layers", ()))


class OwnStepper(HeadlessStepper):
    """One that fails is told of and not asked again: nothing is drafted from then on. Larger batches than max_batch_size are not
    drafted for."""

    def __init__(self, verifier: HostVerifier, drafter: Drafter, max_batch_size: int | None) -> None:
        super().__init__(verifier)
        self.drafter, self._trust = drafter, Trust(drafter, "the class that drafts has failed, and nothing is drafted any more")
        self._max_batch_size = max_batch_size

    @property
    def failure(self) -> str:
        return self._trust.failure

    def step(self, sequences: list[HostSequence], sampling: SamplingBatch, mark: Callable[[str], None]) -> HostOutcome:
        drafted = self._drafted(sequences)
        mark("draft")
        outcome = self._verify(sequences, sampling, drafted, mark) if drafted else self._rest(sequences, sampling)
        mark("accept" if drafted else "verify")
        return outcome

    def read(self, sequence_ids: Sequence[str], starts: Sequence[int], counts: Sequence[int], features: Tensor) -> None:
        if self.failure:
            return
        with self._trust.asking("read"):
            for sequence_id, start, own in zip(sequence_ids, starts, features.split(list(counts)), strict=True):
                self.drafter.read(sequence_id, start, own)  # pyright: ignore[reportAttributeAccessIssue]

    def forget(self, sequence_id: str) -> None:
        if (forget := getattr(self.drafter, "forget", None)) and not self.failure:
            with self._trust.asking("forget"):
                forget(sequence_id)

    def _drafted(self, sequences: list[HostSequence]) -> Drafted | None:
        if self.failure or (self._max_batch_size is not None and len(sequences) > self._max_batch_size):
            return None
        nodes = None
        with self._trust.asking("draft"):
            nodes = candidates_of(sequences, self.drafter.draft(sequences), self.verifier.target.spec.vocab_size)
        return Drafted.of(sequences, nodes, np.arange(len(nodes)), len(nodes), has_chances=False) if nodes else None


def candidates_of(sequences: Sequence[HostSequence], drafts: Sequence[Nodes], vocab_size: int) -> Candidates:
    """Of every sequence's nodes those that its bounds have room for.

    Raises:
        ValueError: a token that is none, a node that does not come after its parent, or a chance that is none.
    """
    own, num_before = [], 0
    for owner, (sequence, nodes) in enumerate(zip(sequences, drafts, strict=True)):
        own.append(fitting(owner, sequence.bounds or NO_SPECULATION, read(nodes, vocab_size), num_before))
        num_before += len(own[-1])
    return joined(own)


def read(nodes: Nodes, vocab_size: int) -> list[Node]:
    tokens, parents, *more = nodes
    chances = more[0] if more else [1.0] * len(tokens)
    found: list[Node] = []
    for number, (token, parent, chance) in enumerate(zip(tokens, parents, chances, strict=True)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {vocab_size}")
        if not -1 <= parent < number:
            raise ValueError(f"node {number} has the parent {parent}, but must come after it; -1 is the text")
        if not 0 < chance <= 1:
            raise ValueError(f"node {number} has the chance {chance}, which must be above 0 and at most 1")
        above, log_chance = found[parent] if parent >= 0 else TEXT, math.log(chance)
        found.append(Node(int(token), int(parent), above.depth + 1, log_chance, above.score + log_chance))
    return found


def fitting(owner: int, bounds: TreeShape, nodes: list[Node], num_before: int) -> Candidates:
    """Those within the bounds, numbered from num_before on."""
    kept = [number for number, node in enumerate(nodes) if node.depth <= bounds.num_steps][: bounds.num_draft_tokens - 1]
    numbers = {-1: -1, **{number: num_before + place for place, number in enumerate(kept)}}
    own = [nodes[number] for number in kept]
    scores = np.array([node.score for node in own], dtype=np.float64)
    return Candidates(
        owners=np.full(len(own), owner),
        tokens=np.array([node.token for node in own], dtype=np.int64),
        parents=np.array([numbers[node.parent] for node in own], dtype=np.int64),
        depths=np.array([node.depth for node in own], dtype=np.int64),
        log_probs=np.array([node.log_chance for node in own], dtype=np.float64),
        scores=scores,
        values=scores,
    )
