"""The gate of a SwiGLU layer."""

from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_and_up: Tensor) -> Tensor:
    """silu(gate) * up, from both halves side by side: [T, 2 * I] to [T, I] (Shazeer, 2020)."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
