"""What attention over latents (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1) does beside its products: norms, and what is turned by
positions."""

import torch
from torch import Tensor

from eagle_rt.kernels.dispatch import kernel_for
from eagle_rt.kernels.rms_norm import RMSNorm
from eagle_rt.kernels.rotary import rotate


def normed_queries(x: Tensor, norm: RMSNorm | None) -> Tensor:
    """x [T, Q], normed where there is a norm."""
    return norm(x) if norm else x


def latent_rows(latents: Tensor, norm: RMSNorm, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, 1, 1, rank + rope_dim] what the cache keeps of latents [T, rank + rope_dim]: the norm of the first `rank`, and the key
    behind them, turned. cos, sin: [T, 1, rope_dim], see `rotate`."""
    own, key = latents.tensor_split((len(norm.weight),), dim=1)
    return torch.cat((norm(own)[:, None], rotate(key[:, None], cos, sin)), dim=2)[:, None]


def latent_queries(led: Tensor, queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, rank + rope_dim] of what queries were led to [T, heads, rank], and behind it the last numbers of queries [T,
    heads, nope_dim + rope_dim], turned."""
    if kernel := kernel_for("latent_queries", queries):
        return kernel(led, queries, cos, sin)
    return torch.cat((led, rotate(queries[..., -cos.shape[-1] :], cos, sin)), dim=2)
