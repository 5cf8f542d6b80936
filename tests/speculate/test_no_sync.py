"""A decode step never asks the device for a value: what CUDA graphs need, shown with tensors that have none."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from engines import make_core, random_prompts
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.prepare import decode_sequences
from eagle_rt.kernels import contenders, dispatch
from eagle_rt.models import linear
from eagle_rt.speculate.step import StepOutcome

SETTINGS = [
    SamplingParams(temperature=0, max_new_tokens=50, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_new_tokens=50, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=2, max_new_tokens=50, ignore_eos=True),
]


def fake_step(core: EngineCore, on_mark: Callable[[str], None] = lambda name: None) -> StepOutcome:
    """One step of three running requests with tensors that have shapes and no values."""
    for index, (prompt, sampling) in enumerate(zip(random_prompts(3), SETTINGS, strict=True)):
        core.submit(f"r{index}", prompt, sampling)
    while any(request.is_prefilling for request in core.scheduler.running) or core.scheduler.waiting:
        core.step()
    core.scheduler.plan()
    runner = core.runner
    shape, as_on_a_gpu = runner.tree_shape, patch.object(contenders, "is_compiled", False)
    sequences = decode_sequences(tuple(core.scheduler.running), shape.num_scratch_rows, runner._page_size, "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode(), as_on_a_gpu:
        return runner.stepper.step(sequences, on_mark)


@pytest.fixture(autouse=True)
def products_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's own read their operands on the host."""
    monkeypatch.setattr(linear, "product_with", lambda weight, bias, quantization: None)
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)


@pytest.mark.parametrize("tree", [None, (1, 1, 2), (3, 1, 4), (4, 3, 12), (5, 8, 32)], ids=str)
def test_no_step_reads_a_tensor(target_dir: Path, head_dir: Path, tree: tuple[int, int, int] | None) -> None:
    outcome = fake_step(make_core(target_dir, head_dir, tree, dtype="bfloat16", attention_backend="torch"))
    num_nodes, depth = (tree[2], min(tree[0], tree[2] - 1)) if tree else (1, 0)
    assert outcome.tree.tokens.shape == (3, num_nodes)
    assert outcome.acceptance.tokens.shape == (3, depth + 1)


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, torch.nonzero], ids=["item", "tolist", "nonzero"])
def test_a_step_that_reads_one_would_be_caught(target_dir: Path, head_dir: Path, read: Callable[[Tensor], object]) -> None:
    core = make_core(target_dir, head_dir, (2, 2, 4), dtype="bfloat16", attention_backend="torch")
    original = core.runner.stepper.drafter.propose

    def reading(sequences):
        tree = original(sequences)
        read(tree.tokens[0, 0] if read is Tensor.item else tree.tokens)
        return tree

    core.runner.stepper.drafter.propose = reading
    with pytest.raises((DataDependentOutputException, RuntimeError, torch._subclasses.fake_tensor.DynamicOutputShapeException)):
        fake_step(core)
