"""What a graph may hold: every way in which the callable that is captured could read a tensor on the host is watched, and its
kernels are launched as they are compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import SETTINGS, make_captured
from engines import Tree, random_prompts, run
from kernels.launches import CALLS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from eagle_rt.engine.graphs import StepGraph
from eagle_rt.kernels import dispatch
from eagle_rt.models import linear
from eagle_rt.tree_shape import NO_SPECULATION


class HostReadError(Exception):
    pass


class Watch(TorchDispatchMode):
    """Raises HostReadError for every operator that needs a tensor's values on the host, outside of kernels."""

    READING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
    paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused and any(name in str(function) for name in self.READING):
            raise HostReadError(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within this, reading a tensor raises HostReadError, except inside a kernel, where the interpreter does nothing else."""
    watch = Watch()
    original = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        watch.paused = True
        try:
            original(self, *args, **kwargs)
        finally:
            watch.paused = False

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            reading = getattr(Tensor, name)

            def read(self: Tensor, *args: Any, reading: Callable[..., Any] = reading, name: str = name) -> Any:
                if not watch.paused:
                    raise HostReadError(name)
                return reading(self, *args)

            patch.setattr(Tensor, name, read)
        with watch, torch.inference_mode():
            yield


def captured_callable(graph: StepGraph) -> Callable[[], Tensor]:
    return graph._step


@pytest.mark.parametrize("has_penalties", [False, True])
@pytest.mark.parametrize("tree", [None, (3, 2, 6)], ids=str)
def test_what_is_captured_never_reads_a_tensor(
    target_dir: Path, head_dir: Path, tree: Tree | None, has_penalties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU: a CPU's own kernels read their operands on the host.
    monkeypatch.setattr(linear, "product_with", lambda weight, bias, quantization: None)
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    core = make_captured(target_dir, head_dir, tree, (2,), speculative_tree="adaptive")
    captured = core.runner.graphs
    assert NO_SPECULATION in captured.trees
    with watching(monkeypatch):
        for shape in captured.trees:
            captured_callable(captured.find(2, shape, has_penalties=has_penalties))()


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, torch.nonzero, bool], ids=["item", "tolist", "nonzero", "bool"])
def test_one_that_did_would_be_caught(
    target_dir: Path, head_dir: Path, read: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_captured(target_dir, head_dir, (2, 2, 4), (1,))
    drafter = core.runner.stepper.drafter
    original = drafter.propose

    def reading(sequences: Any) -> Any:
        tree = original(sequences)
        name = getattr(read, "__name__", "")
        value = tree.tokens[0, 0]
        getattr(value, name)() if name in ("item", "tolist") else read(value)
        return tree

    drafter.propose = reading
    with pytest.raises(HostReadError), watching(monkeypatch):
        captured_callable(core.runner.graphs.find(1, core.runner.tree_shape))()


def test_kernels_are_launched_with_the_types_that_they_are_compiled_for(
    target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes any types, a compiler does not: whole numbers among the settings once became tensors of them."""
    launched: dict[str, list[list[str]]] = {}
    compiled: dict[str, list[list[str]]] = {}
    original = GridExecutor.__call__

    def note(kernels: dict[str, list[list[str]]], kernel: GridExecutor, args: tuple[Any, ...]) -> None:
        kinds = ["float" if arg.is_floating_point() else str(arg.dtype) for arg in args if isinstance(arg, Tensor)]
        kernels.setdefault(kernel.fn.__name__, []).append(kinds)

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        note(launched, self, args)
        original(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *args, **kwargs: note(compiled, self, args))
    for call in chain(*CALLS.values()):
        call()
    monkeypatch.setattr(GridExecutor, "__call__", original)
    monkeypatch.setattr(dispatch, "prefers_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    monkeypatch.setattr(linear, "product_with", lambda weight, bias, quantization: None)
    core = make_captured(target_dir, head_dir, (3, 2, 6), (1,))
    monkeypatch.setattr(GridExecutor, "__call__", launch)
    sampling = replace(SETTINGS[0], temperature=1, top_k=3, top_p=1, min_p=0, frequency_penalty=1, max_new_tokens=3)
    run(core, random_prompts(1, longest=9), [sampling])
    assert {"_attend", "_top_of_split", "_penalize", "_best_of_split", "_thresholds", "_move", "_embed"} <= set(launched)
    for name, found in launched.items():
        assert [kinds for kinds in found if kinds not in compiled[name]] == [], f"{name} is compiled for {compiled[name]}"
