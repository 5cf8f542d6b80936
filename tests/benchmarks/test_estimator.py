"""The benchmark of the acceptance estimator runs through, and its fit finds what made the nodes up."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import estimator
from eagle_rt.speculate.acceptance import NUM_SHARED, AcceptanceEstimator, VerifiedNodes


def made_up_step(truth: AcceptanceEstimator, rng: np.random.Generator) -> estimator.Step:
    """A chain of three nodes below a root of three children, accepted as often as `truth` says."""
    parents, depths = np.array([-1, -1, -1, 0, 3]), np.array([1, 1, 1, 2, 3])
    log_probs = np.log(rng.uniform(0.02, 0.98, 5))
    scores = log_probs + np.array([0.0, 0.0, 0.0, log_probs[0], log_probs[0] + log_probs[3]])
    nodes = VerifiedNodes(log_probs, scores, depths, np.full(5, rng.choice([0.0, 1.0])), np.exp(scores), np.zeros(5), depths < 2)
    chosen = rng.uniform(size=5) < truth.probabilities(estimator.inputs_of(nodes, truth), np.zeros(5))
    labels, is_asked = chosen.astype(float), depths < 2
    for place, parent in enumerate(parents):
        if parent >= 0:
            labels[place] *= labels[parent]
            is_asked[place] = labels[parent] > 0
    return estimator.Step(nodes._replace(labels=labels, is_asked=is_asked), parents)


def test_a_fit_finds_what_made_the_nodes_up() -> None:
    rng = np.random.default_rng(0)
    truth = AcceptanceEstimator(3, [0.7, -0.3, 0.1, 0.4, -0.5, 0.2, 0.6])
    steps = [made_up_step(truth, rng) for _ in range(12_000)]
    weights = np.array(estimator.fitted_weights(steps, max_depth=3))
    assert np.abs(weights - truth.weights)[: NUM_SHARED + 1].max() < 0.12
    fitted = AcceptanceEstimator(3, weights.tolist())
    given, meant = (np.concatenate([step.chances(own) for step in steps]) for own in (fitted, truth))
    assert np.abs(given - meant).mean() < 0.02
    # What learns while it runs comes near, and nearer than the cold start.
    learning = estimator.while_running(steps, AcceptanceEstimator(3))
    cold = np.concatenate([step.chances(AcceptanceEstimator(3)) for step in steps])
    nodes = estimator.together(steps)
    scores = [estimator.brier(chances, nodes) for chances in (meant, learning, cold)]
    assert scores[0] <= scores[1] < scores[2] - 0.01


def test_a_node_is_as_likely_as_all_on_its_path() -> None:
    step = made_up_step(AcceptanceEstimator(3), np.random.default_rng(1))
    same = AcceptanceEstimator(3, [1.0, 0.0, 0.0, 0.0, 0.0])  # chosen as the head says
    assert np.allclose(step.chances(same), step.nodes.chances)


def test_it_compares_nodes_of_real_drafts(
    target_dir: Path, head_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = f"--device cpu --model-path {target_dir} --speculative-draft-model-path {head_dir} --max-total-tokens 2048"
    (tmp_path / "sums.jsonl").write_text("\n".join(json.dumps({"prompt": f"{number} and {number}?"}) for number in range(3)))
    settings = f"--datasets sums --dataset-dir {tmp_path} --num-prompts 3 --temperatures 0 1 --fit-temperatures 0 1 --tree 2,2,5"
    output = tmp_path / "results"
    command = f"{pair} {settings} --max-new-tokens 8 --output {output}"
    monkeypatch.setattr(sys, "argv", ["estimator.py", *command.split()])
    estimator.main()
    (file,) = output.glob("*.json")
    document = json.loads(file.read_text())
    assert len(document["weights"]) == NUM_SHARED + 2
    assert [row["temperature"] for row in document["rows"]] == [0, 1]
    for row in document["rows"]:
        assert row["nodes"] > 10
        assert all(0 <= row[name] <= 1 for name in ("head", "sharpened", "cold", "learning", "anew"))
