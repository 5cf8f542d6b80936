"""Perturbed logits on a CPU, where noise is made only for tokens that can come near the best.

A large vocabulary costs more noise than the model's pass: for 150,000 tokens, 4 ms a row where nothing is left out. The twin is
`scaled + gumbel_noise(...)`.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.kernels.noise import FIRST_FACTOR, SECOND_FACTOR, gumbel_of, noise_keys

# Fewer tokens are quicker done all at once.
LEAST_VOCABULARY = 16384
# No token's noise is larger or smaller than these; and how much rounding may add to it.
LARGEST_NOISE, SMALLEST_NOISE, SLACK = 22.9, -2.9, 1e-3

Words = NDArray[np.uint32]
Floats = NDArray[np.float32]


def can_leave_out(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.shape[-1] >= LEAST_VOCABULARY and not torch.compiler.is_compiling()


def drawn_tokens(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[R] the token of each row of logits [R, V] with the largest logit / temperature + noise; settings are [R]."""
    ids, drawn = np.arange(logits.shape[-1], dtype=np.uint32), []
    keys = zip(*(keys.tolist() for keys in noise_keys(seeds, positions)), strict=True)
    # Those that even the largest noise would not lift to where the best is with the smallest are not looked at.
    floors = logits.amax(dim=-1).float() - temperature * (LARGEST_NOISE - SMALLEST_NOISE)
    looked_at = logits >= below(floors, logits.dtype)[:, None]
    for row, is_near, temperature_of_row, (low, high) in zip(logits, looked_at.numpy(), temperature, keys, strict=True):
        places = torch.from_numpy(np.flatnonzero(is_near))
        if len(places) == 0:  # there are no numbers
            drawn.append(row.argmax())
            continue
        scaled = row[places].float() / temperature_of_row
        near, bits = contenders(scaled.numpy(), ids[places.numpy()], low, high, 0.0)
        drawn.append(places[near][(scaled[near] + noise_of(bits)).argmax()])
    return torch.stack(drawn)


def below(floors: Tensor, dtype: torch.dtype) -> Tensor:
    """The floors [R] in float32, in another precision, and no larger."""
    rounded = floors.to(dtype)
    return torch.where(rounded > floors, torch.nextafter(rounded, torch.full_like(rounded, -torch.inf)), rounded)


def perturbed_contenders(scaled: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor, margin: float) -> Tensor:
    """[R, V] float32 logits [R, V] plus the noise of token ids [V], for keys [R]; -inf at most tokens that are more than `margin`
    below the row's best, and only at such."""
    low_keys, high_keys = (keys.tolist() for keys in noise_keys(seeds, positions))
    logits, ids = scaled.numpy(), tokens.numpy().astype(np.uint32)
    perturbed = torch.full_like(scaled, -torch.inf)
    for row, (low, high) in enumerate(zip(low_keys, high_keys, strict=True)):
        places, bits = contenders(logits[row], ids, low, high, margin)
        perturbed[row, places] = scaled[row, places] + noise_of(bits)
    return perturbed


def contenders(logits: Floats, ids: Words, low_key: int, high_key: int, margin: float) -> tuple[Tensor, Words]:
    """The places [K] of the tokens of one row that may come within `margin` of the best, ascending, and their random bits [K]."""
    # What one token has come to, all others have to come near.
    best = int(logits.argmax())
    floor = float(logits[best]) + noise_of(noise_bits(ids[[best]], low_key, high_key)).item() - margin
    if not math.isfinite(floor):
        return torch.arange(len(ids)), noise_bits(ids, low_key, high_key)
    places = np.flatnonzero(logits >= floor - LARGEST_NOISE)
    if 2 * len(places) > len(ids):
        places = np.arange(len(ids))
    else:
        logits, ids = logits[places], ids[places]
    bits = noise_bits(ids, low_key, high_key)
    luckiest = int(bits.argmin())
    floor = max(floor, float(logits[luckiest]) + noise_of(bits[[luckiest]]).item() - margin)
    # Noise of x takes an exponential of at most e^-x, and so a uniform number of less than that.
    with np.errstate(over="ignore"):
        largest_bits = np.exp(logits + np.float32(SLACK - floor)) * np.float32(2.0**32)
    is_near = bits <= largest_bits
    return torch.from_numpy(places[is_near]), bits[is_near]


def noise_of(bits: Words) -> Tensor:
    return gumbel_of(torch.from_numpy(bits.astype(np.int64)))


def noise_bits(ids: Words, low_key: int, high_key: int) -> Words:
    """The 32 random bits of each token id, as in `gumbel_noise`."""
    bits, shifted = ids ^ np.uint32(low_key), np.empty_like(ids)
    mix_in_place(bits, shifted)
    bits ^= np.uint32(high_key)
    mix_in_place(bits, shifted)
    return bits


def mix_in_place(x: Words, shifted: Words) -> None:
    """`noise.mix` of 32-bit words, which overflow as they should."""
    for shift, factor in ((16, FIRST_FACTOR), (15, SECOND_FACTOR), (16, None)):
        np.right_shift(x, shift, out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        if factor is not None:
            np.multiply(x, np.uint32(factor), out=x)
