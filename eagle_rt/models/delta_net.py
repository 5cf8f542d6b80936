"""The part of a decoder layer that stands in attention's place where a layer has a memory."""

import copy

import torch
from torch import Tensor

from eagle_rt.kernels.delta_net import DeltaNetShape, DeltaNetWeights
from eagle_rt.kernels.packed_linear import OpaqueProduct
from eagle_rt.kernels.products import Quantization
from eagle_rt.models.layer_shape import LayerShape
from eagle_rt.models.linear import linear, merged_linear
from eagle_rt.models.pass_context import PassContext
from eagle_rt.models.weights import Checkpoint


class DeltaNet:
    """A gated delta net, see `kernels.delta_net`, and the products before and after it. Those that say how much is forgotten are
    small and are not rounded."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, shape: LayerShape, own: DeltaNetShape, quantization: Quantization
    ) -> None:
        size, heads = shape.hidden_size, own.num_heads

        def numbers(name: str, *sizes: int) -> Tensor:
            return checkpoint.take_raw(f"{prefix}.{name}", sizes).to(checkpoint.device, torch.float32)

        names = {f"{prefix}.in_proj_qkv": own.num_channels, f"{prefix}.in_proj_z": own.values_size}
        self.inputs = merged_linear(checkpoint, names, size, quantization)
        self.rates = merged_linear(checkpoint, {f"{prefix}.in_proj_{name}": heads for name in "ba"}, size, "none")
        self.output = linear(checkpoint, f"{prefix}.out_proj", size, own.values_size, quantization)
        self._weights = DeltaNetWeights(
            shape=own,
            kernel=numbers("conv1d.weight", own.num_channels, 1, own.taps)[:, 0],
            decay=numbers("A_log", heads).exp(),
            time_bias=numbers("dt_bias", heads),
            norm=numbers("norm.weight", own.value_dim),
            eps=shape.rms_norm_eps,
        )

    @property
    def products(self) -> tuple[OpaqueProduct | None, ...]:
        return self.inputs.product, self.output.product

    def quantized(self) -> "DeltaNet":
        other = copy.copy(self)
        other.inputs, other.output = self.inputs.quantized(), self.output.quantized()
        return other

    def __call__(self, x: Tensor, layer: int, context: PassContext) -> Tensor:
        assert context.recurrence, "the cache of this pass has no memories"
        return self.output(context.recurrence(layer, self.inputs(x), self.rates(x), self._weights))
