"""Trees in files."""

from pathlib import Path

import pytest

from eagle_rt.tree.paths import read_paths, shape_of, within, write_paths
from eagle_rt.tree_shape import TreeShape


def test_what_was_written_is_read_parents_first(tmp_path: Path) -> None:
    paths = [(0, 1), (2,), (0,), (0, 1, 4)]
    write_paths(tmp_path / "tree.json", paths)
    assert read_paths(tmp_path / "tree.json") == [(0,), (2,), (0, 1), (0, 1, 4)]
    assert shape_of(paths) == TreeShape(num_steps=3, top_k=5, num_draft_tokens=5)


@pytest.mark.parametrize(
    ("bounds", "left"),
    [
        (TreeShape(3, 3, 9), [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]),
        (TreeShape(2, 3, 9), [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]),
        (TreeShape(3, 1, 9), [(0,), (0, 0), (0, 0, 0)]),
        (TreeShape(3, 3, 5), [(0,), (1,), (0, 0), (0, 0, 0)]),
        (TreeShape(3, 3, 2), [(0,)]),
    ],
    ids=["all", "less deep", "narrower", "smaller", "one"],
)
def test_a_tree_in_bounds(bounds: TreeShape, left: list[tuple[int, ...]]) -> None:
    paths = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]
    assert within(paths, bounds) == left
    assert within(paths, shape_of(left)) == left


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't be read: .*No such file"),
        ("[[0], [0, ", "can't be read: "),
        ("{}", "must be a list of paths"),
        ("[]", "must be a list of paths"),
        ("[[0], []]", "must be a list of paths"),
        ("[[0], [-1]]", "must be a list of paths"),
        ("[[0], [true]]", "must be a list of paths"),
        ("[[0], [0.5]]", "must be a list of paths"),
        ("[[0], [1], [0]]", r"names \[0\] twice"),
        ("[[0], [1, 0]]", r"has \[1, 0\], but not its parent \[1\]"),
    ],
)
def test_files_that_hold_no_tree(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "tree.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_paths(file)
    assert str(file) in str(error.value)
