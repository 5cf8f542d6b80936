"""Published shapes, and where the parts of a small model lie in a large one."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from eagle_rt.models.heads.spec import default_feature_layers
from eagle_rt.models.layer_shape import LayerShape, layer_shape


@dataclass(frozen=True)
class GrownShape:
    """The numbers of a published target, and of the EAGLE-3 heads that are published for it.

    experts: how many the target has in each layer, of that intermediate size, and how many of them a token takes.
    head_intermediate_size: the head's, where it is another than the target's.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int = 32000
    experts: tuple[int, int] | None = None
    head_intermediate_size: int | None = None

    def of_head(self) -> "GrownShape":
        """The shape whose layers are the head's."""
        return replace(self, intermediate_size=self.head_intermediate_size or self.intermediate_size, experts=None)


# Qwen2.5-0.5B has 14 heads in 2 groups, into which the built-in pair's 4 groups do not fit; those of Qwen3 are without its norms of
# queries and keys.
SHAPES = {
    "0.5b": GrownShape(896, 4864, 16, 4, 64, 24, 151936),
    "1b": GrownShape(2048, 8192, 32, 8, 64, 16, 128256),
    "3b": GrownShape(3072, 8192, 24, 8, 128, 28, 128256),
    "llama-3.1-8b": GrownShape(4096, 14336, 32, 8, 128, 32, 128256),
    "qwen3-8b": GrownShape(4096, 12288, 32, 8, 128, 36, 151936),
    "14b": GrownShape(5120, 17408, 40, 8, 128, 40, 151936),
    "32b": GrownShape(5120, 25600, 64, 8, 128, 64, 151936),
    "70b": GrownShape(8192, 28672, 64, 8, 128, 80, 128256),
    "qwen3-30b-a3b": GrownShape(2048, 768, 32, 4, 128, 48, 151936, experts=(128, 8), head_intermediate_size=6144),
    "mixtral-8x7b": GrownShape(4096, 14336, 32, 8, 128, 32, 32000, experts=(8, 2)),
}


def layer_places(num_small: int, num_large: int) -> dict[int, int]:
    """Which large layer does the work of which small one, {large: small}, so that the inputs of the layers that an EAGLE-3 head
    is fed from (2, N // 2 and N - 3) are the same in both.

    Raises:
        ValueError: the large target has too few layers.
    """
    small, large = default_feature_layers(num_small), default_feature_layers(num_large)
    marks = [(0, 0), *zip(small, large, strict=True), (num_small, num_large)]
    places = {}
    for (small_start, large_start), (small_end, large_end) in pairwise(marks):
        if not 0 <= small_end - small_start <= large_end - large_start:
            raise ValueError(f"{num_small} layers do not fit into {num_large} between the layers that a head is fed from")
        places |= {large_start + index: small_start + index for index in range(small_end - small_start)}
    return places


class Sizes:
    """A small shape and the large one, and where the parts of the first lie in the second."""

    def __init__(self, small: LayerShape, large: LayerShape) -> None:
        self.small, self.large = small, large
        ratio, rest = divmod(large.head_dim, small.head_dim)
        group, large_group = small.num_heads // small.num_kv_heads, large.num_heads // large.num_kv_heads
        if rest or large.num_kv_heads < small.num_kv_heads or large_group < group:
            raise ValueError(f"heads {small} do not fit into {large}")
        if large.hidden_size <= small.hidden_size or large.intermediate_size < small.intermediate_size:
            raise ValueError(f"{large} is not larger than {small}")
        half = torch.arange(small.head_dim // 2) * ratio
        self.turned_dims = torch.cat((half, half + large.head_dim // 2))
        heads = torch.arange(small.num_heads)
        large_heads = heads // group * large_group + heads % group
        # Rows of q, k and v, and columns of o, that the small model's take: [heads * head_dim].
        self.query_rows = (large_heads[:, None] * large.head_dim + self.turned_dims).flatten()
        self.key_rows = (torch.arange(small.num_kv_heads)[:, None] * large.head_dim + self.turned_dims).flatten()
        plain_dims = torch.arange(small.head_dim)
        self.value_rows = (torch.arange(small.num_kv_heads)[:, None] * large.head_dim + plain_dims).flatten()
        self.output_columns = (large_heads[:, None] * large.head_dim + plain_dims).flatten()
        self.query_scale = (large.head_dim / small.head_dim) ** 0.5
        self.norm_scale = (small.hidden_size / large.hidden_size) ** 0.5

    @property
    def constant(self) -> int:
        """The dimension that carries the constant: the first that the small model does not have."""
        return self.small.hidden_size


def large_layer_shape(shape: GrownShape, config: dict[str, Any]) -> LayerShape:
    small = layer_shape(config)
    eps = small.rms_norm_eps * small.hidden_size / shape.hidden_size
    return LayerShape(shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, eps)
