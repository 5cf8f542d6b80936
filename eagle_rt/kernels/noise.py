"""Gumbel noise as a function of (seed, position, token): the same numbers on every device and in every batch."""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64, in which every input bit sways every output bit.

    Source: the finalizer of MurmurHash3 (Appleby, 2011) with the constants of Wellons' "hash prospector" (lowbias32).
    """
    x = x ^ (x >> 16)
    x = (x * FIRST_FACTOR) & WORD
    x = x ^ (x >> 15)
    x = (x * SECOND_FACTOR) & WORD
    return x ^ (x >> 16)


def gumbel_noise(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise [R, V] in float32 for token ids [V]; row r belongs to seeds[r] and positions[r] (all int64).

    The entry of token v depends on nothing but (seed, position, v): two 32-bit keys are mixed from the seed's halves and the
    position, and every token id passes through both.
    """
    low_key, high_key = noise_keys(seeds, positions)
    return gumbel_of(mix(mix(tokens ^ low_key[:, None]) ^ high_key[:, None]))


def noise_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The two 32-bit keys [R] of seeds and positions [R]."""
    low_key = mix((seeds & WORD) ^ mix(positions & WORD))
    return low_key, mix(((seeds >> 32) & WORD) ^ mix((positions + 0x9E3779B9) & WORD))


def gumbel_of(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float32 from 32 random bits each, held in int64; the fewer bits, the larger."""
    # -log(1 - u) is exponential; in this form its small values, which win, keep their full float32 precision.
    uniform = ((bits.double() + 0.5) * 2.0**-32).float().clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))
