"""Where an operation has a kernel of ours and a torch twin: which of them runs."""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_NUMBA = importlib.util.find_spec("numba") is not None


def prefers_triton(x: Tensor) -> bool:
    """On a GPU, except while torch.compile looks on: it fuses the twin with what stands around it."""
    return HAS_TRITON and x.is_cuda and not torch.compiler.is_compiling()


def prefers_compiled(x: Tensor, dtype: torch.dtype) -> bool:
    """On a CPU, unless somebody looks on, for results in this precision. A row comes out the same whatever else is in x."""
    return (
        HAS_NUMBA
        and type(x) is Tensor
        and x.device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and not torch.compiler.is_compiling()
    )


def kernel_for(name: str, x: Tensor) -> Callable[..., Any] | None:
    """The kernel of this name for x's device and precision; None where the twin is to run."""
    return triton_kernel(name, x) or compiled_kernel(name, x, x.dtype)


def triton_kernel(name: str, x: Tensor) -> Callable[..., Any] | None:
    """The same where there is none for a CPU."""
    return _kernel("triton", name) if prefers_triton(x) else None


def compiled_kernel(name: str, x: Tensor, dtype: torch.dtype) -> Callable[..., Any] | None:
    """The same where there is none for a GPU, or it is called otherwise."""
    return _kernel("cpu", name) if prefers_compiled(x, dtype) else None


@cache
def _kernel(kind: str, name: str) -> Callable[..., Any]:
    """Imported when it is first called for: not everywhere is triton or numba installed."""
    return getattr(importlib.import_module(f"eagle_rt.kernels.{kind}.{name}"), name)
