"""The parts that target and head are made of. Weights are fixed at construction; calling changes nothing but the cache."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_rt.kernels import dispatch
from eagle_rt.kernels.delta_net import DeltaNetShape
from eagle_rt.kernels.narrow_experts import NarrowStack
from eagle_rt.kernels.packed_linear import OpaqueProduct
from eagle_rt.kernels.products import Quantization
from eagle_rt.kernels.rms_norm import AllHeadNorms, HeadNorms, RMSNorm, norms_side_by_side
from eagle_rt.kernels.rotary import rotate
from eagle_rt.kernels.skinny import most_turned_rows
from eagle_rt.kernels.whole_pass import LayerParts
from eagle_rt.models.delta_net import DeltaNet
from eagle_rt.models.experts import load_experts
from eagle_rt.models.latent_attention import LatentAttention
from eagle_rt.models.layer_kinds import ExpertShape, has_gate
from eagle_rt.models.layer_shape import LayerShape
from eagle_rt.models.linear import linear, merged_linear
from eagle_rt.models.pass_context import PassContext
from eagle_rt.models.shard import Total, whole
from eagle_rt.models.weights import Checkpoint

if TYPE_CHECKING:  # not everywhere is numba installed
    from eagle_rt.kernels.panel_product import ProductStack

# Of what attention gives and of what the feed-forward part does, where these are normed before they are added.
OUTPUT_NORMS = "attention_output_norm", "feed_forward_output_norm"
# What the weights are called here that are stored with those of queries.
GATES_OF_ATTENTION = ".attention_gate.weight"


class Attention:
    """Grouped-query attention on a paged cache, which may be over the rows of another layer. `input_size` is the hidden size, or
    twice that in an EAGLE-3 head."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        shape: LayerShape,
        input_size: int,
        window: int | None,
        quantization: Quantization,
    ) -> None:
        self.num_heads, self._head_dim = shape.num_heads, shape.head_dim
        self._kv_heads = 0 if shape.shares_rows else shape.num_kv_heads
        self.window = window
        sizes = {"q": shape.num_heads, "k": self._kv_heads, "v": self._kv_heads}
        names = {f"{prefix}.{part}_proj": heads * shape.head_dim for part, heads in sizes.items() if heads}
        self.qkv = merged_linear(checkpoint, names, input_size, quantization)
        self.output = linear(checkpoint, f"{prefix}.o_proj", shape.hidden_size, shape.num_heads * shape.head_dim, quantization)
        sinks = checkpoint.take_optional(f"{prefix}.sinks", (shape.num_heads,))
        self.sinks = None if sinks is None else sinks.float()
        self.norms, self._all_head_norms = None, None
        if shape.norms_all_heads:
            queries, keys = (
                norm(checkpoint, f"{prefix}.{part}_norm", sizes[part] * shape.head_dim, shape.rms_norm_eps) for part in "qk"
            )
            self._all_head_norms = AllHeadNorms(queries, keys)
        else:
            self.norms = head_norms(checkpoint, prefix, shape, turns=window is not None)
        self.gates = None
        if shape.gates_attention:
            name = f"{prefix}{GATES_OF_ATTENTION.removesuffix('.weight')}"
            self.gates = linear(checkpoint, name, shape.num_heads * shape.head_dim, input_size, quantization)
        self._most_turned_rows = 0 if self.qkv.product else most_turned_rows(self.qkv.weight, shape.head_dim)

    def quantized(self) -> "Attention":
        other = copy.copy(self)
        other.qkv, other.output = self.qkv.quantized(), self.output.quantized()
        other.gates = self.gates and self.gates.quantized()
        return other

    @property
    def is_plain(self) -> bool:
        """Whether whole layers of it are one compiled function."""
        return not (self.gates or self._all_head_norms or (self.norms and self.norms.values))

    @property
    def products(self) -> tuple[OpaqueProduct | None, ...]:
        gates = (self.gates.product,) if self.gates else ()
        return self.qkv.product, self.output.product, *gates

    def __call__(self, x: Tensor, layer: int, context: PassContext) -> Tensor:
        queries, keys_and_values = self._turn(x, layer, context)
        if context.query_scales is not None:
            queries = queries * context.query_scales
        attended = context.attend(layer, queries, keys_and_values, self.window, self.sinks).flatten(1)
        return self.output(attended * self.gates(x).sigmoid() if self.gates else attended)

    def _turn(self, x: Tensor, layer: int, context: PassContext) -> tuple[Tensor, Tensor | None]:
        """Normed and rotated queries [T, heads, head_dim], and keys and values [T, 2, kv heads, head_dim] if not yet cached."""
        if context.cache:
            pool, slots = context.cache
            return self._turn_and_write(x, context, pool.layers[layer][:, :, : self._kv_heads], slots), None
        qkv, norms, num_turned = self._qkv_heads(x), self.norms, self.num_heads + self._kv_heads
        turned = qkv[:, :num_turned]
        if norms and not norms.follow_turning:
            turned = norms(turned, self.num_heads)
        turned = rotate(turned, *context.angles.of(self.window))
        if norms and norms.follow_turning:
            turned = norms(turned, self.num_heads)
        qkv[:, :num_turned] = turned
        if norms and norms.values:
            qkv[:, num_turned:] = norms.values(qkv[:, num_turned:])
        if not self._kv_heads:
            return qkv, None
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
        is_able = not (self.qkv.product or self.norms or self._all_head_norms) and 0 < len(x) <= self._most_turned_rows
        return dispatch.triton_kernel("turned_product", x) if is_able else None

    def _qkv_heads(self, x: Tensor) -> Tensor:
        """[T, heads + 2 * kv heads, head_dim]."""
        qkv = self.qkv(x)
        return (self._all_head_norms(qkv) if self._all_head_norms else qkv).view(len(x), -1, self._head_dim)


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
    weights, see `product_with`; those of norms and routers stay. delta_net: what stands in attention's place, if anything does."""

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
        delta_net: DeltaNetShape | None = None,
    ) -> None:
        self._total = total
        if delta_net:
            self.attention = DeltaNet(checkpoint, f"{prefix}.linear_attn", shape, delta_net, quantization)
        elif shape.latent:
            self.attention = LatentAttention(checkpoint, f"{prefix}.self_attn", shape, quantization)
        else:
            self.attention = Attention(checkpoint, f"{prefix}.self_attn", shape, input_size, window, quantization)
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.feed_forward_norm = norm(checkpoint, f"{prefix}.post_attention_layernorm", size, eps)
        self.output_norms = None
        if f"{prefix}.{OUTPUT_NORMS[0]}.weight" in checkpoint:
            of_attention, of_feed_forward = (norm(checkpoint, f"{prefix}.{name}", size, eps) for name in OUTPUT_NORMS)
            self.output_norms = of_attention, of_feed_forward
        self._beside = None
        if experts and not has_gate(experts):
            self.feed_forward = load_experts(checkpoint, f"{prefix}.mlp", size, experts, quantization)
        else:
            self.feed_forward = FeedForward(checkpoint, f"{prefix}.mlp", shape, quantization)
            self._beside = experts and ExpertsBeside(checkpoint, prefix, shape, experts, quantization)

    def quantized(self) -> "Block":
        """The same with weights of eight bits; norms stay."""
        other = copy.copy(self)
        other.attention, other.feed_forward = self.attention.quantized(), self.feed_forward.quantized()
        other._beside = self._beside and self._beside.quantized()
        return other

    @property
    def products(self) -> "tuple[OpaqueProduct | ProductStack | NarrowStack | None, ...]":
        """Of its weights."""
        return *self.attention.products, *self.feed_forward.products, *(self._beside.products if self._beside else ())

    @property
    def parts(self) -> LayerParts | None:
        """What a compiled function for whole layers is made of; None if there is none for such layers."""
        attention, feed_forward = self.attention, self.feed_forward
        if not isinstance(attention, Attention) or not attention.is_plain or self._beside:
            return None
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
        if self._beside:
            added = self._beside(added, x, self._total)
        return x, self.output_norms[1](added) if self.output_norms else added


class ExpertsBeside:
    """Experts beside a feed-forward part of one gate (Gemma 4): what both add is normed, each by itself, and summed. Experts look
    at what attention leaves through a norm of theirs, and their router through another one."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, shape: LayerShape, experts: ExpertShape, quantization: Quantization
    ) -> None:
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self._gate_norm, self._input_norm, self._output_norm = (
            norm(checkpoint, f"{prefix}.{name}", size, eps)
            for name in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
        )
        self._router_norm = RMSNorm(checkpoint.take(f"{prefix}.mlp.gate.scale", (size,)) * size**-0.5, eps)
        self._experts = load_experts(checkpoint, f"{prefix}.mlp", size, experts, quantization)

    @property
    def products(self) -> "tuple[OpaqueProduct | ProductStack | NarrowStack | None, ...]":
        return self._experts.products

    def quantized(self) -> "ExpertsBeside":
        other = copy.copy(self)
        other._experts = self._experts.quantized()
        return other

    def __call__(self, gated: Tensor, x: Tensor, total: Total) -> Tensor:
        """[T, H] the sum; gated: what the feed-forward part of one gate adds, x: what the attention leaves."""
        added = total(self._experts(norms_side_by_side(x, self._input_norm, x, self._router_norm)))
        return self._gate_norm(gated) + self._output_norm(added)


def norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> RMSNorm:
    return RMSNorm(checkpoint.take(f"{name}.weight", (size,)), eps)


def head_norms(checkpoint: Checkpoint, prefix: str, shape: LayerShape, *, turns: bool) -> HeadNorms | None:
    """Their names tell whether they come before turning or after it. turns: whether this layer does,
    where only those that do have some."""
    ones = RMSNorm(torch.ones(shape.head_dim, device=checkpoint.device), shape.rms_norm_eps)
    if shape.norms_turned and turns:
        return HeadNorms(ones, ones, follow_turning=True)
    for (queries, keys), follow_turning in ((("q_norm", "k_norm"), False), (("query_layernorm", "key_layernorm"), True)):
        if f"{prefix}.{queries}.weight" in checkpoint:
            of_queries, of_keys = (
                norm(checkpoint, f"{prefix}.{name}", shape.head_dim, shape.rms_norm_eps)
                for name in (queries, queries if shape.shares_rows else keys)
            )
            return HeadNorms(of_queries, of_keys, follow_turning, ones if shape.norms_values else None)
    return None


def optional_norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> RMSNorm | None:
    return norm(checkpoint, name, size, eps) if f"{name}.weight" in checkpoint else None
