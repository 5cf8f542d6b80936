"""Imports point down, and planning stays free of tensors."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "eagle_rt"
BOTTOM = {"tree", "token_map", "kernels", "batch", "config"}
# From top to bottom; a package may import from those below it.
LAYERS = [
    {"doctor"},
    {"server", "bench", "demo", "train"},
    {"engine"},
    {"speculate"},
    {"parallel"},
    {"models"},
    {"attention"},
    {"cache"},
    {"resolve"},
    BOTTOM,
    {"tree_shape", "logprobs", "trace", "leave"},
]
# Within a layer: demo is made by train. Everything else there stands alone.
ALLOWED_SIBLINGS = {("demo", "train")}
TORCH_FREE = [
    "engine/scheduler.py",
    "engine/plan.py",
    "engine/gathering.py",
    "engine/params.py",
    "engine/request.py",
    "engine/messages.py",
    "engine/metrics.py",
    "tree_shape.py",
    "trace.py",
    "cache/pages.py",
    "cache/prefix.py",
    "cache/saved.py",
]


def layer_of(name: str) -> int:
    return next(index for index, names in enumerate(LAYERS) if name in names)


def imported_modules(file: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            modules.add(node.module or "")
    return modules


def package_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file: Path) -> None:
    here = package_of(file)
    for module in imported_modules(file):
        if not module.startswith("eagle_rt."):
            assert module != "eagle_rt", f"{file} imports the public face"
            continue
        there = module.split(".")[1]
        if there == here or (here, there) in ALLOWED_SIBLINGS:
            continue
        assert layer_of(there) > layer_of(here), f"{here} must not import {there}"


@pytest.mark.parametrize("name", TORCH_FREE)
def test_planning_is_free_of_torch(name: str) -> None:
    seen: set[str] = set()
    pending = [PACKAGE / name]
    while pending:
        for module in imported_modules(pending.pop()):
            assert module.split(".")[0] not in ("torch", "transformers"), f"{name} reaches {module}"
            file = PACKAGE.parent / (module.replace(".", "/") + ".py")
            if module.startswith("eagle_rt.") and module not in seen and file.is_file():
                seen.add(module)
                pending.append(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_files_hold_one_idea(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 350


@pytest.mark.parametrize("name", ["engine/prepare.py", "engine/runner.py", "attention/triton.py"])
def test_numbers_go_to_a_gpu_without_waiting_for_it(name: str) -> None:
    """All copies in what prepares passes are `to_device`'s: any other waits for what was launched before."""
    calls = [node for node in ast.walk(ast.parse((PACKAGE / name).read_text())) if isinstance(node, ast.Call)]
    assert not {ast.unparse(call.func) for call in calls} & {"torch.tensor", "torch.as_tensor", "torch.from_numpy"}
    assert not [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda")]
