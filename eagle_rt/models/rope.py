"""Rotary frequencies from a checkpoint's config, with the scalings that long-context models use."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_rt.kernels.dispatch import compiled_kernel, triton_kernel

DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeSpec:
    """kind: default, linear, dynamic, llama3 or yarn; parameters: the config's own numbers for it.

    max_position_embeddings: of the config; context_length: what is served, which decides the stretch of `dynamic`.
    """

    head_dim: int
    theta: float
    kind: str
    parameters: dict[str, Any]
    max_position_embeddings: int


def rope_from_config(config: dict[str, Any], head_dim: int) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4).

    Raises:
        ValueError: the kind of scaling is not supported.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in INVERSE_FREQUENCIES:
        raise ValueError(f"config.json asks for rope scaling {kind!r}; supported are {', '.join(INVERSE_FREQUENCIES)}")
    theta = parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
    return RopeSpec(head_dim, float(theta), kind, parameters, config.get("max_position_embeddings", 2048))


def default_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    return 1.0 / spec.theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim), 1.0


def linear_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    """Positions divided by a factor (Chen et al., 2023)."""
    frequencies, scale = default_frequencies(spec, context_length)
    return frequencies / spec.parameters["factor"], scale


def dynamic_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    """NTK-aware stretching of the base.

    Transformers stretches as a text grows, so that cached keys and new queries disagree; here the stretch is fixed by the
    served context length, and equals transformers' while a text fits the trained length.
    """
    trained = spec.parameters.get("original_max_position_embeddings") or spec.max_position_embeddings
    factor = spec.parameters["factor"]
    length = max(context_length, trained)
    stretch = (factor * length / trained - (factor - 1)) ** (spec.head_dim / (spec.head_dim - 2))
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    return 1.0 / (spec.theta * stretch) ** exponents, 1.0


def llama3_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    """Long wavelengths divided by a factor, short ones kept, the ones between blended (Llama 3.1)."""
    frequencies, scale = default_frequencies(spec, context_length)
    low, high = spec.parameters["low_freq_factor"], spec.parameters["high_freq_factor"]
    trained = spec.parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    keep = ((trained / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies / spec.parameters["factor"] * (1 - keep) + frequencies * keep, scale


def yarn_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): interpolate by wavelength, and warm the attention's temperature."""
    frequencies, _ = default_frequencies(spec, context_length)
    given = spec.parameters
    trained = given.get("original_max_position_embeddings") or spec.max_position_embeddings
    factor = given.get("factor") or spec.max_position_embeddings / trained

    def dimension_with(num_rotations: float) -> float:
        return spec.head_dim * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension_with(given.get("beta_fast") or 32), dimension_with(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    ramp = ((torch.arange(spec.head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    blended = frequencies / factor * ramp + frequencies * (1 - ramp)

    def warmth(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    temperature = given.get("attention_factor")
    if temperature is None:
        mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
        temperature = warmth(factor, mscale) / warmth(factor, mscale_all) if mscale and mscale_all else warmth(factor)
    return blended, float(temperature)


INVERSE_FREQUENCIES = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "dynamic": dynamic_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
}


class Rope:
    """Angles for any position: nothing is tabulated, so nothing ends at a table's length."""

    def __init__(self, spec: RopeSpec, context_length: int, dtype: torch.dtype, device: str) -> None:
        frequencies, self._scale = INVERSE_FREQUENCIES[spec.kind](spec, context_length)
        # Negating the first half negates its sines and leaves the cosines as they are.
        self._frequencies = torch.cat((-frequencies, frequencies)).to(device)
        self._dtype = dtype

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin [T, 1, head_dim] for `kernels.rotary.rotate`."""
        if kernel := triton_kernel("cos_sin", positions) or compiled_kernel("cos_sin", positions, self._dtype):
            return kernel(positions, self._frequencies, self._scale, self._dtype)
        angles = positions[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        return cos.to(self._dtype), sin.to(self._dtype)
