"""Two norms side by side in one kernel; the twin is `rms_norm.norms_side_by_side`."""

import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.add_rms_norm import norm_into
from eagle_rt.kernels.triton.common import padded


@triton.jit
def _norms_side_by_side(
    x,  # [R, X_SIZE]
    x_weight,  # [X_SIZE]
    y,  # [R, Y_SIZE]
    y_weight,  # [Y_SIZE]
    output,  # [R, X_SIZE + Y_SIZE]
    x_eps,
    y_eps,
    X_SIZE: tl.constexpr,
    Y_SIZE: tl.constexpr,
    X_BLOCK: tl.constexpr,
    Y_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = output + row * (X_SIZE + Y_SIZE)
    if tl.program_id(1) == 0:
        norm_into(x + row * X_SIZE, x_weight, x_eps, place, X_SIZE, X_BLOCK)
    else:
        norm_into(y + row * Y_SIZE, y_weight, y_eps, place + X_SIZE, Y_SIZE, Y_BLOCK)


def norms_side_by_side(x: Tensor, x_weight: Tensor, x_eps: float, y: Tensor, y_weight: Tensor, y_eps: float) -> Tensor:
    """[R, H + J] the norms of x [R, H] and of y [R, J]."""
    num_rows, x_size, y_size = len(x), x.shape[1], y.shape[1]
    output = x.new_empty(num_rows, x_size + y_size)
    _norms_side_by_side[(num_rows, 2)](
        x.contiguous(), x_weight, y.contiguous(), y_weight, output, x_eps, y_eps, X_SIZE=x_size, Y_SIZE=y_size,
        X_BLOCK=padded(x_size), Y_BLOCK=padded(y_size), num_warps=min(16, max(1, padded(max(x_size, y_size)) // 512)),
    )  # fmt: skip
    return output
