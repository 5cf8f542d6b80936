"""Every backend serves the same text."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import make_core, random_prompts, run

from eagle_rt.attention.select import attention_backend
from eagle_rt.engine.request import SamplingParams


@pytest.mark.parametrize("tree", [None, (3, 2, 6)])
def test_the_kernel_serves_what_torch_serves(target_dir: Path, head_dir: Path, tree: tuple[int, int, int] | None) -> None:
    prompts = random_prompts(3, seed=4, longest=20)
    sampling = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    expected = run(make_core(target_dir, head_dir, tree), prompts, sampling)
    assert (
        run(make_core(target_dir, head_dir, tree, attention_backend="triton", chunked_prefill_size=8), prompts, sampling)
        == expected
    )


def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a GPU"):
        attention_backend("triton", "cpu", torch.float32)


# What the kernel is compiled for: head size, mask words, splits, rows of a tile, type.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from eagle_rt.kernels.triton.tree_attention import _attend as kernel

for head_dim, words, splits, rows, dtype in ((128, 1, 8, 32, "bf16"), (80, 0, 1, 16, "fp16")):
    part = "*fp32" if splits > 1 else f"*{dtype}"
    types = [f"*{dtype}"] * 2 + ["*i32"] * 4 + ["*i64"] * 2 + [part] * 2 + ["fp32"] + ["i32"] * 4
    constants = [4, 8, head_dim, triton.next_power_of_2(head_dim), 16, words, 0, splits, rows, 64, False]
    names = kernel.arg_names
    signature = dict(zip(names, types + ["constexpr"] * len(constants), strict=True))
    values = {(len(types) + index,): value for index, value in enumerate(constants)}
    compiled = triton.compile(ASTSource(kernel, signature, constexprs=values), target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 0
"""


def test_the_kernel_compiles_for_a_gpu() -> None:
    """On a machine without one: Triton brings its own assembler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
