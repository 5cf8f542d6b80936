"""The gate of a SwiGLU layer."""

from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.dispatch import kernel_for


def silu_and_mul(gate_and_up: Tensor) -> Tensor:
    """silu(gate) * up, from both halves side by side: [T, 2 * I] to [T, I] (Shazeer, 2020)."""
    if kernel := kernel_for("silu_and_mul", gate_and_up):
        return kernel(gate_and_up)
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
