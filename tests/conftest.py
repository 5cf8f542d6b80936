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


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    with quick_interpreter():
        yield


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
