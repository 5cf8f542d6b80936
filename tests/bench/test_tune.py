import json
import random
from pathlib import Path

import pytest

import bench_speculative
from eagle_rt.bench import tune
from eagle_rt.bench.sweep import Setting
from eagle_rt.bench.tune import Round, Tuned, fixed_trees, halving, overall_best
from eagle_rt.tree_shape import TreeShape, num_tree_nodes


def keeps(candidate: str) -> bool:
    return candidate == "the slowest"


@pytest.mark.parametrize("seed", range(5))
def test_halving_finds_the_fastest_in_fewer_runs(seed: int) -> None:
    """Speeds are noisy, the less the later the round. What has to stay stays."""
    rng = random.Random(seed)
    true = {f"setting {index}": 100 + 2.0 * index for index in range(27)}
    runs: list[int] = []

    def measure(left: list[str], number: int) -> dict[str, float]:
        runs.append(len(left))
        return {candidate: true[candidate] * (1 + rng.uniform(-0.06, 0.06) / (1 + 3 * number)) for candidate in left}

    speeds = halving(["the slowest", *true], lambda left, number: {"the slowest": 1.0} | measure(left[1:], number), 3, keeps)
    assert speeds.pop("the slowest") == 1.0
    assert len(speeds) == 3
    best = max(speeds, key=lambda candidate: speeds[candidate])
    assert true[best] >= 0.95 * max(true.values())
    assert runs == [27, 9, 3]


def test_every_tree_can_be_drafted() -> None:
    trees = fixed_trees()
    assert len(trees) == len(set(trees))
    for tree in trees:
        assert tree.num_steps < tree.num_draft_tokens <= num_tree_nodes(tree.num_steps, tree.top_k)


def test_the_tree_that_is_best_on_the_whole() -> None:
    one, two, three = (Setting(1, TreeShape(steps, 1, steps + 1)) for steps in (1, 2, 3))
    results = [Tuned(1, 0.0, {one: 100.0, two: 95.0}), Tuned(1, 1.0, {one: 50.0, two: 98.0, three: 100.0})]
    assert overall_best(results, "fixed") == two.tree


def test_tuning_end_to_end(
    target_dir: Path, head_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "ROUNDS", (Round(6, 1, 1, 1.0), Round(6, 1, 2, 1.0)))
    monkeypatch.setattr(tune, "GROUP_SIZE", 3)
    monkeypatch.setattr(tune, "STEPS", (1, 2))
    monkeypatch.setattr(tune, "NUM_TOKENS", (4,))
    monkeypatch.setattr(tune, "ADAPTIVE_BOUNDS", (TreeShape(3, 2, 8),))
    file = tmp_path / "profile.json"
    pair = f"--model-path {target_dir} --speculative-draft-model-path {head_dir} --device cpu"
    assert bench_speculative.main(f"{pair} --tune --batch-size 1 2 --num-prompts 2 --profile-output {file}".split()) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    document = json.loads(lines[-1])
    assert [(row["batch_size"], row["temperature"]) for row in document["best"]] == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    for row in document["best"]:
        assert row["none"] > 0
        assert row["fixed"]["tokens_per_second"] > 0
        assert row["adaptive"]["tokens_per_second"] > 0
    assert lines[-2] == f"use it: --speculative-algorithm EAGLE3 --speculative-profile {file}"
    status = bench_speculative.main(
        f"{pair} --speculative-profile {file} --adaptive --steps 2 --topk 2 --num-draft-tokens 4 --num-prompts 2 "
        f"--max-new-tokens 12 --repeats 1 --max-total-tokens 2048 --plot {tmp_path / 'plots'}".split()
    )
    assert status == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
    assert [row["kind"] for row in rows] == ["none", "fixed", "adaptive"]
    assert rows[2]["mean_tree_size"] >= 1
    assert {plot.stem for plot in (tmp_path / "plots").glob("*.png")} == {
        "speedup_batch_1",
        "pareto_batch_1",
        "acceptance_batch_1",
        "tree_size_batch_1",
        "reliability_batch_1",
        "tokens_per_second",
    }
