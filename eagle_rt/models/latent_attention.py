"""Attention over latents: of every token the cache keeps a few numbers for all heads (DeepSeek-AI, 2024)."""

import copy

from torch import Tensor

from eagle_rt.kernels import dispatch
from eagle_rt.kernels.head_products import HeadProducts
from eagle_rt.kernels.latents import latent_queries, latent_rows, normed_queries
from eagle_rt.kernels.packed_linear import OpaqueProduct
from eagle_rt.kernels.products import Quantization
from eagle_rt.kernels.rms_norm import RMSNorm
from eagle_rt.models.layer_shape import LayerShape
from eagle_rt.models.linear import linear, merged_linear
from eagle_rt.models.pass_context import PassContext
from eagle_rt.models.weights import Checkpoint

# Of the norms within, whatever those of layers have.
EPS = 1e-6


class LatentAttention:
    """Keys and values are never made of latents. Each head's queries are led to where latents are, which their keys would have been
    made from, and what attention gives, a mean of latents, is led to values afterwards. So all heads look at the same rows, of
    `rank` numbers and of those of a key that is turned by its position, and a cached row takes hardly more than one head's would.

    What leads there and back is not rounded by a quantization.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str, shape: LayerShape, quantization: Quantization) -> None:
        assert shape.latent
        self._shape = own = shape.latent
        num_heads, queries_size = shape.num_heads, shape.num_heads * own.query_dim

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"{prefix}.{name}.weight", (size,)), EPS)

        first = {"q_a_proj": own.query_rank} if own.query_rank else {"q_proj": queries_size}
        names = {**first, "kv_a_proj_with_mqa": own.rank + own.rope_dim}
        self.inputs = merged_linear(
            checkpoint, {f"{prefix}.{name}": size for name, size in names.items()}, shape.hidden_size, quantization
        )
        self._queries_norm = self.queries = None
        if own.query_rank:
            self._queries_norm = norm("q_a_layernorm", own.query_rank)
            self.queries = linear(checkpoint, f"{prefix}.q_b_proj", queries_size, own.query_rank, quantization)
        self._latents_norm = norm("kv_a_layernorm", own.rank)
        made = checkpoint.take(f"{prefix}.kv_b_proj.weight", (num_heads * (own.nope_dim + own.value_dim), own.rank))
        keys, values = made.unflatten(0, (num_heads, -1)).split((own.nope_dim, own.value_dim), dim=1)
        self._to_latents, self._to_values = HeadProducts(keys.transpose(1, 2)), HeadProducts(values)
        self.output = linear(checkpoint, f"{prefix}.o_proj", shape.hidden_size, num_heads * own.value_dim, quantization)

    @property
    def products(self) -> tuple[OpaqueProduct | None, ...]:
        queries = (self.queries.product,) if self.queries else ()
        return self.inputs.product, *queries, self.output.product

    def quantized(self) -> "LatentAttention":
        other = copy.copy(self)
        other.inputs, other.output = self.inputs.quantized(), self.output.quantized()
        other.queries = self.queries and self.queries.quantized()
        return other

    def __call__(self, x: Tensor, layer: int, context: PassContext) -> Tensor:
        own, angles = self._shape, context.angles.of(None)
        queries, rows = self._queries_and_rows(self.inputs(x), layer, context)
        queries = (self.queries(queries) if self.queries else queries).unflatten(1, (-1, own.query_dim))
        led = self._to_latents(queries[..., : own.nope_dim])
        attended = context.attend(layer, latent_queries(led, queries, *angles), rows, None, None)
        return self.output(self._to_values(attended).flatten(1))

    def _queries_and_rows(self, inputs: Tensor, layer: int, context: PassContext) -> tuple[Tensor, Tensor | None]:
        """What queries are made of, and rows of the cache [T, 1, 1, rank + rope_dim] if not yet written."""
        norms, angles = (self._queries_norm, self._latents_norm), context.angles.of(None)
        if context.cache and (write_latents := dispatch.kernel_for("write_latents", inputs)):
            pool, slots = context.cache
            return write_latents(inputs, *norms, *angles, pool.layers[layer], slots), None
        queries, latents = inputs.tensor_split((-self._shape.rank - self._shape.rope_dim,), dim=1)
        return normed_queries(queries, norms[0]), latent_rows(latents, norms[1], *angles)
