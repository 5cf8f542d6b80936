"""On a GPU alone: what launches the reading of prompts waits for nothing that runs there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import make_config, random_prompts

from eagle_rt.batch import to_device
from eagle_rt.engine.build import build_core
from eagle_rt.engine.load import model_info
from eagle_rt.engine.request import SamplingParams

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


@pytest.mark.parametrize("tree", [None, (3, 2, 6)], ids=str)
def test_reading_prompts_is_launched_without_waiting(target_dir: Path, head_dir: Path, tree: tuple[int, int, int] | None) -> None:
    config = replace(make_config(target_dir, head_dir, tree, dtype="float16"), device="cuda", attention_backend="triton")
    core, _ = build_core(config, model_info(config))
    for index, (prompt, sampling) in enumerate(zip(random_prompts(2), SETTINGS, strict=True)):
        core.submit(f"r{index}", prompt, sampling)
    plan = core.scheduler.plan()
    assert len(plan.chunks) == 2
    core.runner.start_prefill(plan.chunks)()  # kernels are compiled
    with waiting_is_an_error():
        tokens = core.runner.start_prefill(plan.chunks)
    assert len(tokens()) == 2


def test_waiting_would_be_noticed() -> None:
    with waiting_is_an_error():
        to_device([1, 2, 3], "cuda")
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.tensor([1, 2, 3], device="cuda")
