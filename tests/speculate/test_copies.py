"""What texts repeat: found as brute force finds it, as likely as it has been, and beside what a head has drafted."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_costs import costs, without_nodes

from eagle_rt.speculate import copies as copying
from eagle_rt.speculate.acceptance import AcceptanceEstimator
from eagle_rt.speculate.adaptive import AdaptivePolicy
from eagle_rt.speculate.copies import (
    LENGTHS,
    MOST_AHEAD,
    MOST_EARNED,
    NOTHING,
    Chains,
    Copy,
    CopyBook,
    longest_match,
    with_copies,
)
from eagle_rt.speculate.costs import Observation, PartCost
from eagle_rt.speculate.forest import Candidates, pack
from eagle_rt.speculate.members import conditions_of
from eagle_rt.speculate.policy import FixedPolicy, Rests
from eagle_rt.speculate.sequences import HostSequence
from eagle_rt.tree_shape import TreeShape

TREE = TreeShape(4, 3, 9)
TEXTS = st.lists(st.integers(0, 2), max_size=60)


def sequence(text: list[int], *, name: str = "a", temperature: float = 0.0, bounds: TreeShape | None = TREE) -> HostSequence:
    return HostSequence(name, text, range(len(text) + 20), temperature, bounds)


def match_by_hand(text: list[int]) -> tuple[int, int]:
    found = (0, len(text))
    for end in range(1, len(text)):
        for length in range(1, min(end, int(LENGTHS[-1])) + 1):
            if text[end - length : end] == text[-length:] and (length, end) >= (
                found[0] or 1,
                found[1] if found[0] == length else 0,
            ):
                found = length, end
    return found


@settings(deadline=None)
@given(text=TEXTS)
def test_the_longest_match_is_found_and_the_latest_of_those(text: list[int]) -> None:
    assert longest_match(np.array(text, dtype=np.int64)) == match_by_hand(text)


@settings(deadline=None)
@given(text=TEXTS)
def test_a_copy_is_what_followed_and_then_goes_on_with_itself(text: list[int]) -> None:
    length, following = match_by_hand(text)
    made = CopyBook().of([sequence(text)], 0.0)
    if not length:
        assert made == []
        return
    written = list(text)
    for number in range(TREE.num_draft_tokens - 1):
        written.append(written[following + number])
    (copy,) = made
    assert copy.tokens.tolist() == written[len(text) :]
    np.testing.assert_allclose(copy.chances, np.cumprod(copy.given))
    assert (copy.given > 0).all()
    assert (copy.given < 1).all()


def test_long_texts_are_copied_as_they_grow() -> None:
    """Beyond the memory that they begin with, token by token and several at a time, as one that comes whole is."""
    rng = random.Random(0)
    text = [rng.randrange(4) for _ in range(2000)]
    book, stop = CopyBook(), 1
    while stop <= len(text):
        own, whole = (kept.of([sequence(text[:stop])], 0.0) for kept in (book, CopyBook()))
        assert [copy.tokens.tolist() for copy in own] == [copy.tokens.tolist() for copy in whole]
        stop += rng.choice([1, 1, 2, 5, 300])


def test_chances_become_what_copies_have_been() -> None:
    """By the length of the match, up to the first token that was wrong, and for greedy and sampled texts by themselves."""
    book, phrase, rng = CopyBook(), list(range(100, 105)), random.Random(1)
    first = book.of([sequence([1, 2, 1], name="before")], 0.0)[0].given[0]
    text: list[int] = []
    for _ in range(60):  # every phrase goes on as before, and what comes after it never does
        text += [*phrase, rng.randrange(1000, 10**6)]
        for count in range(len(text) - len(phrase), len(text) + 1):
            copy = book.of([sequence(text[:count])], 0.0)
    copy = book.of([sequence([*text, 100, 101])], 0.0)
    assert copy[0].tokens[:3].tolist() == [102, 103, 104]
    # After one token of the phrase, after two and three the next is right; after five of them it is not.
    assert copy[0].given[:3].min() > 0.85
    assert copy[0].given[3] < 0.15
    # Of another text as much is believed, less what it has shown itself; of sampled ones nothing is known yet.
    other = book.of([sequence([1, 2, 1], name="after")], 0.0)[0]
    assert other.given[0] > 0.5 > first
    assert book.of([sequence([1, 2, 1], name="sampled", temperature=0.5)], 0.0)[0].given[0] == first


def test_who_is_copied() -> None:
    book, text = CopyBook(), [1, 2, 1]
    own = [sequence(text, name="no", bounds=None), sequence([1, 2, 3], name="new"), sequence(text, name="yes")]
    (copy,) = book.of(own, 0.0)
    assert copy.owner == 2
    assert len(copy.tokens) == TREE.num_draft_tokens - 1
    assert book.of(own, float(copy.chances[0]) + 0.01) == []
    book.forget("yes")
    book.forget("never there")


def test_looking_in_vain_takes_a_share_of_the_time() -> None:
    book, text = CopyBook(), [1, 2, 1]

    def looks(looked: float, step: float, saved: float | None = None, every: int = 1) -> int:
        """In 1000 steps; of those in which copies are found one in `every` verifies some."""
        count = 0
        for _ in range(1000):
            made = bool(book.of([sequence(text)], 0.0))
            count += made
            book.pay(looked if made else 0.0, step, saved=saved if made and count % every == 0 else None)
        return count

    assert looks(1e-5, 1.1e-3) == 1000  # less than its share
    ahead = MOST_AHEAD / 1e-4 + 2
    assert 100 <= looks(1e-4, 1e-3) <= 100 + ahead  # ten times its share
    # What saves time is looked for, also in vain for half of that time; what costs time is not.
    assert looks(1e-4, 1e-3, saved=1e-4) > 900
    assert looks(1e-4, 1e-3, saved=5e-4, every=3) > 900
    assert looks(1e-4, 1e-3, saved=2e-4, every=3) < 500
    assert looks(1e-4, 1e-3, saved=-1e-4) < 200
    # And after much was saved, no longer than for some milliseconds in vain.
    assert looks(1e-4, 1e-3, saved=1.0) > 900
    assert looks(1e-4, 1e-3) <= 100 + MOST_EARNED / 1e-4 + 2


def drafted(values: list[float]) -> tuple[Candidates, np.ndarray]:
    """A root's children 5 and 6, and 7 below 5."""
    columns = [[0, 0, 0], [5, 6, 7], [-1, -1, 0], [1, 1, 2]]
    logs = np.log(values)
    return Candidates(*map(np.array, columns), logs, logs, np.array(values)), np.arange(3)


def copy_of(tokens: list[int], given: float = 0.9) -> Copy:
    own = np.full(len(tokens), given)
    return Copy(0, np.array(tokens), own, own.cumprod())


@pytest.mark.parametrize(
    ("tokens", "parents", "chances"),
    [
        # What was drafted, and on below it, as likely as that is at least.
        ([5, 7, 8, 9], [2, 3], [0.9**3, 0.9**4]),
        ([6, 8], [1], [0.81]),
        # Something else than was drafted: only if nothing of that is right.
        ([8, 9], [-1, 3], [0.9 * 0.1, 0.81 * 0.1]),
        ([5, 8], [0], [0.81 * (1 - 0.5 / 0.9)]),
        ([5, 7], [], []),
    ],
)
def test_copies_go_on_where_drafts_end(tokens: list[int], parents: list[int], chances: list[float]) -> None:
    nodes, kept = drafted([0.7, 0.2, 0.5])
    both = with_copies(nodes, kept, [copy_of(tokens)])
    new = both[3:]
    assert new.parents.tolist() == parents
    assert new.tokens.tolist() == tokens[len(tokens) - len(parents) :]
    assert new.depths.tolist() == list(range(len(tokens) - len(parents) + 1, len(tokens) + 1))
    np.testing.assert_allclose(new.values, chances)
    assert all(both.values[number] <= both.values[parent] for number, parent in enumerate(both.parents.tolist()) if parent >= 0)
    assert nodes.values.tolist() == [0.7, 0.2, 0.5]  # those that the head's estimates are judged by
    above = [0.0, *nodes.scores][parents[0] + 1] if parents else 0.0
    np.testing.assert_allclose(new.scores, above + np.log(0.9) * np.arange(1, len(parents) + 1))
    trees = pack(np.array([1]), both, np.arange(len(both)))
    assert tokens in [path[path >= 0].tolist() for path in trees.paths]
    assert len({tuple(path) for path in trees.paths.tolist()}) == len(both) + 1  # nothing stands there twice


def test_below_what_was_not_kept_a_copy_begins_by_itself() -> None:
    nodes, kept = drafted([0.7, 0.2, 0.5])
    both = with_copies(nodes, kept[1:2], [copy_of([5, 7])])
    assert both[3:].parents.tolist() == [-1, 3]
    np.testing.assert_allclose(both[3:].values, [0.9 * 0.8, 0.81 * 0.8])


@pytest.mark.parametrize("seed", range(10))
def test_copies_alone_are_packed_as_any_nodes_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    owners = np.flatnonzero(rng.random(5) < 0.7).tolist() or [3]
    copies, kept, count = [], [], 0
    for owner in owners:
        length = int(rng.integers(1, 6))
        given = rng.uniform(0.1, 1.0, length)
        copies.append(Copy(owner, rng.integers(0, 9, length), given, given.cumprod()))
        kept += range(count, count + int(rng.integers(0, length + 1)))
        count += length
    roots, places, nothing = rng.integers(0, 9, 5), np.array(kept, dtype=np.int64), NOTHING.astype(np.float64)
    chosen = with_copies(Candidates(*[NOTHING] * 4, *[nothing] * 3), NOTHING, copies)[places]
    trees, found = Chains.of(copies).packed(roots, places)
    expected = pack(roots, chosen, places)
    assert trees.starts == expected.starts
    for name in ("owners", "tokens", "parents", "depths", "rows_of_chosen"):
        assert getattr(trees, name).tolist() == getattr(expected, name).tolist()
    for column, other in zip(found.columns, chosen.columns, strict=True):
        np.testing.assert_allclose(column, other)


def adaptive(node: float, **options: int) -> AdaptivePolicy:
    return AdaptivePolicy(costs(start=2.0, level=1.0, node=node), AcceptanceEstimator(TREE.num_steps), options.get("most"))


def test_as_many_are_verified_as_pay() -> None:
    """A plain step takes 10 ms and gains a token, so a node of 2.5 ms has to gain a quarter of one."""
    chances, owners = np.array([0.8, 0.5, 0.3, 0.2, 0.1]), np.zeros(5, dtype=np.int64)
    own = [sequence([1, 2, 1])]
    assert adaptive(2.5).keep_copies(own, chances, owners, NOTHING).tolist() == [0, 1, 2]
    assert adaptive(9.0).keep_copies(own, chances, owners, NOTHING).tolist() == []
    assert adaptive(0.1).keep_copies(own, chances, owners, NOTHING).tolist() == [0, 1, 2, 3, 4]
    # No more than the tree may have, those of the head included; and none in a batch that shall not be drafted for.
    assert adaptive(0.1).keep_copies(own, chances, owners, np.zeros(6, dtype=np.int64)).tolist() == [0, 1]
    assert adaptive(0.1, most=1).keep_copies(own * 2, chances, owners, NOTHING).tolist() == []
    assert FixedPolicy(None).keep_copies(own, chances, owners, NOTHING).tolist() == []


def test_a_head_is_asked_where_a_copy_may_be_wrong() -> None:
    policy, own = adaptive(0.1), [sequence([1, 2, 1])]
    assert not policy.leaves_to_copies(own, np.array([0.6]))
    assert not policy.leaves_to_copies(own, np.array([0.45]))
    assert policy.leaves_to_copies(own, np.array([0.01]))
    assert not FixedPolicy(None).leaves_to_copies(own, np.array([0.0]))


def test_what_is_verified_in_any_case_makes_copies_dear_or_cheap() -> None:
    """Where costs are stairs: five rows cost what one does, and a sixth two tokens more."""
    stairs = costs(start=2.0, level=1.0, node=0.0)
    stairs.parts["verify"] = PartCost([1.0, 5.0, 6.0, 101.0], [10.0, 10.0, 30.0, 30.0], 0.0)
    policy = AdaptivePolicy(stairs, AcceptanceEstimator(TREE.num_steps), None)
    for num_kept, expected in ((0, [0, 1]), (3, [0]), (4, []), (5, [0, 1])):
        kept = np.zeros(num_kept, dtype=np.int64)
        chances = np.array([0.8, 0.7])
        assert policy.keep_copies([sequence([1, 2, 1])], chances, np.zeros(2, dtype=np.int64), kept).tolist() == expected


def test_a_head_that_may_have_come_to_pay_is_asked() -> None:
    """Though it has not paid so far, where the copy is likely to be wrong."""
    policy = AdaptivePolicy(costs(start=500.0, level=1.0, node=0.1), AcceptanceEstimator(TREE.num_steps), None)
    assert not policy.leaves_to_copies([sequence([1, 2, 1])], np.array([0.6]))
    assert policy.leaves_to_copies([sequence([1, 2, 1])], np.array([0.4]))


def test_lengths_are_told_apart() -> None:
    kinds = [copying.kind_of(length) for length in range(1, 40)]
    assert [int(LENGTHS[kind]) for kind in kinds[:32]] == [next(int(own) for own in LENGTHS if own >= n) for n in range(1, 33)]
    assert set(kinds[31:]) == {len(LENGTHS) - 1}


def test_long_matches_count_as_the_longest_told_apart() -> None:
    phrase = list(range(40))
    text = [*phrase, 50, *phrase, 51, *phrase]
    assert longest_match(np.array(text)) == (32, 81)  # the latest of two, both of which match 40


def test_what_is_learned_of_a_copy() -> None:
    """Each of its tokens counts for a match that is one longer, up to the first that is wrong, whatever follows that."""
    seen, common = (np.ones((2, len(LENGTHS))) for _ in range(2))
    copying.learn(np.array([5, 6, 9, 8]), 2, np.array([5, 6, 7, 8, 9]), seen, common)
    for counts in (seen, common):
        right, of_all = counts
        assert (right[1:3] > right[0] * 0.99 + 0.9).all()  # after two tokens, and after three
        assert right[3] < 1.0 < of_all[3]  # and not after four
        assert (counts[:, [0, *range(4, len(LENGTHS))]] == 1.0).all()


def test_what_has_always_been_wrong_is_not_impossible() -> None:
    book, rng = CopyBook(), random.Random(3)
    text = [1]
    for _ in range(3000):
        text += [rng.randrange(2, 10**9), 1]
        copies = book.of([sequence(text)], 0.0)
    assert 0.0 < copies[0].given[0] < 0.01
    chains = Chains.of(copies)
    assert np.isfinite(chains.packed(np.zeros(1, dtype=np.int64), np.arange(len(chains.tokens)))[1].scores).all()


def test_who_has_left_is_forgotten() -> None:
    book, text = CopyBook(), [1, 2] * 20
    for count in range(2, len(text)):
        book.of([sequence(text[:count])], 0.0)
    sure = book.of([sequence(text)], 0.0)[0].given[0]
    book.forget("a")
    assert book.of([sequence(text)], 0.0)[0].given[0] < sure


def test_what_copies_take_is_not_the_heads() -> None:
    """Four copied rows of 2.5 ms beside what a head has drafted leave what is believed of drafts as it would be without them."""

    def speed(verify_ms: float, num_rows: int, num_copied: int) -> float:
        own = [sequence([1, 2, 1])]
        policy = AdaptivePolicy(costs(start=0.5, level=1.0, node=2.5), AcceptanceEstimator(TREE.num_steps), None)
        plan = policy.begin(own, [0])
        assert plan.drafters
        parts = [Observation("start", 1, 3, 0.5), Observation("verify", 1, num_rows, verify_ms)]
        plan.learn(replace(without_nodes(3, parts), num_copied=num_copied))
        return policy.prices.steps(conditions_of(own)).pace.speed

    assert speed(20.0, 5, 4) == pytest.approx(speed(10.0, 1, 0))
    assert speed(20.0, 5, 0) < 0.9 * speed(10.0, 1, 0)


def test_steps_that_are_measured_have_no_drafts_of_any_kind() -> None:
    own, policy = [sequence([1, 2, 1])], adaptive(0.1)
    were_measuring, rests, num_drafted = [], [], 0
    for _ in range(200):
        drafts = False
        if not policy.rests(1):
            policy.learn_rests(Rests(rests, 0.0))
            drafts, rests = bool(policy.begin(own, [1]).drafters), []
        if not drafts:
            rests.append((1, 10.0))
        num_drafted += drafts
        were_measuring.append(policy.is_measuring)
        assert not (policy.is_measuring and drafts)
    assert num_drafted > 100
    # Two in a row, since the first one is slower.
    assert sum(were_measuring) >= 2 * sum(b and not a for a, b in pairwise(were_measuring)) - 1 > 1
