"""Engines with captured steps in tests. A CPU has no graphs: there the callable that would be captured runs over the same fixed
places."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engines import Tree, make_config

from eagle_rt.engine import graphs
from eagle_rt.engine.build import build_core
from eagle_rt.engine.capture import capture_steps
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.load import model_info
from eagle_rt.engine.params import SamplingParams

SETTINGS = [
    SamplingParams(temperature=0, max_new_tokens=7, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_new_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=2, max_new_tokens=5, ignore_eos=True),
]


def make_captured(
    target_dir: Path,
    head_dir: Path,
    tree: Tree | None,
    batch_sizes: tuple[int, ...],
    speculative_tree: str = "fixed",
    **options: Any,
) -> EngineCore:
    options = {"attention_backend": "triton", "max_total_tokens": 512, "context_length": 64, **options}
    config = make_config(target_dir, head_dir, tree, cuda_graph_bs=batch_sizes, max_running_requests=4, **options)
    core, _ = build_core(config, model_info(config))
    # A CPU's own steps, which the host decides on, need not be measured first. How long these take in an interpreter says nothing.
    with patch.object(graphs, "NUM_TIMED", 1):
        notes = capture_steps(core, replace(config, speculative_tree=speculative_tree))
    assert "captured a step" in notes[0]
    return core
