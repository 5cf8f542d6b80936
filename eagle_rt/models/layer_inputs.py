"""What tokens bring to every layer of a decoder, beside what comes from the layer before (Gemma 4's small models)."""

import torch
from torch import Tensor

from eagle_rt.kernels.embed import embed, rounded_scale
from eagle_rt.kernels.gate import Gate, gated
from eagle_rt.kernels.packed_linear import OpaqueProduct
from eagle_rt.kernels.products import Quantization
from eagle_rt.models.layer_shape import LayerShape
from eagle_rt.models.layers import norm
from eagle_rt.models.linear import linear
from eagle_rt.models.spec import ModelSpec
from eagle_rt.models.weights import Checkpoint


class LayerInputs:
    """Half of it is embedded for each layer by itself, and half comes of the first layer's input."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, quantization: Quantization) -> None:
        assert spec.layer_inputs
        self._num_layers, size = spec.num_layers, spec.layer_inputs.size
        width, hidden_size = spec.num_layers * size, spec.shape.hidden_size
        self._embedding = checkpoint.take("model.embed_tokens_per_layer.weight", (spec.layer_inputs.vocab_size, width))
        self._projection = linear(checkpoint, "model.per_layer_model_projection", width, hidden_size, quantization)
        self._norm = norm(checkpoint, "model.per_layer_projection_norm", size, spec.shape.rms_norm_eps)
        self._embedding_scale = rounded_scale(size**0.5, self._embedding.dtype)
        self._projection_scale = hidden_size**-0.5

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """[T, L, size] of tokens [T], and what enters the first layer [T, H]."""
        embedded = embed(tokens, self._embedding, self._embedding_scale)
        projected, embedded = (
            own.unflatten(1, (self._num_layers, -1)) for own in (self._projection(x) * self._projection_scale, embedded)
        )
        return (self._norm(projected) + embedded) * 2**-0.5


class LayerInput:
    """How one layer takes its own: behind its feed-forward part, gated by what the layer gives until then."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, shape: LayerShape, size: int, quantization: Quantization) -> None:
        self._gate = linear(checkpoint, f"{prefix}.per_layer_input_gate", size, shape.hidden_size, quantization)
        self._projection = linear(checkpoint, f"{prefix}.per_layer_projection", shape.hidden_size, size, quantization)
        self._norm = norm(checkpoint, f"{prefix}.post_per_layer_input_norm", shape.hidden_size, shape.rms_norm_eps)
        self._form: Gate = shape.gate

    @property
    def products(self) -> tuple[OpaqueProduct | None, ...]:
        return self._gate.product, self._projection.product

    def __call__(self, x: Tensor, own: Tensor) -> Tensor:
        """[T, H] what it adds to x [T, H]; own: [T, size]."""
        return self._norm(self._projection(gated(torch.cat((self._gate(x), own), dim=1), self._form)))
