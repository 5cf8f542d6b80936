"""Which products serve, and which experts, whose weights are laid out for them: on a CPU, and on a GPU those of few bits."""

import importlib.util
import platform
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from eagle_rt.kernels.dispatch import HAS_TRITON
from eagle_rt.kernels.experts import ExpertTensors, Mixing
from eagle_rt.kernels.narrow import narrowed
from eagle_rt.kernels.narrow_experts import NarrowExperts, narrow_experts
from eagle_rt.kernels.narrow_product import NarrowProduct
from eagle_rt.kernels.packed_linear import OpaqueProduct, PackedProduct, can_pack
from eagle_rt.kernels.processor import has_amx

if TYPE_CHECKING:  # not everywhere is numba installed
    from eagle_rt.kernels.panel_experts import PanelExperts


def has_own_kernels(weight: Tensor) -> bool:
    """Whether our kernels run here, for weights of this precision."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    return platform.machine() == "x86_64" and importlib.util.find_spec("numba") is not None and torch.cpu._is_avx2_supported()


def takes_own_kernel(weight: Tensor) -> bool:
    """Whether our kernel multiplies with this weight here: faster than oneDNN's products of few rows, but perhaps not in half
    precision with AMX, where it has not been measured (two cores each of an EPYC, and of a Xeon without AMX)."""
    return has_own_kernels(weight) and not (weight.dtype == torch.bfloat16 and has_amx())


def has_narrow_kernels(weight: Tensor) -> bool:
    """Whether our kernels for weights of few bits run on the GPU where this one is, for its precision."""
    return (
        HAS_TRITON
        and weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    )


Quantization = Literal["none", "int8", "int4", "stored"]


def can_round(weight: Tensor) -> bool:
    """Whether weights like this one may be rounded to few bits here."""
    return has_own_kernels(weight) or has_narrow_kernels(weight)


def product_with(weight: Tensor, bias: Tensor | None, quantization: Quantization = "none") -> OpaqueProduct | None:
    """x W^T + b for W [out, in] from a weight laid out for it; None where there is none but torch's own.

    quantization: to how many bits W is rounded, where it `can_round`; "stored": to none, but one that was stored in few bits, as
    its numbers show, is held in them: in four, or on a GPU in E4M3.
    """
    if quantization != "none":
        product = quantized_product_with(weight, bias, quantization)
        if product:
            return product
    if takes_own_kernel(weight):
        from eagle_rt.kernels.panel_product import RowProduct  # not everywhere is numba installed

        return RowProduct(weight, bias)
    return PackedProduct(weight, bias) if can_pack(weight) else None


def quantized_product_with(weight: Tensor, bias: Tensor | None, quantization: Quantization) -> OpaqueProduct | None:
    """The same with a weight of few bits; None where it was not stored in them and is not to be rounded."""
    if has_narrow_kernels(weight):
        narrow = narrowed(weight, quantization)
        return narrow and NarrowProduct(narrow, bias, weight.dtype)
    from eagle_rt.kernels.panel_product import quantized_product  # not everywhere is numba installed

    return quantized_product(weight, bias, quantization)


def of_output_layer(quantization: Quantization) -> Quantization:
    """How a model's output layer is held: it is rounded to eight bits at least."""
    return "int8" if quantization == "int4" else quantization


def experts_with(
    weights: ExpertTensors, mixing: Mixing, quantization: Quantization = "none"
) -> "PanelExperts | NarrowExperts | None":
    """Experts from weights laid out for it, see `panel_experts` and `narrow_experts`; None where all read them as they are.

    Raises:
        ValueError: they are to be rounded, and there is none.
    """
    if quantization != "none" and has_narrow_kernels(weights.down):
        return narrow_experts(weights, mixing, quantization)
    if has_own_kernels(weights.down):
        from eagle_rt.kernels.panel_experts import PanelExperts, fill_panels  # not everywhere is numba installed

        if fill_panels(weights):
            return PanelExperts(weights, mixing, quantization)
    if quantization in ("int8", "int4"):
        raise ValueError(f"experts of {list(weights.down.shape[1:])} have no kernels of {quantization}: serve them as they are")
    return None
