"""The gate of a SwiGLU layer."""

from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels import dispatch


def silu_and_mul(gate_and_up: Tensor) -> Tensor:
    """silu(gate) * up, from both halves side by side: [T, 2 * I] to [T, I] (Shazeer, 2020)."""
    if dispatch.prefers_triton(gate_and_up):
        from eagle_rt.kernels.triton import silu_and_mul as in_one_kernel  # not everywhere is triton installed

        return in_one_kernel.silu_and_mul(gate_and_up)
    if dispatch.prefers_compiled(gate_and_up, gate_and_up.dtype):
        from eagle_rt.kernels.cpu import silu_and_mul as compiled  # not everywhere is numba installed

        return compiled.silu_and_mul(gate_and_up)
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
