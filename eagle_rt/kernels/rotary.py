"""Rotary position embedding."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x [T, heads, head_dim] by their positions' angles (Su et al., 2021).

    cos, sin: [T, 1, head_dim], with the first half of `sin` negated.
    """
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)
