"""The parts that target and head are made of. Weights are fixed at construction; calling changes nothing but the cache."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_rt.attention.cached import CachedAttention
from eagle_rt.cache.pool import KVPool
from eagle_rt.kernels import dispatch
from eagle_rt.kernels.gate import SWIGLU, Gate, gated
from eagle_rt.kernels.packed_linear import OpaqueProduct
from eagle_rt.kernels.products import Quantization, product_with
from eagle_rt.kernels.rms_norm import HeadNorms, RMSNorm
from eagle_rt.kernels.rotary import rotate
from eagle_rt.kernels.skinny import most_skinny_rows, most_turned_rows
from eagle_rt.kernels.whole_pass import Angles, ByWindow, LayerParts, WholePass, whole_pass
from eagle_rt.models.experts import load_experts
from eagle_rt.models.rope import Rope
from eagle_rt.models.shard import Total, whole
from eagle_rt.models.spec import ExpertShape, LayerShape
from eagle_rt.models.weights import Checkpoint


class Linear:
    """y = x W^T + b for x [R, in], given W [out, in].

    Where there are products with a weight that is laid out for them it is held only so; quantization: see `product_with`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, quantization: Quantization = "none") -> None:
        self.bias = bias
        self.product = product_with(weight, bias, quantization)
        self._transposed = None
        if not self.product:
            self._transposed = weight.t() if weight.is_cuda else weight.t().contiguous()
        self._most_skinny_rows = 0 if self.product or bias is not None else most_skinny_rows(weight)

    @property
    def weight(self) -> Tensor:
        """W [out, in]; a copy where only the one for products is held."""
        if self.product:
            return self.product.unpacked()
        assert self._transposed is not None
        return self._transposed.t()

    def rows(self, kept: Tensor) -> "Linear":
        """Only the outputs [R] that `kept` names."""
        return Linear(self.weight[kept], None if self.bias is None else self.bias[kept])

    def quantized(self) -> "Linear":
        """The same with a weight of eight bits, or fewer if it has."""
        return self if self.product and self.product.num_bits else Linear(self.weight, self.bias, "int8")

    def __call__(self, x: Tensor) -> Tensor:
        if self.product:
            return self.product(x)
        if kernel := self._skinny_kernel("skinny_product", x):
            return kernel(x, self.weight)
        assert self._transposed is not None
        return x @ self._transposed if self.bias is None else torch.addmm(self.bias, x, self._transposed)

    def gated(self, x: Tensor, gate: Gate = SWIGLU) -> Tensor:
        """[R, out / 2] of gates and ups, which are the halves of the outputs."""
        if gate == SWIGLU and (kernel := self._skinny_kernel("gated_product", x)):
            return kernel(x, self.weight)
        return gated(self(x), gate)

    def _skinny_kernel(self, name: str, x: Tensor) -> Callable[..., Tensor] | None:
        return dispatch.triton_kernel(name, x) if 0 < len(x) <= self._most_skinny_rows else None


# Of what attention gives and of what the feed-forward part does, where these are normed before they are added.
OUTPUT_NORMS = "attention_output_norm", "feed_forward_output_norm"

Attend = Callable[[int, Tensor, Tensor | None, int | None, Tensor | None], Tensor]


@dataclass(frozen=True)
class PassContext:
    """What every layer of one pass shares: the positions' angles, cos and sin, and `attend(layer, queries, keys_and_values, window,
    sinks)`.

    cache: the pool, and the slots [T] of this pass, where one kernel turns queries and keys and writes to the cache; the layers
    then have no keys and values to hand to `attend`. whole: what functions for whole layers need, where there are such.
    """

    angles: ByWindow[Angles]
    attend: Attend
    cache: tuple[KVPool, Tensor] | None = None
    whole: WholePass | None = None


def pass_context(rope: Rope, positions: Tensor, attend: Attend, window_rope: Rope | None = None) -> PassContext:
    """window_rope: of layers with a window, if they have one of their own."""
    own = rope.cos_sin(positions)
    angles = ByWindow(own, window_rope.cos_sin(positions) if window_rope else own)
    if not isinstance(attend, CachedAttention):
        return PassContext(angles, attend)
    if not (dispatch.prefers_triton(positions) or dispatch.prefers_compiled(positions, own[0].dtype)):
        return PassContext(angles, attend)
    pool, slots = attend.cache
    return PassContext(angles, attend, attend.cache, whole_pass(angles, pool.storage, slots, attend.whole_layers))


class Attention:
    """Grouped-query attention on a paged cache. `input_size` is the hidden size, or twice that in an EAGLE-3 head."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        shape: LayerShape,
        input_size: int,
        window: int | None,
        quantization: Quantization,
    ) -> None:
        self.num_heads, self._kv_heads, self._head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.window = window
        sizes = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
        names = {f"{prefix}.{part}_proj": heads * shape.head_dim for part, heads in sizes.items()}
        self.qkv = merged_linear(checkpoint, names, input_size, quantization)
        self.output = linear(checkpoint, f"{prefix}.o_proj", shape.hidden_size, shape.num_heads * shape.head_dim, quantization)
        sinks = checkpoint.take_optional(f"{prefix}.sinks", (shape.num_heads,))
        self.sinks = None if sinks is None else sinks.float()
        self.norms = head_norms(checkpoint, prefix, shape)
        self._most_turned_rows = 0 if self.qkv.product else most_turned_rows(self.qkv.weight, shape.head_dim)

    def quantized(self) -> "Attention":
        other = copy.copy(self)
        other.qkv, other.output = self.qkv.quantized(), self.output.quantized()
        return other

    def __call__(self, x: Tensor, layer: int, context: PassContext) -> Tensor:
        queries, keys_and_values = self._turn(x, layer, context)
        attended = context.attend(layer, queries, keys_and_values, self.window, self.sinks)
        return self.output(attended.flatten(1))

    def _turn(self, x: Tensor, layer: int, context: PassContext) -> tuple[Tensor, Tensor | None]:
        """Normed and rotated queries [T, heads, head_dim], and keys and values [T, 2, kv heads, head_dim] if not yet cached."""
        if context.cache:
            pool, slots = context.cache
            return self._turn_and_write(x, context, pool.storage[layer], slots), None
        qkv, norms, num_turned = self._qkv_heads(x), self.norms, self.num_heads + self._kv_heads
        turned = qkv[:, :num_turned]
        if norms and not norms.follow_turning:
            turned = norms(turned, self.num_heads)
        turned = rotate(turned, *context.angles.of(self.window))
        if norms and norms.follow_turning:
            turned = norms(turned, self.num_heads)
        qkv[:, :num_turned] = turned
        return qkv[:, : self.num_heads], qkv[:, self.num_heads :].unflatten(1, (2, self._kv_heads))

    def _turn_and_write(self, x: Tensor, context: PassContext, storage: Tensor, slots: Tensor) -> Tensor:
        turning = self.num_heads, *context.angles.of(self.window)
        if turned_product := self._turned_kernel(x):
            return turned_product(x, self.qkv.weight, self.qkv.bias, *turning, storage, slots)
        qkv = self._qkv_heads(x)
        rotate_and_write = dispatch.kernel_for("rotate_and_write", qkv)
        assert rotate_and_write  # or there would be no cache in the context
        return rotate_and_write(qkv, *turning, self.norms, storage, slots)

    def _turned_kernel(self, x: Tensor) -> Callable[..., Tensor] | None:
        """What makes queries, keys and values, turns them and writes to the cache at once, where there is such a kernel."""
        is_able = not (self.qkv.product or self.norms) and 0 < len(x) <= self._most_turned_rows
        return dispatch.triton_kernel("turned_product", x) if is_able else None

    def _qkv_heads(self, x: Tensor) -> Tensor:
        """[T, heads + 2 * kv heads, head_dim]."""
        return self.qkv(x).view(len(x), -1, self._head_dim)


class FeedForward:
    """Of one gate, which is the form of it."""

    choice_bias = None  # as experts may have one

    def __init__(self, checkpoint: Checkpoint, prefix: str, shape: LayerShape, quantization: Quantization) -> None:
        self.form = shape.gate
        names = {f"{prefix}.gate_proj": shape.intermediate_size, f"{prefix}.up_proj": shape.intermediate_size}
        self.gate_and_up = merged_linear(checkpoint, names, shape.hidden_size, quantization)
        self.down = linear(checkpoint, f"{prefix}.down_proj", shape.hidden_size, shape.intermediate_size, quantization)

    def quantized(self) -> "FeedForward":
        other = copy.copy(self)
        other.gate_and_up, other.down = self.gate_and_up.quantized(), self.down.quantized()
        return other

    @property
    def products(self) -> tuple[OpaqueProduct | None, ...]:
        return self.gate_and_up.product, self.down.product

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_and_up.gated(x, self.form))


class Block:
    """Attention and feed-forward part of one decoder layer; the norm before attention is its caller's. experts: those of its
    feed-forward part, if there are any. total: what the parts that processes hold of a layer come to together. quantization: of its
    weights, see `product_with`; those of norms and routers stay."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        shape: LayerShape,
        input_size: int,
        window: int | None = None,
        experts: ExpertShape | None = None,
        total: Total = whole,
        quantization: Quantization = "none",
    ) -> None:
        self._total = total
        self.attention = Attention(checkpoint, f"{prefix}.self_attn", shape, input_size, window, quantization)
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.feed_forward_norm = norm(checkpoint, f"{prefix}.post_attention_layernorm", size, eps)
        self.output_norms = None
        if f"{prefix}.{OUTPUT_NORMS[0]}.weight" in checkpoint:
            of_attention, of_feed_forward = (norm(checkpoint, f"{prefix}.{name}", size, eps) for name in OUTPUT_NORMS)
            self.output_norms = of_attention, of_feed_forward
        if experts:
            self.feed_forward = load_experts(checkpoint, f"{prefix}.mlp", shape.hidden_size, experts, quantization)
        else:
            self.feed_forward = FeedForward(checkpoint, f"{prefix}.mlp", shape, quantization)

    def quantized(self) -> "Block":
        """The same with weights of eight bits; norms stay."""
        other = copy.copy(self)
        other.attention, other.feed_forward = self.attention.quantized(), self.feed_forward.quantized()
        return other

    @property
    def parts(self) -> LayerParts:
        attention, feed_forward = self.attention, self.feed_forward
        products = (attention.qkv.product, attention.output.product, *feed_forward.products)
        return LayerParts(
            products,
            attention.num_heads,
            attention.norms,
            self.feed_forward_norm,
            attention.window,
            attention.sinks,
            feed_forward.form,
            feed_forward.choice_bias,
            self.output_norms,
        )

    def __call__(self, x: Tensor, attention_input: Tensor, layer: int, context: PassContext) -> tuple[Tensor, Tensor]:
        """(x after the attention, what the feed-forward part adds to it): the next norm takes both."""
        added = self._total(self.attention(attention_input, layer, context))
        x, normed = self.feed_forward_norm.after_adding(x, self.output_norms[0](added) if self.output_norms else added)
        added = self._total(self.feed_forward(normed))
        return x, self.output_norms[1](added) if self.output_norms else added


def linear(checkpoint: Checkpoint, name: str, out_size: int, in_size: int, quantization: Quantization = "none") -> Linear:
    return merged_linear(checkpoint, {name: out_size}, in_size, quantization)


def merged_linear(checkpoint: Checkpoint, out_sizes: dict[str, int], in_size: int, quantization: Quantization) -> Linear:
    """Several projections of one input as a single product. Either all of them have a bias or none has; one of zeros only, as
    quantizers write them, is none.

    Each is copied to its place as it is read, so that no more than one of them is in memory twice.
    """
    biases = [checkpoint.take(f"{name}.bias", (size,)) for name, size in out_sizes.items() if f"{name}.bias" in checkpoint]
    bias = torch.cat(biases) if any(own.any() for own in biases) else None
    if len(out_sizes) == 1:
        (name, size), *_ = out_sizes.items()
        return Linear(checkpoint.take(f"{name}.weight", (size, in_size)), bias, quantization)
    merged, row = None, 0
    for name, size in out_sizes.items():
        weight = checkpoint.take(f"{name}.weight", (size, in_size))
        if merged is None:
            merged = weight.new_empty(sum(out_sizes.values()), in_size)
        merged[row : row + size] = weight
        row += size
    assert merged is not None
    return Linear(merged, bias, quantization)


def norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> RMSNorm:
    return RMSNorm(checkpoint.take(f"{name}.weight", (size,)), eps)


def head_norms(checkpoint: Checkpoint, prefix: str, shape: LayerShape) -> HeadNorms | None:
    """Their names tell whether they come before turning or after it."""
    for (queries, keys), follow_turning in ((("q_norm", "k_norm"), False), (("query_layernorm", "key_layernorm"), True)):
        if f"{prefix}.{queries}.weight" in checkpoint:
            of_queries, of_keys = (
                norm(checkpoint, f"{prefix}.{name}", shape.head_dim, shape.rms_norm_eps) for name in (queries, keys)
            )
            return HeadNorms(of_queries, of_keys, follow_turning)
    return None


def optional_norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> RMSNorm | None:
    return norm(checkpoint, name, size, eps) if f"{name}.weight" in checkpoint else None
