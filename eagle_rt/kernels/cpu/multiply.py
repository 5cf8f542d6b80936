"""Products of rows with weights of any kind, for compiled functions; needs numba."""

from numba.core import types
from numba.extending import overload
from numpy.typing import NDArray

from eagle_rt.kernels.cpu.int4_product import Int4Weights, int4_product
from eagle_rt.kernels.cpu.int8_product import Int8Weights, int8_product
from eagle_rt.kernels.cpu.product import RowWeights, product
from eagle_rt.kernels.cpu.vectors import words_of

Weights = RowWeights | Int8Weights | Int4Weights


def multiply(x: NDArray, weights: Weights, outputs: NDArray) -> None:
    """Fills outputs [T, N] with x [T, in] times the weights, and their bias. Both are an `array_of`."""
    if isinstance(weights, Int4Weights):
        int4_product(x, weights, outputs)
    elif isinstance(weights, Int8Weights):
        int8_product(x, weights, outputs)
    else:
        product(words_of(x), weights.words, weights.bias, outputs)


def weights_at(weights: Weights, layer: int) -> Weights:
    """Of weights with one more axis, the first: those of one layer."""
    return type(weights)(*(values[layer] for values in weights))


@overload(weights_at)
def _compiled_weights_at(weights, layer):  # numba wants the parameters of what it returns, and no annotations
    assert isinstance(weights, types.NamedTuple)
    if weights.instance_class is Int4Weights:
        return lambda weights, layer: Int4Weights(
            weights.words[layer],
            weights.ratios[layer],
            weights.nothings[layer],
            weights.levels[layer],
            weights.scales[layer],
            weights.bias[layer],
        )
    if weights.instance_class is Int8Weights:
        return lambda weights, layer: Int8Weights(
            weights.words[layer], weights.scales[layer], weights.offsets[layer], weights.bias[layer]
        )
    return lambda weights, layer: RowWeights(weights.words[layer], weights.bias[layer])


@overload(multiply)
def _compiled_multiply(x, weights, outputs):  # numba wants the parameters of what it returns, and no annotations
    assert isinstance(weights, types.NamedTuple)
    if weights.instance_class is Int4Weights:
        return lambda x, weights, outputs: int4_product(x, weights, outputs)
    if weights.instance_class is Int8Weights:
        return lambda x, weights, outputs: int8_product(x, weights, outputs)
    return lambda x, weights, outputs: product(words_of(x), weights.words, weights.bias, outputs)
