"""Where an operation has a kernel of ours and a torch twin: which of them runs."""

import importlib.util

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
