"""What a class of the user's may draft, and what not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grown_trees import paths_of, sequences_with

from eagle_rt.speculate.forest import pack
from eagle_rt.speculate.own_drafts import candidates_of
from eagle_rt.speculate.plug_ins import made_of
from eagle_rt.tree_shape import TreeShape

ROOMY = TreeShape(9, 1, 10)


def test_trees_are_those_that_were_drafted() -> None:
    sequences = sequences_with([ROOMY, ROOMY, None, ROOMY])
    drafts: list[Any] = [
        ([7, 8, 9, 7], [-1, 0, -1, 2], [0.5, 0.5, 0.25, 1.0]),
        ([], []),
        ([1, 2], [-1, 0]),  # which may not draft
        (np.array([3, 4, 5]), np.arange(-1, 2)),
    ]
    nodes = candidates_of(sequences, drafts, vocab_size=50)
    trees = pack(np.zeros(4, dtype=np.int64), nodes, np.arange(len(nodes)))
    assert paths_of(trees, 0) == {(), (7,), (7, 8), (9,), (9, 7)}
    assert paths_of(trees, 1) == paths_of(trees, 2) == {()}
    assert paths_of(trees, 3) == {(), (3,), (3, 4), (3, 4, 5)}
    assert np.exp(nodes.scores).tolist() == pytest.approx([0.5, 0.25, 0.25, 0.25, 1, 1, 1])
    assert np.exp(nodes.log_probs).tolist() == pytest.approx([0.5, 0.5, 0.25, 1, 1, 1, 1])


def test_the_first_ones_count_where_there_is_no_room() -> None:
    tokens, parents = [1, 2, 3, 4, 5, 6], [-1, 0, 1, -1, 3, 3]
    sequences = sequences_with([TreeShape(2, 1, 10), TreeShape(9, 1, 4), TreeShape(2, 1, 5)])
    nodes = candidates_of(sequences, [(tokens, parents)] * 3, vocab_size=50)
    trees = pack(np.zeros(3, dtype=np.int64), nodes, np.arange(len(nodes)))
    assert paths_of(trees, 0) == {(), (1,), (1, 2), (4,), (4, 5), (4, 6)}
    assert paths_of(trees, 1) == {(), (1,), (1, 2), (1, 2, 3)}
    assert paths_of(trees, 2) == {(), (1,), (1, 2), (4,), (4, 5)}


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([([50], [-1])], "token 50 is outside the vocabulary of 50"),
        ([([-1], [-1])], "token -1 is outside"),
        ([([1, 2], [-1, 1])], "node 1 has the parent 1"),
        ([([1, 2], [1, -1])], "node 0 has the parent 1"),
        ([([1], [-2])], "node 0 has the parent -2"),
        ([([1, 2], [-1])], "zip"),
        ([([1], [-1], [0.0])], "node 0 has the chance 0.0"),
        ([([1], [-1], [float("nan")])], "node 0 has the chance nan"),
        ([], "zip"),
        ([([1], [-1])] * 2, "zip"),
        ([[1]], "not enough values"),
    ],
    ids=str,
)
def test_drafts_that_are_none(drafts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        candidates_of(sequences_with([ROOMY]), drafts, vocab_size=50)


def test_classes_are_found_in_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_drafts.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass Mine:\n"
        "    most: int = 3\n    draft = lambda self, sequences: []\n\n\nclass Half(Mine):\n    draft = None\n\n\n"
        "class Picky(Mine):\n    def __init__(self, number):\n        pass\n"
    )
    assert made_of("--flag", f"{file}:Mine", ["draft"]).most == 3
    monkeypatch.syspath_prepend(tmp_path)
    assert type(made_of("--flag", "my_drafts:Mine", ["draft"])).__name__ == "Mine"
    for name, message in [
        (f"{file}:Yours", "has no attribute 'Yours'"),
        (f"{file}:Half", "has no method draft"),
        (f"{file}:Picky", "missing 1 required positional argument"),
        (f"{tmp_path / 'nothing.py'}:Mine", "FileNotFoundError"),
        ("no_such_drafts:Mine", "No module named 'no_such_drafts'"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            made_of("--flag", name, ["draft"])
        assert f"--flag {name}" in str(error.value)
