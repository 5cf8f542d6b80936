import os
from collections.abc import Iterator
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which transformers does

import checkpoints
import pytest
from quick_interpreter import quick_interpreter

from eagle_rt.engine.load import BUILT_IN
from eagle_rt.kernels import dispatch, head_products
from eagle_rt.models import experts, linear


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    with quick_interpreter():
        yield


@pytest.fixture
def on_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, interpreted."""
    monkeypatch.setattr(dispatch, "prefers_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    monkeypatch.setattr(linear, "product_with", lambda weight, bias, quantization: None)
    monkeypatch.setattr(experts, "experts_with", lambda weights, mixing, quantization: None)
    monkeypatch.setattr(head_products, "panel_heads", lambda weight: None)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte tokenizer."""
    return checkpoints.write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def head_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random EAGLE-3 head for it."""
    return checkpoints.write_eagle3_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="session")
def built_in() -> Path:
    """The trained pair that ships with the package."""
    return BUILT_IN
