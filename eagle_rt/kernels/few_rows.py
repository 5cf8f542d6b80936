"""Matrix products with few rows on a CPU, where reading the weight is what costs."""

import torch
from torch import Tensor

NUM_PACKED_ROWS = 8


def can_pack(weight: Tensor) -> bool:
    """Whether MKL's packed products are there for this weight."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkl.is_available()


class PackedProduct:
    """x W^T for up to NUM_PACKED_ROWS rows, with W [out, in] laid out once as MKL's kernels read it (the operator that torch's
    own freezing uses). Fewer rows are padded: any number of them up to the limit costs about the same."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), NUM_PACKED_ROWS)
        self._rows = torch.zeros(NUM_PACKED_ROWS, weight.shape[1])

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = x.shape[0]
        self._rows[:num_rows] = x  # below stand rows of earlier calls, whose products no one reads
        return torch.ops.mkl._mkl_linear(self._rows, self._packed, self._weight, bias, NUM_PACKED_ROWS)[:num_rows]
