"""The likeliest tree of every size: from counts, by brute force, and through an engine."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from eagle_rt.bench import static_tree
from eagle_rt.bench.static_tree import likeliest, shares_right
from eagle_rt.trace import StepTrace
from eagle_rt.tree.paths import read_paths


def trace(path: list[int]) -> StepTrace:
    """The root has two children, the second being the head's favourite, of which each has two, and one of these a single one."""
    tokens, parents = [5, 6, 7, 8, 9, 10, 11, 12], [-1, 0, 0, 1, 1, 2, 2, 3]
    scores = [0.0, -1.0, -0.5, -1.5, -1.25, -2.0, -3.0, -1.75]
    return StepTrace(3, tokens, parents, scores, None, path, [0] * len(path))


def test_shares_are_of_those_that_came_so_far() -> None:
    traces = [trace([0]), trace([0, 2]), trace([0, 2, 5]), trace([0, 1, 3]), trace([0, 1, 3, 7])]
    shares = shares_right(traces, num_steps=3, top_k=2)
    assert shares[0].tolist() == [2 / 5, 2 / 5]
    assert shares[1].tolist() == [1 / 4, 2 / 4]
    assert shares[2].tolist() == [0, 0]  # below the deepest nodes not all children were drafted


@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_nodes_make_a_tree(seed: int) -> None:
    shares = np.random.default_rng(seed).dirichlet(np.ones(4), size=3)[:, :3]
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    chances = {path: float(np.prod([shares[depth, rank] for depth, rank in enumerate(path)])) for path in every}
    for most_nodes in (1, 4, 11, 100):
        found = likeliest(shares, most_nodes)
        best = sorted(chances.values(), reverse=True)[:most_nodes]
        assert [chance for _, chance in found] == pytest.approx(best)
        assert all(chance == pytest.approx(chances[path]) for path, chance in found)
        known = {(), *(path for path, _ in found)}
        assert all(path[:-1] in known for path, _ in found)


def test_nodes_that_are_never_right_are_left_out() -> None:
    assert [path for path, _ in likeliest(np.array([[0.5, 0.0], [0.2, 0.1]]), 100)] == [(0,), (0, 0), (0, 1)]


def test_the_tree_of_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tree.json"
    arguments = f"--device cpu --num-prompts 3 --max-new-tokens 24 --num-draft-tokens 9 --output {file}"
    numbers = "--speculative-num-steps 4 --speculative-eagle-topk 3"
    assert static_tree.main([*arguments.split(), *numbers.split()]) == 0
    paths = read_paths(file)
    assert len(paths) == 8
    assert [list(path) for path in paths] == json.loads(file.read_text())
    assert paths[0] == (0,)
    assert max(map(len, paths)) <= 4
    output = capsys.readouterr().out
    assert f"--speculative-algorithm EAGLE3 --speculative-tree {file}" in output
    assert "9): " in output


def test_heads_that_are_never_right_have_no_tree(
    target_dir: Path, head_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        f"--model-path {target_dir} --speculative-draft-model-path {head_dir} --device cpu --num-prompts 1 --max-new-tokens 2"
    )
    arguments += (
        f" --speculative-fit-check off --speculative-num-steps 1 --speculative-eagle-topk 1 --output {tmp_path / 'tree.json'}"
    )
    assert static_tree.main(arguments.split()) == 1
    assert "no draft was right in 1 steps" in capsys.readouterr().err
    assert not (tmp_path / "tree.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-draft-tokens 1", "--num-draft-tokens is 1, but must be at least 2"),
        ("--speculative-algorithm NGRAM", "--speculative-algorithm is NGRAM, but must be one with a head"),
    ],
)
def test_what_cannot_be_counted(flags: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert static_tree.main([*flags.split(), "--output", str(tmp_path / "tree.json")]) == 1
    assert message in capsys.readouterr().err
