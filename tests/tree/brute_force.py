"""Draft trees in plain Python: dictionaries from paths to numbers, nothing shared with the package."""

import hashlib
import math
import random
from collections.abc import Callable

Path = tuple[int, ...]


def path_logits(path: Path, vocab_size: int, seed: int, levels: int | None) -> list[float]:
    """Logits after a path, a function of the path; with `levels`, few distinct values, so that scores tie."""
    digest = hashlib.sha256(repr((seed, path)).encode()).digest()
    rng = random.Random(digest)
    if levels is not None:
        return [float(rng.randrange(levels)) for _ in range(vocab_size)]
    return [rng.gauss(0, 2) for _ in range(vocab_size)]


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.log(sum(math.exp(value - top) for value in logits)) + top
    return [value - total for value in logits]


def expand(num_steps: int, top_k: int, logits_after: Callable[[Path], list[float]]) -> dict[Path, float]:
    """Every candidate's score, level after level, by EAGLE-2's beam search."""
    scores: dict[Path, float] = {}
    beam: list[Path] = [()]
    for _ in range(num_steps):
        level = {}
        for path in beam:
            log_probabilities = log_softmax(logits_after(path))
            best = sorted(range(len(log_probabilities)), key=lambda token: -log_probabilities[token])[:top_k]
            for token in best:
                level[(*path, token)] = scores.get(path, 0.0) + log_probabilities[token]
        scores.update(level)
        beam = sorted(level, key=lambda path: -level[path])[:top_k]
    return scores


def best_subtree(scores: list[float], size: int) -> set[int]:
    """The `size` nodes that come first by score, then by number."""
    order = sorted(range(len(scores)), key=lambda node: (-scores[node], node))
    return set(order[:size])


def ancestors(parents: list[int], node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


def walk(parents: list[int], tokens: list[int], choice: list[int]) -> list[int]:
    """Node numbers from the root along the target's choices."""
    path = [0]
    while True:
        children = [node for node in range(len(parents)) if parents[node] == path[-1]]
        matching = [node for node in children if tokens[node] == choice[path[-1]]]
        if not matching:
            return path
        path.append(matching[0])
