import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which transformers does

import checkpoints
import pytest
from triton import language
from triton.runtime import interpreter

from eagle_rt.engine.load import BUILT_IN


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    """Triton's interpreter puts its own operators in place at every call within a kernel, which takes most of the time; after the
    first call from a module they are there. And it works out whether integers overflow, which nobody looks at without `debug`."""
    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[int]] = set()

    @cache
    def languages_seen(function: Callable[..., Any]) -> frozenset[int]:
        return frozenset(map(id, function.__globals__.values())) & {id(language), id(language.core)}

    def patch_once(function: Callable[..., Any]) -> Any:
        seen = languages_seen(function)
        if seen in patched:
            return None  # only a launch, the first to call this, asks for more
        patched.add(seen)
        return patch_language(function)

    def launch_once(self: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_once)
        patch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False))
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
