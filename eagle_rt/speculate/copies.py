"""What a text has said before after the tokens that it now ends with: drafts that no head makes, and that cost no more than their
verification.

Source: prompt lookup decoding (Saxena, 2023). Here it is one more branch of the head's tree, and how likely its tokens are to be
accepted is learned, from how many tokens before them are the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from eagle_rt.kernels.compiled import compiled
from eagle_rt.speculate.forest import Candidates, Floats, Ints, PackedTrees, joined
from eagle_rt.speculate.sequences import HostSequence

# Matches of so many tokens are told apart, by the first of these that is no less; longer ones count as of the last.
LENGTHS = np.array([1, 2, 3, 4, 6, 9, 14, 22, 32])
# Chances of the next token after such matches, before any were seen.
FIRST_CHANCES = np.array([0.15, 0.3, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9, 0.95])
# How many of the latest copies of a text are remembered, and of all texts, about; for how many of its own those of all count, and
# for how many of these the first chances.
OWN_MEMORY, COMMON_MEMORY, COMMON_WEIGHT, FIRST_WEIGHT = 1.0 - 1.0 / 16, 1.0 - 1.0 / 128, 16.0, 4.0
# The share of the time that looking for copies in vain may take, and so many seconds ahead: more by a share of the time that copies
# have saved, up to so many.
LOOKING_SHARE, MOST_AHEAD, EARNED_SHARE, MOST_EARNED = 0.01, 0.0005, 0.5, 0.005
# No token is less likely than this after those before it, and so much is what a draft's best nodes leave to others, at least.
LEAST_LEFT = 1e-3
NOTHING: Ints = np.zeros(0, dtype=np.int64)


class Copy(NamedTuple):
    """What may follow the text of sequence number `owner`. chances: of each of the tokens to be accepted, and `given` those before
    it were."""

    owner: int
    tokens: Ints
    given: Floats
    chances: Floats


@compiled
def kind_of(length: int) -> int:
    """Which of LENGTHS a match counts as."""
    kind = 0
    while length > LENGTHS[kind] and kind + 1 < len(LENGTHS):
        kind += 1
    return kind


@compiled
def longest_match(text: Ints) -> tuple[int, int]:
    """How many of the last tokens of a text stand somewhere before, at most the last of LENGTHS, and the place of what follows
    them there: the latest one of the longest."""
    count = len(text)
    most, following = 0, count
    for end in range(count - 1, 0, -1):
        length = 0
        while length < end and length < LENGTHS[-1] and text[end - 1 - length] == text[count - 1 - length]:
            length += 1
        if length > most:
            most, following = length, end
            if most == LENGTHS[-1]:
                break
    return most, following


@compiled
def learn(said: Ints, length: int, before: Ints, seen: Floats, common: Floats) -> None:
    """How many of the tokens copied `before`, after a match of that length, have been said since: up to the first that was not."""
    for number in range(min(len(said), len(before))):
        kind, is_right = kind_of(length + number), said[number] == before[number]
        for counts, memory in ((seen, OWN_MEMORY), (common, COMMON_MEMORY)):
            counts[0, kind] = memory * counts[0, kind] + (1.0 if is_right else 0.0)
            counts[1, kind] = memory * counts[1, kind] + 1.0
        if not is_right:
            break


@compiled
def copied(
    text: Ints, num_known: int, length: int, before: Ints, most_tokens: int, seen: Floats, common: Floats
) -> tuple[int, Ints, Floats, Floats]:
    """(length of the match, tokens that followed it, the chance of each given those before it, and of each) for up to so many.

    num_known, length, before: how much of the text there was when it was copied last, and what came of that. seen, common: [2,
    len(LENGTHS)] how many tokens of this text and of all were right after matches of each length, and how many there were; both
    learn. A copy that comes to the end of the text goes on with what it has copied.
    """
    learn(text[num_known:], length, before, seen, common)
    length, following = longest_match(text)
    tokens, given, chances = np.empty(most_tokens, dtype=np.int64), np.empty(most_tokens), np.empty(most_tokens)
    count, chance = 0, 1.0
    while length and count < most_tokens:
        place, kind = following + count, kind_of(length + count)
        right = seen[0, kind] + COMMON_WEIGHT * common[0, kind] / common[1, kind]
        given[count] = max(LEAST_LEFT, right / (seen[1, kind] + COMMON_WEIGHT))
        tokens[count] = text[place] if place < len(text) else tokens[place - len(text)]
        chance *= given[count]
        chances[count] = chance
        count += 1
    return length, tokens[:count], given[:count], chances[:count]


class CopiedText:
    """A text as it was when it was copied last, what was copied, and how much of what was copied before was right."""

    def __init__(self) -> None:
        self._seen = np.zeros((2, len(LENGTHS)))
        self._tokens, self._count = np.empty(256, dtype=np.int64), 0
        self._length, self._copied = 0, NOTHING

    def copy(self, text: list[int], most_tokens: int, common: Floats) -> tuple[Ints, Floats, Floats]:
        """What may follow the text now, and the chances of that."""
        count, num_known = len(text), self._count
        if count > len(self._tokens):
            self._tokens = np.concatenate((self._tokens[:num_known], np.empty(2 * count - num_known, dtype=np.int64)))
        self._tokens[num_known:count] = text[num_known:]
        self._count, known = count, (num_known, self._length, self._copied)
        self._length, self._copied, given, chances = copied(self._tokens[:count], *known, most_tokens, self._seen, common)
        return self._copied, given, chances


class CopyBook:
    """Copies for all sequences. What they turn out to be is learned from the texts alone, whether they were verified or not.

    Where nothing comes of it looking for copies takes no more than a share of the time: beside short steps it is left out of most.
    """

    def __init__(self) -> None:
        self._texts: dict[str, CopiedText] = {}
        self._allowance = MOST_AHEAD
        # [2, len(LENGTHS)] as in `copied`, for greedy and for sampled sequences.
        first = FIRST_WEIGHT * np.stack((FIRST_CHANCES, np.ones_like(FIRST_CHANCES)))
        self._common = {is_sampled: first.copy() for is_sampled in (False, True)}
        # Compiled now rather than in the first step.
        CopiedText().copy([0], 0, first)
        Chains.of([Copy(0, NOTHING, *first[:, :0])]).packed(np.zeros(1, dtype=np.int64), NOTHING)

    def of(self, sequences: Sequence[HostSequence], least_chance: float) -> list[Copy]:
        """Of those that may draft, and that end as something before: no more tokens than their trees may have. least_chance: of the
        first of them, or it is left out."""
        copies = []
        if self._allowance < 0:
            return copies
        for owner, sequence in enumerate(sequences):
            if sequence.bounds is None:
                continue
            own = self._texts.get(sequence.id)
            if own is None:
                own = self._texts[sequence.id] = CopiedText()
            most_tokens, common = sequence.bounds.num_draft_tokens - 1, self._common[sequence.temperature > 0]
            tokens, given, chances = own.copy(sequence.text, most_tokens, common)
            if len(tokens) and chances[0] >= least_chance:
                copies.append(Copy(owner, tokens, given, chances))
        return copies

    def pay(self, looked: float, step: float, *, saved: float | None) -> None:
        """A step took so many seconds, of which so many went into looking for copies, and with those that were verified it saved so
        many; None if none were."""
        if saved is None:
            self._allowance = min(max(MOST_AHEAD, self._allowance), self._allowance + LOOKING_SHARE * step - looked)
        else:
            earned = EARNED_SHARE * saved if saved > 0 else max(-MOST_AHEAD, saved)
            self._allowance = min(MOST_EARNED, self._allowance + earned)

    def forget(self, sequence_id: str) -> None:
        """A sequence has left."""
        self._texts.pop(sequence_id, None)


class Chains(NamedTuple):
    """Copies, one after the other; [M] of all their tokens."""

    owners: Ints
    tokens: Ints
    given: Floats
    chances: Floats

    @classmethod
    def of(cls, copies: Sequence[Copy]) -> "Chains":
        owners = np.array([copy.owner for copy in copies]).repeat([len(copy.tokens) for copy in copies])
        tokens, given, chances = (np.concatenate([copy[place] for copy in copies]) for place in (1, 2, 3))
        return cls(owners, tokens, given, chances)

    def packed(self, roots: Ints, kept: Ints) -> tuple[PackedTrees, Candidates]:
        """Trees of the roots [B] and of those with the numbers `kept`, with each those before it; and these as candidates. As
        `pack` makes them of candidates, which takes longer than verifying some rows of a small model."""
        starts, rows, whole, real = chain_columns(roots, kept, *self)
        trees = PackedTrees(tuple(starts.tolist()), rows[0], rows[1], rows[2], rows[3], rows_of_chosen=whole[4])
        return trees, Candidates(whole[0], whole[1], whole[2], whole[3], real[0], real[1], real[2])


@compiled
def chain_columns(
    roots: Ints, kept: Ints, owners: Ints, tokens: Ints, given: Floats, chances: Floats
) -> tuple[Ints, Ints, Ints, Floats]:
    """(starts [B + 1] of trees; [4, T] owners, tokens, parents and depths of their rows; [5, M] owners, tokens, parents and depths
    of the kept candidates, and their rows; [3, M] their log-probabilities, scores and values)."""
    batch_size, count = len(roots), len(kept)
    starts, rows = np.empty(batch_size + 1, dtype=np.int64), np.empty((4, batch_size + count), dtype=np.int64)
    whole, real = np.empty((5, count), dtype=np.int64), np.empty((3, count))
    row, node = 0, 0
    for owner in range(batch_size):
        starts[owner] = row
        rows[0, row], rows[1, row], rows[2, row], rows[3, row] = owner, roots[owner], -1, 0
        row += 1
        while node < count and owners[kept[node]] == owner:
            number, depth = kept[node], rows[3, row - 1] + 1
            rows[0, row], rows[1, row], rows[2, row], rows[3, row] = owner, tokens[number], row - 1, depth
            whole[0, node], whole[1, node], whole[2, node] = owner, tokens[number], number - 1 if depth > 1 else -1
            whole[3, node], whole[4, node] = depth, row
            real[0, node], real[1, node], real[2, node] = np.log(given[number]), np.log(chances[number]), chances[number]
            row, node = row + 1, node + 1
    starts[batch_size] = row
    return starts, rows, whole, real


def with_copies(nodes: Candidates, kept: Ints, copies: Sequence[Copy]) -> Candidates:
    """The nodes, whose values are their chances, and behind them those of copies which are not among the `kept` ones.

    Where a copy says what was drafted, it goes on below that, with the higher chance of both. Where it says something else, it can
    only be right if nothing is that was drafted there.
    """
    columns = zip(nodes.owners[kept].tolist(), nodes.parents[kept].tolist(), nodes.tokens[kept].tolist(), strict=True)
    numbers = dict(zip(columns, kept.tolist(), strict=True))
    values, parts, count = nodes.values.copy(), [], len(nodes)
    for owner, tokens, given, chances in copies:
        depth, parent, more = 0, -1, 1.0
        while depth < len(tokens) and (number := numbers.get((owner, parent, int(tokens[depth])))) is not None:
            more = max(1.0, values[number] / chances[depth])  # times as likely as the copy says
            values[number] = more * chances[depth]
            depth, parent = depth + 1, number
        siblings = kept[(nodes.parents[kept] == parent) & (nodes.owners[kept] == owner)]
        more *= max(LEAST_LEFT, 1.0 - values[siblings].sum() / (values[parent] if depth else 1.0))
        num_new = len(tokens) - depth
        parents = np.arange(count - 1, count + num_new - 1)
        parents[:1] = parent
        own, depths, log_probs = np.full(num_new, owner), np.arange(depth + 1, len(tokens) + 1), np.log(given[depth:])
        scores = (nodes.scores[parent] if depth else 0.0) + log_probs.cumsum()
        parts.append(Candidates(own, tokens[depth:], parents, depths, log_probs, scores, more * chances[depth:]))
        count += num_new
    return joined([replace(nodes, values=values), *parts])
