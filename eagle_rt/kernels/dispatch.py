"""Where an operation has a Triton kernel and a torch twin: which of them runs."""

import importlib.util

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None


def prefers_triton(x: Tensor) -> bool:
    """On a GPU, except while torch.compile looks on: it fuses the twin with what stands around it."""
    return HAS_TRITON and x.is_cuda and not torch.compiler.is_compiling()
