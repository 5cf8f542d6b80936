"""Compiled passes say what eager ones say; where compiling fails, serving goes on without, or not at all if that was asked for."""

from pathlib import Path

import pytest
import torch
from engines import make_config, random_prompts, run

from eagle_rt.engine.build import build_core
from eagle_rt.engine.compile import rows_of_passes
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.load import model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.heads.block_spec import BlockSpec
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape


def build(target_dir: Path, head_dir: Path, tree: tuple[int, int, int] | None, **options: object) -> tuple[EngineCore, list[str]]:
    config = make_config(target_dir, head_dir, tree, **options)
    return build_core(config, model_info(config))


def replies(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    return run(core, prompts, SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True))


@pytest.mark.parametrize("tree", [None, (3, 2, 8)], ids=str)
def test_compiled_is_eager(target_dir: Path, head_dir: Path, tree: tuple[int, int, int] | None) -> None:
    eager, _ = build(target_dir, head_dir, tree)
    compiled, notes = build(target_dir, head_dir, tree, enable_torch_compile=True, torch_compile_max_bs=2)
    rows = "8, 16 rows, of the head with 2, 4, 8" if tree else "1, 2 rows"
    assert any(rows in note and note.startswith("compiled in") for note in notes), notes
    assert compiled.metrics.num_generated_tokens == 0  # warming up leaves no trace
    prompts = random_prompts(5)
    for num_at_once in (1, 2, 5):  # 5: more than was compiled for
        assert replies(compiled, prompts[:num_at_once]) == replies(eager, prompts[:num_at_once])


@pytest.fixture
def broken_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function, **options):
        def call(*args):
            raise RuntimeError("no compiler here\nand a long trace")

        return call

    monkeypatch.setattr(torch, "compile", broken)


@pytest.mark.usefixtures("broken_compiler")
def test_a_failing_compiler_is_said_and_survived(target_dir: Path, head_dir: Path) -> None:
    core, notes = build(target_dir, head_dir, (2, 2, 4), enable_torch_compile=True)
    assert sum(note.startswith("WARNING: --enable-torch-compile failed") and "no compiler here" in note for note in notes) >= 2
    eager, _ = build(target_dir, head_dir, (2, 2, 4))
    assert replies(core, random_prompts(2)) == replies(eager, random_prompts(2))


@pytest.mark.usefixtures("broken_compiler")
def test_strict_refuses(target_dir: Path, head_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"--strict.*no compiler here"):
        build(target_dir, head_dir, (2, 2, 4), enable_torch_compile=True, strict=True)


def test_passes_of_all_trees_are_compiled() -> None:
    block = BlockSpec(0, 8, False, 0, (None,), False, False, 1.0, 1.0, None)
    assert rows_of_passes([NO_SPECULATION], [1, 2]) == ({1, 2}, {1, 2})
    assert rows_of_passes([TreeShape(1, 4, 5)], [1]) == ({5}, {2})
    assert rows_of_passes([TreeShape(3, 4, 8), TreeShape(2, 1, 3)], [1, 2]) == ({8, 16, 3, 6}, {4, 8, 3, 6, 1, 2})
    assert rows_of_passes([TreeShape(3, 4, 8), TreeShape(2, 1, 3)], [1, 2], block) == ({8, 16, 3, 6}, {4, 8, 3, 6})
