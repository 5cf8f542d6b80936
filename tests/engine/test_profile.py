"""What a tuning run leaves behind, and who may use it."""

import json
from pathlib import Path

import pytest
from engines import make_config

from eagle_rt.config import EngineConfig
from eagle_rt.engine.build import build_core
from eagle_rt.engine.load import ModelInfo, model_info
from eagle_rt.engine.profile import Profile, default_file, find_profile, read_profile, subject_of
from eagle_rt.speculate.adaptive import AdaptivePolicy
from eagle_rt.speculate.costs import PartCost, StepCosts
from eagle_rt.tree_shape import TreeShape

COSTS = StepCosts({name: PartCost([1.0, 2.0], [3.0, 3.5], 0.1) for name in ("start", "level", "verify")})


def config_for(target_dir: Path, head_dir: Path, **options: object) -> tuple[EngineConfig, ModelInfo]:
    config = make_config(target_dir, head_dir, (1, 1, 2), **options)
    return config, model_info(config)


def profile_for(config: EngineConfig, info: ModelInfo) -> Profile:
    weights = [0.9, -0.1, 0.0, 0.1, -0.5]
    return Profile(subject_of(config, info), TreeShape(4, 2, 9), TreeShape(2, 1, 3), COSTS, weights, [{"batch_size": 1}])


@pytest.mark.parametrize(("tree", "expected"), [("adaptive", TreeShape(4, 2, 9)), ("fixed", TreeShape(2, 1, 3))])
def test_an_engine_takes_what_it_says(
    target_dir: Path, head_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: str, expected: TreeShape
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {
        "speculative_profile": "auto",
        "speculative_tree": tree,
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
    }
    config, info = config_for(target_dir, head_dir, **options)
    _, notes = build_core(config, info)
    assert any("no profile for this model and machine" in note for note in notes)

    profile = profile_for(config, info)
    profile.write(default_file(profile.subject))
    core, notes = build_core(config, info)
    assert core.runner.tree_shape == expected
    assert any(note.startswith(f"profile {tmp_path}") for note in notes)
    stepper = core.runner.host_stepper
    assert stepper
    if tree == "adaptive":
        assert not any("measured what steps cost" in note for note in notes)
        assert isinstance(stepper.policy, AdaptivePolicy)
        assert stepper.policy.costs.to_json() == COSTS.to_json()
        assert stepper.policy.estimator.weights[:5].tolist() == [0.9, -0.1, 0.0, 0.1, -0.5]

    own, _ = config_for(target_dir, head_dir, speculative_profile="auto", speculative_tree=tree)
    assert build_core(own, info)[0].runner.tree_shape == TreeShape(1, 1, 2), "the user's own numbers come first"


def test_what_a_profile_was_made_for(target_dir: Path, head_dir: Path, tmp_path: Path, built_in: Path) -> None:
    config, info = config_for(target_dir, head_dir)
    profile, file = profile_for(config, info), tmp_path / "profile.json"
    profile.write(file)
    read = read_profile(file, profile.subject)
    assert (read.subject, read.bounds, read.fixed, read.weights, read.best) == (
        profile.subject,
        profile.bounds,
        profile.fixed,
        profile.weights,
        profile.best,
    )
    other, other_info = config_for(built_in / "target", built_in / "eagle3", speculative_profile=str(file))
    with pytest.raises(ValueError, match=r"was made for model \w+, and this is \w+: make one with bench_speculative.py --tune"):
        find_profile(other, other_info)
    half, _ = config_for(target_dir, head_dir, dtype="bfloat16", speculative_profile=str(file))
    with pytest.raises(ValueError, match="was made for dtype float32, and this is bfloat16"):
        find_profile(half, info)
    rounded, _ = config_for(target_dir, head_dir, speculative_draft_model_quantization="auto", speculative_profile=str(file))
    with pytest.raises(ValueError, match="was made for draft_quantization none, and this is auto"):
        find_profile(rounded, info)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: "{not json", "cannot be read"),
        (lambda document: "[]", "cannot be read"),
        (lambda document: json.dumps({**document, "format": 99}), "is of format 99, and this is format 8"),
        (lambda document: json.dumps({**document, "costs": {}}), "is damaged"),
        (lambda document: json.dumps({**document, "estimator": ["x"]}), "is damaged"),
        (lambda document: json.dumps({**document, "estimator": []}), "is damaged"),
        (lambda document: json.dumps({**document, "estimator": [float("nan")] * 9}), "some that are no numbers"),
        (lambda document: json.dumps(document).replace('"per_sequence": 0.1', '"per_sequence": Infinity'), "are no table"),
        (lambda document: json.dumps({**document, "bounds": {"num_steps": 1, "top_k": 1, "num_draft_tokens": 9}}), "no such tree"),
    ],
)
def test_a_damaged_profile(target_dir: Path, head_dir: Path, tmp_path: Path, change: object, message: str) -> None:
    config, info = config_for(target_dir, head_dir)
    profile, file = profile_for(config, info), tmp_path / "profile.json"
    profile.write(file)
    file.write_text(change(json.loads(file.read_text())))  # type: ignore[operator]
    with pytest.raises(ValueError, match=message) as error:
        read_profile(file, profile.subject)
    assert str(file) in str(error.value)


def test_a_profile_that_is_not_there(target_dir: Path, head_dir: Path, tmp_path: Path) -> None:
    config, info = config_for(target_dir, head_dir, speculative_profile=str(tmp_path / "nothing.json"))
    with pytest.raises(ValueError, match=r"nothing\.json does not exist"):
        find_profile(config, info)
