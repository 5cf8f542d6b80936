"""Trees that are drawn once, in a file: a JSON list of paths, each the ranks that lead from the root to one node.

`[[0], [1], [0, 0]]` is the head's two best tokens, and below the best one its best again. EAGLE-1 and Medusa (Cai et al., 2024,
section 2.1.2) write their trees so.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from eagle_rt.tree_shape import TreeShape

RankPath = tuple[int, ...]


def read_paths(file: str | Path) -> list[RankPath]:
    """Shorter ones first.

    Raises:
        ValueError: the file is not there, is no such list, names a node twice or one whose parent it does not name.
    """
    try:
        document = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"the tree {file} can't be read: {error}") from None
    if not (isinstance(document, list) and document and all(map(is_path, document))):
        raise ValueError(f"the tree {file} must be a list of paths, each a list of ranks from 0 on, as [[0], [1], [0, 0]]")
    paths = parents_first(map(tuple, document))
    known: set[RankPath] = {()}
    for path in paths:
        if path in known:
            raise ValueError(f"the tree {file} names {list(path)} twice")
        if path[:-1] not in known:
            raise ValueError(f"the tree {file} has {list(path)}, but not its parent {list(path[:-1])}")
        known.add(path)
    return paths


def is_path(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(rank) is int and rank >= 0 for rank in value)


def write_paths(file: Path, paths: Iterable[RankPath]) -> None:
    file.write_text("[" + ",\n ".join(map(json.dumps, parents_first(paths))) + "]\n")


def parents_first(paths: Iterable[RankPath]) -> list[RankPath]:
    return sorted(paths, key=lambda path: (len(path), path))


def within(paths: list[RankPath], shape: TreeShape) -> list[RankPath]:
    """What is left of a tree in bounds: of its nodes within so many steps and ranks as many as there may be, those that pass over
    the fewest better ones and lie the least deep."""
    allowed = [path for path in paths if len(path) <= shape.num_steps and max(path) < shape.top_k]
    likeliest = sorted(allowed, key=lambda path: (sum(path) + len(path), path))
    return parents_first(likeliest[: shape.num_draft_tokens - 1])


def shape_of(paths: list[RankPath]) -> TreeShape:
    return TreeShape(max(map(len, paths)), 1 + max(map(max, paths)), 1 + len(paths))
