"""The parts that target and head are made of. Weights are fixed at construction; calling changes nothing but the cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_rt.attention.cached import CachedAttention
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels import dispatch
from eagle_rt.kernels.packed_linear import PackedProduct, can_pack
from eagle_rt.kernels.processor import is_intel
from eagle_rt.kernels.rms_norm import RMSNorm
from eagle_rt.kernels.rotary import rotate
from eagle_rt.kernels.silu_and_mul import silu_and_mul
from eagle_rt.models.rope import Rope
from eagle_rt.models.spec import LayerShape
from eagle_rt.models.weights import Checkpoint

# On Intel's processors float32 products of one row, of more than so many, and of smaller weights are faster from the plain weight
# (two cores of a Xeon); on others the packed one is faster for all (1.1 to 1.9 times, two cores of an EPYC).
MAX_PACKED_FLOAT32_ROWS, MIN_PACKED_FLOAT32_SIZE = 16, 2**19


class Linear:
    """y = x W^T + b for x [R, in], given W [out, in].

    On a GPU the weight stays as it is. On a CPU it is packed: only so, or a second time where one row and many are faster from the
    plain W^T.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        is_plain_faster = weight.dtype == torch.float32 and is_intel()
        is_small = is_plain_faster and weight.numel() < MIN_PACKED_FLOAT32_SIZE
        self._packed = PackedProduct(weight, bias) if can_pack(weight) and not is_small else None
        self._transposed = None
        if self._packed is None or is_plain_faster:
            self._transposed = weight.t() if weight.is_cuda else weight.t().contiguous()

    @property
    def weight(self) -> Tensor:
        """W [out, in]; a copy where only the packed one is held."""
        if self._transposed is None:
            assert self._packed
            return self._packed.unpacked()
        return self._transposed.t()

    def rows(self, kept: Tensor) -> "Linear":
        """Only the outputs [R] that `kept` names."""
        return Linear(self.weight[kept], None if self.bias is None else self.bias[kept])

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed and (self._transposed is None or 1 < x.shape[0] <= MAX_PACKED_FLOAT32_ROWS):
            return self._packed(x)
        assert self._transposed is not None
        return x @ self._transposed if self.bias is None else torch.addmm(self.bias, x, self._transposed)


Attend = Callable[[int, Tensor, Tensor | None, int | None], Tensor]


@dataclass(frozen=True)
class PassContext:
    """What every layer of one pass shares: the positions' angles, and `attend(layer, queries, keys_and_values, window)`.

    cache: the pool, and the slots [T] of this pass, where one kernel turns queries and keys and writes to the cache; the layers
    then have no keys and values to hand to `attend`.
    """

    cos: Tensor
    sin: Tensor
    attend: Attend
    cache: tuple[KVPool, Tensor] | None = None


def pass_context(rope: Rope, positions: Tensor, attend: Attend) -> PassContext:
    cos, sin = rope.cos_sin(positions)
    cache = attend.cache if isinstance(attend, CachedAttention) and dispatch.prefers_triton(positions) else None
    return PassContext(cos, sin, attend, cache)


class Attention:
    """Grouped-query attention on a paged cache. `input_size` is the hidden size, or twice that in an EAGLE-3 head."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, shape: LayerShape, input_size: int, window: int | None) -> None:
        self._heads, self._kv_heads, self._head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self._window = window
        sizes = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
        names = {f"{prefix}.{part}_proj": heads * shape.head_dim for part, heads in sizes.items()}
        self._qkv = merged_linear(checkpoint, names, input_size)
        self._output = linear(checkpoint, f"{prefix}.o_proj", shape.hidden_size, shape.num_heads * shape.head_dim)
        query_norm = checkpoint.take_optional(f"{prefix}.q_norm.weight", (shape.head_dim,))
        self._query_norm = self._key_norm = None
        if query_norm is not None:
            key_norm = checkpoint.take(f"{prefix}.k_norm.weight", (shape.head_dim,))
            self._query_norm = RMSNorm(query_norm, shape.rms_norm_eps)
            self._key_norm = RMSNorm(key_norm, shape.rms_norm_eps)

    def __call__(self, x: Tensor, layer: int, context: PassContext) -> Tensor:
        qkv = self._qkv(x).view(len(x), -1, self._head_dim)
        queries, keys_and_values = self._turn(qkv, layer, context)
        attended = context.attend(layer, queries, keys_and_values, self._window)
        return self._output(attended.flatten(1))

    def _turn(self, qkv: Tensor, layer: int, context: PassContext) -> tuple[Tensor, Tensor | None]:
        """Normed and rotated queries [T, heads, head_dim], and keys and values [T, 2, kv heads, head_dim] if not yet cached."""
        if context.cache:
            return self._turn_and_write(qkv, layer, context, *context.cache), None
        num_turned = self._heads + self._kv_heads
        if self._query_norm and self._key_norm:
            qkv[:, : self._heads] = self._query_norm(qkv[:, : self._heads])
            qkv[:, self._heads : num_turned] = self._key_norm(qkv[:, self._heads : num_turned])
        qkv[:, :num_turned] = rotate(qkv[:, :num_turned], context.cos, context.sin)
        return qkv[:, : self._heads], qkv[:, self._heads :].unflatten(1, (2, self._kv_heads))

    def _turn_and_write(self, qkv: Tensor, layer: int, context: PassContext, pool: KVPool, slots: Tensor) -> Tensor:
        from eagle_rt.kernels.triton.rotate_and_write import rotate_and_write  # not everywhere is triton installed

        weights, eps = None, 0.0
        if self._query_norm and self._key_norm:
            weights, eps = (self._query_norm.weight, self._key_norm.weight), self._query_norm.eps
        return rotate_and_write(qkv, self._heads, context.cos, context.sin, weights, eps, pool.storage[layer], slots)


class FeedForward:
    """SwiGLU."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, shape: LayerShape) -> None:
        names = {f"{prefix}.gate_proj": shape.intermediate_size, f"{prefix}.up_proj": shape.intermediate_size}
        self._gate_and_up = merged_linear(checkpoint, names, shape.hidden_size)
        self._down = linear(checkpoint, f"{prefix}.down_proj", shape.hidden_size, shape.intermediate_size)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(silu_and_mul(self._gate_and_up(x)))


class Block:
    """Attention and feed-forward part of one decoder layer; the norm before attention is its caller's."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, shape: LayerShape, input_size: int, window: int | None = None) -> None:
        self._attention = Attention(checkpoint, f"{prefix}.self_attn", shape, input_size, window)
        self._feed_forward_norm = norm(checkpoint, f"{prefix}.post_attention_layernorm", shape.hidden_size, shape.rms_norm_eps)
        self._feed_forward = FeedForward(checkpoint, f"{prefix}.mlp", shape)

    def __call__(self, x: Tensor, attention_input: Tensor, layer: int, context: PassContext) -> tuple[Tensor, Tensor]:
        """(x after the attention, what the feed-forward part adds to it): the next norm takes both."""
        x, normed = self._feed_forward_norm.after_adding(x, self._attention(attention_input, layer, context))
        return x, self._feed_forward(normed)


def linear(checkpoint: Checkpoint, name: str, out_size: int, in_size: int) -> Linear:
    return merged_linear(checkpoint, {name: out_size}, in_size)


def merged_linear(checkpoint: Checkpoint, out_sizes: dict[str, int], in_size: int) -> Linear:
    """Several projections of one input as a single product. Either all of them have a bias or none has.

    Each is copied to its place as it is read, so that no more than one of them is in memory twice.
    """
    biases = [checkpoint.take(f"{name}.bias", (size,)) for name, size in out_sizes.items() if f"{name}.bias" in checkpoint]
    bias = torch.cat(biases) if biases else None
    if len(out_sizes) == 1:
        (name, size), *_ = out_sizes.items()
        return Linear(checkpoint.take(f"{name}.weight", (size, in_size)), bias)
    merged, row = None, 0
    for name, size in out_sizes.items():
        weight = checkpoint.take(f"{name}.weight", (size, in_size))
        if merged is None:
            merged = weight.new_empty(sum(out_sizes.values()), in_size)
        merged[row : row + size] = weight
        row += size
    assert merged is not None
    return Linear(merged, bias)


def norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> RMSNorm:
    return RMSNorm(checkpoint.take(f"{name}.weight", (size,)), eps)


def optional_norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> RMSNorm | None:
    return norm(checkpoint, name, size, eps) if f"{name}.weight" in checkpoint else None
