import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_rt.tree.expand import Beam, Candidates, first_level, next_level
from tree import brute_force

VOCAB_SIZE = 17


def column(candidates: Candidates, name: str, row: int) -> list:
    """One field of one batch row over all levels."""
    return [value for level in candidates for value in getattr(level, name)[row].tolist()]


def paths_of(candidates: Candidates, row: int) -> list[brute_force.Path]:
    paths: list[brute_force.Path] = []
    for token, parent in zip(column(candidates, "tokens", row), column(candidates, "parents", row), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def logits_after(paths: list[brute_force.Path], seed: int, levels: int | None = None) -> Tensor:
    return torch.tensor([brute_force.path_logits(path, VOCAB_SIZE, seed, levels) for path in paths], dtype=torch.float64)


def grow(seeds: list[int], num_steps: int, top_k: int, levels: int | None = None) -> tuple[Candidates, Beam]:
    """The package's expansion, with one random model per batch row."""
    candidates, beam = first_level(torch.cat([logits_after([()], seed, levels) for seed in seeds]), top_k)
    for _ in range(num_steps - 1):
        logits = []
        for row, seed in enumerate(seeds):
            paths = paths_of(candidates, row)
            logits.append(logits_after([paths[number] for number in beam.candidates[row].tolist()], seed, levels))
        candidates, beam = next_level(candidates, beam, torch.stack(logits))
    return candidates, beam


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 5))
def test_expansion_equals_brute_force(seeds: list[int], num_steps: int, top_k: int) -> None:
    candidates, _ = grow(seeds, num_steps, top_k)
    for row, seed in enumerate(seeds):
        expected = brute_force.expand(
            num_steps, top_k, lambda path, seed=seed: brute_force.path_logits(path, VOCAB_SIZE, seed, None)
        )
        found = dict(zip(paths_of(candidates, row), column(candidates, "scores", row), strict=True))
        assert found.keys() == expected.keys()
        assert all(found[path] == pytest.approx(expected[path], abs=1e-4) for path in expected)
        depths = [depth for depth, level in enumerate(candidates, start=1) for _ in range(level.tokens.shape[1])]
        assert [len(path) for path in paths_of(candidates, row)] == depths


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 4))
def test_beam_rows_see_their_own_ancestors_and_no_one_else(seed: int, num_steps: int, top_k: int) -> None:
    """Feed the beams in order, and compare each visible row with the path's own prefixes."""
    candidates, beam = grow([seed], 1, top_k)
    fed: list[brute_force.Path] = []
    for level in range(1, num_steps + 1):
        paths = paths_of(candidates, 0)
        beam_paths = [paths[number] for number in beam.candidates[0].tolist()]
        fed += beam_paths
        for row, path in enumerate(beam_paths):
            visible = {fed[column] for column in beam.visible[0, row].nonzero()[:, 0].tolist()}
            assert visible == {path[:length] for length in range(1, level + 1)}
        assert beam.visible.shape[2] == top_k * level
        candidates, beam = next_level(candidates, beam, logits_after(beam_paths, seed)[None])


def test_a_row_of_nan_has_distinct_tokens_that_cannot_be_accepted() -> None:
    logits = torch.randn(2, VOCAB_SIZE)
    logits[0, 3] = torch.nan
    candidates, _ = first_level(logits, 4)
    (level,) = candidates
    assert torch.isneginf(level.scores[0]).all()
    assert len(set(level.tokens[0].tolist())) == 4
    assert torch.isfinite(level.scores[1]).all()
