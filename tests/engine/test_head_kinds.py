"""Whatever head drafts, the text is what the target writes alone."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import head_layouts
import mtp_layouts
import pytest
from engines import make_core, random_prompts, run

from eagle_rt.engine.params import SamplingParams

PROMPTS = random_prompts(4, seed=11)
SETTINGS = {
    "greedy": [SamplingParams(temperature=0, max_new_tokens=24)] * 4,
    "seeded": [SamplingParams(temperature=1.0, top_p=0.9, seed=index, max_new_tokens=24) for index in range(4)],
}
OWN_LAYERS = {
    "mtp": mtp_layouts.write_mimo,
    "mtp-glm": mtp_layouts.write_nextn,
    "mtp-deepseek": partial(mtp_layouts.write_nextn, name="deepseek-v3"),
    "mtp-qwen3.5": mtp_layouts.write_qwen3_5,
}
KINDS = [
    "eagle-llama3",
    "eagle-vicuna",
    "eagle-qwen2",
    *head_layouts.EAGLE3_LAYOUTS,
    *OWN_LAYERS,
    "eagle-mapped",
    "eagle3-mapped",
]
RUNS = [(1, (1, 1, 2), "none"), (1, (4, 3, 12), "none"), (4, (4, 3, 12), "none"), (4, (4, 3, 12), "int8")]


def pair(kind: str, target_dir: Path, tmp_path: Path) -> tuple[Path, Path | None, dict[str, Any]]:
    """(target, head, options) of one kind."""
    if kind in OWN_LAYERS:
        own = {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": None}
        return OWN_LAYERS[kind](tmp_path / kind).directory, None, own
    name = {"eagle-mapped": "eagle-llama3", "eagle3-mapped": "eagle3-yuhuili"}.get(kind, kind)
    options: dict[str, Any] = {"speculative_algorithm": "EAGLE" if name in head_layouts.EAGLE_LAYOUTS else "EAGLE3"}
    if kind.endswith("mapped"):
        token_map = tmp_path / "map.json"
        token_map.write_text(json.dumps(list(range(250, 30, -3))))
        options["speculative_token_map"] = str(token_map)
    return target_dir, head_layouts.write_head(name, tmp_path / "head", target_dir).directory, options


@pytest.mark.parametrize("kind", KINDS)
def test_no_head_changes_the_text(kind: str, target_dir: Path, tmp_path: Path) -> None:
    target, head, options = pair(kind, target_dir, tmp_path)
    for sampling in SETTINGS.values():
        expected = run(make_core(target), PROMPTS, sampling)
        for batch_size, tree, quantization in RUNS:
            own = {**options, "max_running_requests": batch_size, "speculative_draft_model_quantization": quantization}
            assert run(make_core(target, head, tree, **own), PROMPTS, sampling) == expected


def test_a_mapped_head_drafts_mapped_tokens_only(target_dir: Path, tmp_path: Path) -> None:
    target, head, options = pair("eagle-mapped", target_dir, tmp_path)
    core = make_core(target, head, (2, 2, 4), **options)
    known = set(core.runner.stepper.drafter.head.token_map.target_ids.tolist())
    assert known == {*range(250, 30, -3), 3}, "the map, and the end token"


def test_own_layers_draft_one_token_by_default(tmp_path: Path) -> None:
    target, _, options = pair("mtp", tmp_path, tmp_path)
    core = make_core(target, **{**options, "speculative_algorithm": "EAGLE"})
    assert str(core.runner.tree_shape) == "(1, 1, 2)"
