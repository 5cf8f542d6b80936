"""Trees by rules: drawn ones against what the ranks say, and rules that are wrong."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grown_trees import grown, node_logits, paths_of, sequences_with

from eagle_rt.speculate.forest import Candidates
from eagle_rt.speculate.policy import FixedPlan, FixedPolicy, StepRecord
from eagle_rt.speculate.tree_rules import RuledPlan, RuledPolicy, StaticTree, load_rule, ranks_of_siblings
from eagle_rt.tree.expand import top_children
from eagle_rt.tree.paths import RankPath, shape_of
from eagle_rt.tree_shape import TreeShape

PATHS: list[RankPath] = [(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (3, 0), (0, 2, 0), (3, 0, 1)]
WHOLE = shape_of(PATHS)


class Everything:
    def expand(self, level: Candidates, sequences: Any) -> Any:
        return np.arange(len(level))

    def keep(self, candidates: Candidates, sequences: Any) -> Any:
        return np.arange(len(candidates))


def tokens_of(path: RankPath, sequence: int, top_k: int) -> tuple[int, ...]:
    """What the made-up logits have at these ranks."""
    tokens: tuple[int, ...] = ()
    for rank in path:
        tokens += (int(top_children(node_logits([tokens], sequence)[0], top_k)[1][rank]),)
    return tokens


def ruled(rule: Any, shapes: list[TreeShape | None]) -> RuledPlan:
    plan = RuledPolicy(rule, None).begin(sequences_with(shapes), [0] * len(shapes))
    assert isinstance(plan, RuledPlan)
    return plan


def test_a_drawn_tree_has_the_nodes_that_its_ranks_lead_to() -> None:
    shapes = [WHOLE, None, WHOLE]
    trees = grown(ruled(StaticTree(PATHS), shapes), shapes)
    for sequence in (0, 2):
        assert paths_of(trees, sequence) == {tokens_of(path, sequence, WHOLE.top_k) for path in [(), *PATHS]}
    assert paths_of(trees, 1) == {()}


def test_children_that_the_tree_does_not_know_are_no_nodes_of_it() -> None:
    shapes = [TreeShape(3, WHOLE.top_k + 2, 20)]
    trees = grown(ruled(StaticTree(PATHS), shapes), shapes)
    assert paths_of(trees, 0) == {tokens_of(path, 0, WHOLE.top_k) for path in [(), *PATHS]}


@pytest.mark.parametrize(
    ("bounds", "allowed"),
    [
        (TreeShape(2, 4, 10), lambda path: len(path) <= 2),
        (TreeShape(3, 2, 10), lambda path: max(path) < 2),
        (TreeShape(1, 1, 2), lambda path: path == (0,)),
    ],
    ids=["less deep", "narrower", "one"],
)
def test_a_request_may_want_less_of_it(bounds: TreeShape, allowed: Any) -> None:
    shapes = [WHOLE, bounds]
    trees = grown(ruled(StaticTree(PATHS), shapes), shapes)
    wanted = {tokens_of(path, 1, bounds.top_k) for path in PATHS if allowed(path)}
    assert paths_of(trees, 1) == {(), *wanted}
    assert len(paths_of(trees, 0)) == WHOLE.num_draft_tokens


def test_of_too_many_nodes_the_best_are_left() -> None:
    few = TreeShape(3, 4, 5)
    trees = grown(ruled(StaticTree(PATHS), [few]), [few])

    def score(path: RankPath) -> float:
        tokens = tokens_of(path, 0, 4)
        log_probs = [top_children(node_logits([tokens[:depth]], 0)[0], 4)[0][path[depth]] for depth in range(len(path))]
        return float(sum(log_probs))

    best = sorted(PATHS, key=score, reverse=True)[:4]
    assert paths_of(trees, 0) == {(), *(tokens_of(path, 0, 4) for path in best)}


def test_a_rule_that_wants_everything_gets_what_there_is_room_for() -> None:
    shapes: list[TreeShape | None] = [TreeShape(4, 3, 12), TreeShape(2, 5, 9)]
    plan, num_expanded = ruled(Everything(), shapes), np.zeros(2)
    expand = plan.expand

    def counted(level: Candidates) -> Any:
        nonlocal num_expanded
        places = expand(level)
        num_expanded += np.bincount(level.owners[places], minlength=2)
        return places

    plan.expand = counted
    trees = grown(plan, shapes)
    assert [stop - start for start, stop in zip(trees.starts, trees.starts[1:], strict=False)] == [12, 9]
    assert (num_expanded <= [max(12, 3 * 3), max(9, 5)]).all()
    assert num_expanded[1] == 5  # a level of five nodes, and none below the next
    assert max(map(len, paths_of(trees, 0))) <= 4


def test_the_numbers_may_be_a_beam_of_its_own() -> None:
    """A rule that does what EAGLE-2 does makes the trees that a fixed plan makes."""

    class Beam:
        def expand(self, level: Candidates, sequences: Any) -> Any:
            order = np.lexsort((-level.scores, level.owners))
            ranks = np.empty(len(level), dtype=int)
            for owner in np.unique(level.owners):
                own = order[level.owners[order] == owner]
                ranks[own] = np.arange(len(own))
            return np.flatnonzero(ranks < [sequences[owner].bounds.top_k for owner in level.owners])

        def keep(self, candidates: Candidates, sequences: Any) -> Any:
            return np.arange(len(candidates))

    shapes: list[TreeShape | None] = [TreeShape(3, 2, 8), TreeShape(5, 4, 16), TreeShape(4, 1, 5)]
    expected = grown(FixedPlan(sequences_with(shapes)), shapes)
    trees = grown(ruled(Beam(), shapes), shapes)
    assert [paths_of(trees, own) for own in range(3)] == [paths_of(expected, own) for own in range(3)]


def test_ranks_of_siblings() -> None:
    owners, parents = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([3, 3, 4, 4, 4, 4, 4])
    zeros = np.zeros(7)
    level = Candidates(owners, owners, parents, owners, zeros, zeros, zeros)
    assert ranks_of_siblings(level).tolist() == [0, 1, 0, 1, 0, 1, 0]


class Wrong(Everything):
    """Everything but for one answer."""

    def __init__(self, question: str, answer: Any) -> None:
        self._wrong = {question: answer}

    def expand(self, level: Candidates, sequences: Any) -> Any:
        return self._answer("expand", super().expand(level, sequences))

    def keep(self, candidates: Candidates, sequences: Any) -> Any:
        return self._answer("keep", super().keep(candidates, sequences))

    def _answer(self, question: str, right: Any) -> Any:
        answer = self._wrong.get(question, right)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("question", ["expand", "keep"])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RuntimeError("no idea"), "RuntimeError: no idea"),
        (None, "must give an array of whole numbers"),
        ([0.5], "must give an array of whole numbers"),
        ([True], "must give an array of whole numbers"),
        ([[0]], "must give an array of whole numbers"),
        ([-1, 0], "must give numbers from 0 to"),
        ([0, 10**6], "must give numbers from 0 to"),
        ([1, 0], "ascending"),
        ([0, 0], "ascending"),
    ],
    ids=str,
)
def test_a_rule_that_is_wrong_is_told_of_and_not_asked_again(
    question: str, answer: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy, shapes = RuledPolicy(Wrong(question, answer), None), [TreeShape(3, 2, 8)]
    sequences = sequences_with(shapes)
    with caplog.at_level(logging.ERROR):
        assert paths_of(grown(policy.begin(sequences, [0]), shapes), 0) == {()}
    assert policy.failure.startswith(f"Wrong.{question}: ")
    assert message in policy.failure
    assert policy.failure in caplog.text
    fixed = grown(FixedPolicy(None).begin(sequences, [0]), shapes)
    assert paths_of(grown(policy.begin(sequences, [0]), shapes), 0) == paths_of(fixed, 0)


def test_nodes_without_their_parents() -> None:
    policy, shapes = RuledPolicy(Wrong("keep", [0, 1, 2, 6]), None), [TreeShape(3, 3, 8)]
    grown(policy.begin(sequences_with(shapes), [0]), shapes)
    assert policy.failure == ""  # the seventh is below the second
    policy = RuledPolicy(Wrong("keep", [0, 2, 6]), None)
    grown(policy.begin(sequences_with(shapes), [0]), shapes)
    assert "node 6 is kept, but not its parent 1" in policy.failure


def test_rules_that_learn_are_told() -> None:
    class Learning(Everything):
        records: list[Any] = []

        def learn(self, record: Any) -> None:
            self.records.append(record)
            if record.num_gained > 2:
                raise KeyError("three")

    rule = Learning()
    policy = RuledPolicy(rule, None)
    plan = policy.begin(sequences_with([TreeShape(1, 1, 2)]), [0])
    nothing = Candidates(*[np.zeros(0)] * 7)
    for num_gained in (1, 3, 1):
        plan.learn(StepRecord(nothing, np.zeros(0, dtype=np.int64), lambda: np.zeros(0), num_gained, []))
    assert [record.num_gained for record in rule.records] == [1, 3]
    assert policy.failure == "Learning.learn: KeyError: 'three'"
    ruled(Everything(), [TreeShape(1, 1, 2)]).learn(rule.records[0])  # and others are not


def test_what_is_no_rule(tmp_path: Path) -> None:
    file = tmp_path / "my_trees.py"
    file.write_text("class Half:\n    def expand(self, level, sequences):\n        return []\n")
    for name, message in [(f"{file}:Half", "has no method keep"), (f"{tmp_path / 'nothing.json'}", "can't be read")]:
        with pytest.raises(ValueError, match=message) as error:
            load_rule(name, WHOLE)
        assert name in str(error.value)
