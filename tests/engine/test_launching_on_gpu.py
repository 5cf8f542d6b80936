"""On a GPU alone: launching waits for nothing that runs there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import Tree, make_config, random_prompts

from eagle_rt.batch import to_device
from eagle_rt.engine.build import build_core
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.load import model_info
from eagle_rt.engine.params import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS = [
    SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_new_tokens=20, ignore_eos=True, frequency_penalty=0.5),
]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_core(target_dir: Path, head_dir: Path, tree: Tree | None) -> EngineCore:
    """With two requests in line."""
    config = make_config(target_dir, head_dir, tree, dtype="float16", cuda_graph_bs=(2,))
    config = replace(config, device="cuda", attention_backend="triton")
    core, _ = build_core(config, model_info(config))
    for index, (prompt, sampling) in enumerate(zip(random_prompts(2), SETTINGS, strict=True)):
        core.submit(f"r{index}", prompt, sampling)
    return core


@pytest.mark.parametrize("tree", [None, (3, 2, 6)], ids=str)
def test_reading_prompts_is_launched_without_waiting(target_dir: Path, head_dir: Path, tree: Tree | None) -> None:
    core = make_core(target_dir, head_dir, tree)
    plan = core.scheduler.plan()
    assert len(plan.chunks) == 2
    core.runner.start_prefill(plan.chunks)()  # kernels are compiled
    with waiting_is_an_error():
        tokens = core.runner.start_prefill(plan.chunks)
    assert len(tokens()) == 2


def test_a_step_follows_without_waiting_where_someone_has_ended(target_dir: Path, head_dir: Path) -> None:
    core = make_core(target_dir, head_dir, (3, 2, 6))
    core.step()
    plan = core.scheduler.plan()
    assert len(plan.decodes) == 2
    result = core.runner.launch(plan, follows=False)
    core.abort("r0")
    assert core.runner.can_run_ahead(plan)
    with waiting_is_an_error():
        following = core.runner.launch(plan, follows=True)
    result()
    assert following().decoded[1]


def test_waiting_would_be_noticed() -> None:
    with waiting_is_an_error():
        to_device([1, 2, 3], "cuda")
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.tensor([1, 2, 3], device="cuda")
