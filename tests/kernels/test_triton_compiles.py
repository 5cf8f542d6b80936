"""Every kernel compiles for a GPU, down to its machine code, on a machine without one: Triton brings its own assembler."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import eagle_rt.kernels.triton

FOLDER = Path(eagle_rt.kernels.triton.__file__).parent
# Of every kernel: the types of its arguments and then the values of its constants, in its own order.
COMPILE = """
import importlib, math, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for module, name, types, constants in eval(sys.argv[1], {"inf": math.inf}):
    kernel = getattr(importlib.import_module(f"eagle_rt.kernels.triton.{module}"), name)
    signature = dict(zip(kernel.arg_names, types.split() + ["constexpr"] * len(constants), strict=True))
    values = {(len(types.split()) + index,): value for index, value in enumerate(constants)}
    print(module, name, flush=True)
    compiled = triton.compile(ASTSource(kernel, signature, constexprs=values), target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 0
"""
KERNELS = [
    ("tree_attention", "_attend", "*bf16 " * 2 + "*i32 " * 4 + "*i64 " * 2 + "*fp32 " * 3 + "fp32" + " i32" * 6,
     (4, 8, 128, 128, 16, 1, 0, 8, 32, 64, 64, False, False, True, False)),
    ("tree_attention", "_attend", "*fp16 " * 2 + "*i32 " * 4 + "*i64 " * 3 + "*fp16 " * 2 + "fp32" + " i32" * 6,
     (4, 8, 80, 128, 1, 0, 64, 1, 16, 64, 64, True, False, False, False)),
    ("tree_attention", "_join", "*fp32 *fp32 *bf16", (128, 128, 8)),
    ("add_rms_norm", "_add_rms_norm", "*bf16 " * 5 + "fp32", (4096, 4096, True)),
    ("gated", "_gated", "*bf16 *bf16", (14336, 1024, 1.0, float("inf"), 0.0, 0.0)),
    ("gated", "_gated", "*bf16 *bf16", (10240, 1024, 1.5957691216, float("inf"), 0.0, 0.044715)),
    ("rotate_and_write", "_rotate_and_write", "*bf16 " * 5 + "*i64 *bf16 *bf16 i32 fp32", (32, 8, 64, 64, True, False)),
    ("rotate_and_write", "_rotate_and_write", "*bf16 " * 5 + "*i64 *bf16 *bf16 i32 fp32", (32, 8, 64, 64, True, True)),
    ("rotate_and_write", "_rotate_and_write", "*bf16 " * 5 + "*i64 *bf16 *bf16 i32 fp32", (32, 8, 40, 64, False, False)),
    ("embed", "_embed", "*i64 *bf16 *bf16", (4096, 1024)),
    ("cos_sin", "_cos_sin", "*i64 *fp32 *fp32 *bf16 *bf16", (128, 128)),
    ("norms_side_by_side", "_norms_side_by_side", "*bf16 " * 5 + "fp32 fp32", (4096, 4096, 4096, 4096)),
    ("skinny_product", "_skinny_product", "*bf16 *bf16 *bf16 i32 i32 i32", (32, 128, 128, False)),
    ("skinny_product", "_skinny_product", "*fp16 *fp16 *fp16 i32 i32 i32", (16, 32, 256, False)),
    ("gated_product", "_gated_product", "*bf16 *bf16 *bf16 i32 i32 i32", (32, 128, 128, False)),
    ("turned_product", "_turned_product", "*bf16 " * 5 + "*i64 *bf16 *bf16 i32 i32 i32", (32, 8, 64, True, 32, 32, 128, False)),
    ("turned_product", "_turned_product", "*fp16 " * 5 + "*i64 *fp16 *fp16 i32 i32 i32", (32, 8, 48, False, 16, 32, 128, False)),
    ("narrow_product", "_narrow_product", "*bf16 *i32 *fp16 *bf16 *fp32 *bf16 *bf16 i32 i32 i32 i32 i32",
     ("int4", 4, 1, True, False, 16)),
    ("narrow_product", "_narrow_product", "*bf16 *i32 *fp16 *bf16 *fp32 *bf16 *fp32 i32 i32 i32 i32 i32",
     ("offset4", 4, 4, False, True, 64)),
    ("narrow_product", "_narrow_product", "*fp16 *i32 *fp16 *bf16 *fp32 *fp16 *fp16 i32 i32 i32 i32 i32",
     ("e2m1", 4, 4, False, False, 32)),
    ("narrow_product", "_narrow_product", "*bf16 *i32 *fp16 *bf16 *fp32 *bf16 *bf16 i32 i32 i32 i32 i32",
     ("int8", 2, 0, False, False, 16)),
    ("narrow_product", "_narrow_product", "*bf16 *i32 *fp16 *bf16 *fp32 *bf16 *bf16 i32 i32 i32 i32 i32",
     ("e4m3", 2, 1, False, False, 16)),
    ("narrow_product", "_add_splits", "*fp32 *fp32 *bf16 *bf16 i32 i32 i32", (True, 1024)),
    ("widen", "_widen", "*i32 *fp16 *bf16 *fp32 *bf16 i32 i32", ("offset4", 4, 1)),
    ("widen", "_widen", "*i32 *fp16 *bf16 *fp32 *fp16 i32 i32", ("e4m3", 2, 0)),
    ("route", "_route", "*bf16 *fp32 *i32", (128, 8, True, 128, 8)),
    ("mix_experts", "_group", "*i32 *i32 *i32 i32 i32", (1024,)),
    ("mix_experts", "_gate", "*bf16 " * 5 + "*fp32 *bf16 *i32 *i32 *i32 i32 i32 i32 i32",
     (8, 1.0, float("inf"), 0.0, 0.0, False, False, "wide", 0, 0, 16, 64, 128, False)),
    ("mix_experts", "_gate", "*bf16 " * 5 + "*bf16 *bf16 *i32 *i32 *i32 i32 i32 i32 i32",
     (4, 1.702, 7.0, 1.0, 0.0, True, True, "wide", 0, 0, 64, 64, 64, False)),
    ("mix_experts", "_gate", "*bf16 *i32 *fp16 *bf16 *fp32 *bf16 *bf16 *i32 *i32 *i32 i32 i32 i32 i32",
     (4, 1.702, 7.0, 1.0, 0.0, True, True, "e2m1", 4, 4, 16, 128, 0, False)),
    ("mix_experts", "_down", "*bf16 " * 5 + "*fp32 *bf16 *i32 *i32 *i32 i32 i32 i32 i32",
     (False, True, "wide", 0, 0, 16, 64, 128, False)),
    ("mix_experts", "_down", "*bf16 " * 5 + "*bf16 *bf16 *i32 *i32 *i32 i32 i32 i32 i32",
     (True, True, "wide", 0, 0, 64, 64, 64, False)),
    ("mix_experts", "_down", "*bf16 *i32 *fp16 *bf16 *fp32 *fp32 *bf16 *i32 *i32 *i32 i32 i32 i32 i32",
     (False, False, "int4", 4, 1, 64, 128, 0, False)),
    ("mix_experts", "_add_shares", "*bf16 *fp32 *bf16", (2048, 8, 1024)),
    ("gumbel_argmax", "_best_of_split", "*fp32 *fp32 *fp32 *i64 *i64 *fp32 *i64 i32 i32", (8, 1024)),
    ("gumbel_argmax", "_best_of_row", "*fp32 *i64 *i64 i32", (32,)),
    ("filter_thresholds", "_thresholds", "*fp32 *fp32 *i64 *fp32 *fp32 *fp32 i32", (8, 4096)),
    ("top_children", "_top_of_split", "*bf16 *fp32 *fp32 *i64 *i64 *i64 *i32 *i32 *fp32 i32 fp32", (4, 8, True, 2048)),
    ("top_children", "_top_of_split", "*bf16 *fp32 *fp32 *fp32 *fp32 *fp32 *i32 *i32 *fp32 i32 fp32", (4, 8, False, 2048)),
    ("top_children", "_top_of_row", "*i32 *i32 *fp32 *fp32 *i64 *fp32 i32", (8, 16, 128)),
    ("select_beam", "_select_beam", "*fp32 *i64 *i64 *i64 *fp32 *i64 *i64 *i64 i32 i32", (100, 10, 10, 2, 128)),
    ("rerank", "_number", "*fp32 *i32 i32", (32, 256)),
    ("rerank", "_place", "*i32 *i32 i32", (60, 1024)),
    ("rerank", "_build", "*i32 *i32 *fp32 *i64 *i64 *i64 *i64 *i64 *i64 *i64 *fp32 i32", (10, 60, 1024)),
    ("ancestors", "_ancestors", "*i64 *i64 *i64 *i64 *i64 i32", (60, 1, 64)),
    ("walk", "_walk", "*i64 *i64 *fp32 *i64 *i64 *i64 *i64", (60, 8, 64)),
    ("penalize", "_penalize", "*bf16 *i32 *u8 *fp32 *fp32 *fp32 *fp32 *i64 *fp32 i32 i32", (32000, True, 1024)),
    ("penalize", "_penalize", "*bf16 *i32 *u8 *fp32 *fp32 *fp32 *fp32 *i32 *fp32 i32 i32", (32000, False, 1024)),
    ("begin_step", "_begin_step", "*i64 *i32 *i32 *i64 i32 i32 i32", (60, 64)),
    ("finish_step", "_finish_step", "*i64 *i64 *fp32 *i64 *i64 *i64 *i64 i32", (6, 32, 8)),
    ("move_rows", "_move", "*bf16 *i64 *i64 i32 i32 i32", (2048, 2048)),
]  # fmt: skip


def test_no_kernel_is_missing() -> None:
    launched = {
        (file.stem, line.split("(")[0].removeprefix("def "))
        for file in FOLDER.glob("*.py")
        for before, line in zip(file.read_text().split("\n"), file.read_text().split("\n")[1:], strict=False)
        if before.startswith("@triton.jit") and f"{line.split('(')[0].removeprefix('def ')}[" in file.read_text()
    }
    assert launched == {(module, name) for module, name, *_ in KERNELS}


def test_every_kernel_compiles() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def compile_some(kernels: list[tuple[str, str, str, tuple[object, ...]]]) -> str:
        command = [sys.executable, "-c", COMPILE, repr(kernels)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        return "" if result.returncode == 0 else f"{result.stdout.splitlines()[-1:]}: {result.stderr[-2000:]}"

    with ThreadPoolExecutor(2) as pool:
        failures = [failure for failure in pool.map(compile_some, [KERNELS[::2], KERNELS[1::2]]) if failure]
    assert not failures, "\n".join(failures)
