"""Rotary frequencies from a checkpoint's config, with the scalings that long-context models use."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle_rt.kernels.dispatch import compiled_kernel, triton_kernel

DEFAULT_THETA = 10000.0
# What transformers 4 writes beside `rope_scaling`, and 5 into `rope_parameters`.
BESIDE_PARAMETERS = "original_max_position_embeddings", "partial_rotary_factor"


@dataclass(frozen=True)
class RopeSpec:
    """kind: one of `INVERSE_FREQUENCIES`; parameters: the config's own numbers for it.

    rotary_dim: how many of a head's numbers are turned, the others stay as they are; max_position_embeddings: of the config.
    What is served, `context_length` below, decides the stretch of `dynamic` and `longrope`.
    """

    head_dim: int
    rotary_dim: int
    theta: float
    kind: str
    parameters: dict[str, Any]
    max_position_embeddings: int

    @property
    def trained_length(self) -> int:
        return self.parameters.get("original_max_position_embeddings") or self.max_position_embeddings

    @property
    def query_growth(self) -> float:
        """How fast queries past the trained length grow, see `Rope.query_scales`."""
        return self.parameters.get("llama_4_scaling_beta") or 0.0

    def takes_long_factors(self, context_length: int) -> bool:
        """Where `longrope` has two sets."""
        return self.kind == "longrope" and context_length > self.trained_length


def rope_from_config(config: dict[str, Any], head_dim: int) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4).

    Raises:
        ValueError: the kind of scaling is not supported, or what it needs is missing or wrong.
    """
    given = {name: config[name] for name in BESIDE_PARAMETERS if config.get(name)}
    parameters = given | (config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in INVERSE_FREQUENCIES:
        raise ValueError(f"config.json asks for rope scaling {kind!r}; supported are {', '.join(INVERSE_FREQUENCIES)}")
    missing = [name for name in NEEDED.get(kind, ()) if parameters.get(name) is None]
    if missing:
        raise ValueError(f"config.json asks for rope scaling {kind!r} without {missing[0]}")
    theta = parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
    partial = parameters.get("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * partial)
    if kind == "proportional":
        rotary_dim = head_dim
    if partial != 1 and (not 2 <= rotary_dim <= head_dim or rotary_dim % 2):
        raise ValueError(f"partial_rotary_factor {partial} in config.json turns {rotary_dim} of a head's {head_dim} numbers")
    return RopeSpec(head_dim, rotary_dim, float(theta), kind, parameters, config.get("max_position_embeddings", 2048))


def ropes_from_config(
    config: dict[str, Any], head_dim: int, global_head_dim: int | None = None
) -> tuple[RopeSpec, RopeSpec | None]:
    """That of all layers, and that of those with a window where they have one of their own (Gemma 3): in transformers 5 either kind
    has its parameters, in transformers 4 the second has a base, and no scaling. global_head_dim: of the first then.

    Raises:
        ValueError: as `rope_from_config`.
    """
    kinds, base = config.get("rope_parameters") or {}, config.get("rope_local_base_freq")
    if "full_attention" in kinds and "sliding_attention" in kinds:
        full, sliding = ({"rope_parameters": kinds[kind]} for kind in ("full_attention", "sliding_attention"))
    elif base:
        full, sliding = {}, {"rope_theta": base, "rope_scaling": None, "rope_parameters": None}
    else:
        return rope_from_config(config, head_dim), None
    return rope_from_config(config | full, global_head_dim or head_dim), rope_from_config(config | sliding, head_dim)


def default_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    return 1.0 / spec.theta ** (torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim), 1.0


def proportional_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    """Those of all numbers of a head, of which only the first are turned (Gemma 4): `partial_rotary_factor` says how many."""
    frequencies, scale = default_frequencies(spec, context_length)
    num_turned = int(spec.parameters.get("partial_rotary_factor", 1.0) * spec.head_dim // 2)
    frequencies[num_turned:] = 0.0
    return frequencies / spec.parameters.get("factor", 1.0), scale


def linear_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    """Positions divided by a factor (Chen et al., 2023)."""
    frequencies, scale = default_frequencies(spec, context_length)
    return frequencies / spec.parameters["factor"], scale


def dynamic_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    """NTK-aware stretching of the base, by `alpha` where it is given, as Hunyuan's is.

    Transformers stretches as a text grows, so that cached keys and new queries disagree; here the stretch is fixed by the
    served context length, and equals transformers' while a text fits the trained length.
    """
    stretch = spec.parameters.get("alpha")
    if stretch is None:
        trained, factor = spec.trained_length, spec.parameters["factor"]
        stretch = factor * max(context_length, trained) / trained - (factor - 1)
    theta = spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2))
    return default_frequencies(replace(spec, theta=theta), context_length)


def llama3_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    """Long wavelengths divided by a factor, short ones kept, the ones between blended (Llama 3.1)."""
    frequencies, scale = default_frequencies(spec, context_length)
    low, high = spec.parameters["low_freq_factor"], spec.parameters["high_freq_factor"]
    trained = spec.parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    keep = ((trained / wavelengths - low) / max(high - low, 1e-6)).clamp(0, 1)  # which are one in Llama 4's
    return frequencies / spec.parameters["factor"] * (1 - keep) + frequencies * keep, scale


def yarn_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): interpolate by wavelength, and warm the attention's temperature."""
    frequencies, _ = default_frequencies(spec, context_length)
    given, trained = spec.parameters, spec.trained_length
    factor = given.get("factor") or spec.max_position_embeddings / trained

    def dimension_with(num_rotations: float) -> float:
        return spec.rotary_dim * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension_with(given.get("beta_fast") or 32), dimension_with(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    ramp = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    blended = frequencies / factor * ramp + frequencies * (1 - ramp)

    temperature = given.get("attention_factor")
    if temperature is None:
        mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
        temperature = warmth(factor, mscale) / warmth(factor, mscale_all) if mscale and mscale_all else warmth(factor)
    return blended, float(temperature)


def warmth(scale: float, mscale: float = 1.0) -> float:
    """By how much YaRN raises queries and keys of a text that is `scale` times as long as those trained with."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def longrope_frequencies(spec: RopeSpec, context_length: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., 2024): a divisor for every frequency, one for texts of the trained length and one for longer ones.

    Transformers changes from the first to the second when a text outgrows the trained length, so that cached keys and new queries
    disagree; here the served context length decides.
    """
    given, trained = spec.parameters, spec.trained_length
    frequencies, _ = default_frequencies(spec, context_length)
    name = "long_factor" if spec.takes_long_factors(context_length) else "short_factor"
    divisors = torch.tensor(given[name], dtype=torch.float32)
    if len(divisors) != len(frequencies):
        raise ValueError(f"config.json has {len(divisors)} numbers as {name}, but each of {len(frequencies)} frequencies needs one")
    factor = given.get("factor") or spec.max_position_embeddings / trained
    temperature = given.get("attention_factor")
    if temperature is None:
        temperature = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return frequencies / divisors, float(temperature)


INVERSE_FREQUENCIES = {
    "default": default_frequencies,
    "proportional": proportional_frequencies,
    "linear": linear_frequencies,
    "dynamic": dynamic_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
    "longrope": longrope_frequencies,
    "mrope": default_frequencies,  # of places in pictures and films; in a text all of a token's are its position
}
# What a kind cannot do without.
NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}


class Rope:
    """Angles for any position: nothing is tabulated, so nothing ends at a table's length.

    The numbers of a head that are turned stand first in each of its halves, pair by pair; those that are not have no frequency.
    """

    def __init__(self, spec: RopeSpec, context_length: int, dtype: torch.dtype, device: str) -> None:
        frequencies, scale = INVERSE_FREQUENCIES[spec.kind](spec, context_length)
        num_still = (spec.head_dim - spec.rotary_dim) // 2
        frequencies = torch.cat((frequencies, torch.zeros(num_still)))
        scales = torch.cat((torch.full((spec.rotary_dim // 2,), scale), torch.ones(num_still)))
        # Negating the first half negates its sines and leaves the cosines as they are.
        self._frequencies = torch.cat((-frequencies, frequencies)).to(device)
        self._scales = scales.repeat(2).to(device)
        self._dtype = dtype
        self._growth, self._trained_length = spec.query_growth, spec.trained_length
        self._scales_queries = bool(self._growth) and context_length > spec.trained_length

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin [T, 1, head_dim] for `kernels.rotary.rotate`."""
        if kernel := triton_kernel("cos_sin", positions) or compiled_kernel("cos_sin", positions, self._dtype):
            return kernel(positions, self._frequencies, self._scales, self._dtype)
        angles = positions[:, None, None] * self._frequencies
        return (angles.cos() * self._scales).to(self._dtype), (angles.sin() * self._scales).to(self._dtype)

    def query_scales(self, positions: Tensor) -> Tensor | None:
        """[T, 1, 1] what queries are multiplied by, so that attention stays as sharp over more tokens than were trained with
        (Nakanishi, 2025, as Ministral 3 does it: in steps of the trained length); None where none are that far."""
        if not self._scales_queries:
            return None
        steps = positions // self._trained_length
        return (1 + self._growth * (1 + steps).log())[:, None, None].to(self._dtype)
