"""Perturbed logits on a CPU, where noise is made only for tokens that can come near the best.

Noise for all tokens costs more than a small model's pass, and for 150,000 of them 4 ms a row. The twin is
`scaled + gumbel_noise(...)`.
"""

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.kernels.compiled import compiled, is_compiled
from eagle_rt.kernels.noise import FIRST_FACTOR, SECOND_FACTOR, gumbel_of, noise_keys

# How much rounding may add to noise, and the tokens whose random bits are made together.
SLACK, TOGETHER = np.float32(1e-3), 1024
LOG2_E = np.float32(1.4426950408889634)
# Numbers that stay in a processor's cache.
CACHED = 2**18

Words = NDArray[np.uint32]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def can_leave_out(logits: Tensor) -> bool:
    return is_compiled and logits.device.type == "cpu" and not torch.compiler.is_compiling()


def drawn_tokens(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[R] the token of each row of logits [R, V] with the largest logit / temperature + noise; settings are [R]."""
    ids, drawn = np.arange(logits.shape[1], dtype=np.uint32), []
    together = max(1, CACHED // len(ids))
    for first in range(0, len(logits), together):
        own = slice(first, first + together)
        scaled = logits[own].float() / temperature[own, None]
        starts, places, values = near_best(scaled, seeds[own], positions[own], ids, torch.zeros(len(scaled)))
        drawn += [places[start + values[start:stop].argmax()] for start, stop in pairwise(starts)]
    return torch.tensor(drawn)


def compile_now() -> None:
    """Rather than with the first token that is drawn."""
    if is_compiled:
        one = torch.ones(1, dtype=torch.int64)
        drawn_tokens(torch.zeros(1, 2), one, one, one)


def perturbed_contenders(scaled: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor, margins: Tensor) -> Tensor:
    """[R, V] float32 logits [R, V] plus the noise of token ids [V], for keys [R]; -inf at most tokens that are more than their
    row's margin [R] below its best, and only at such."""
    starts, places, values = near_best(scaled, seeds, positions, tokens.numpy().astype(np.uint32), margins)
    perturbed = torch.full_like(scaled, -torch.inf)
    perturbed.numpy()[np.repeat(np.arange(len(scaled)), np.diff(starts)), places] = values
    return perturbed


def near_best(scaled: Tensor, seeds: Tensor, positions: Tensor, ids: Words, margins: Tensor) -> tuple[Ints, Ints, Floats]:
    """(starts [R + 1], places [K], perturbed logits [K]): row by row the tokens that may come within its margin of the best."""
    low_keys, high_keys = (keys.numpy().astype(np.uint32) for keys in noise_keys(seeds, positions))
    logits = scaled.contiguous().numpy()
    starts, places, bits = contenders(logits, ids, low_keys, high_keys, margins.float().numpy())
    own = logits[np.repeat(np.arange(len(logits)), np.diff(starts)), places]
    return starts, places, own + gumbel_of(torch.from_numpy(bits.astype(np.int64))).numpy()


@compiled
def contenders(logits: Floats, ids: Words, low_keys: Words, high_keys: Words, margins: Floats) -> tuple[Ints, Ints, Words]:
    """(starts [R + 1], places [K], random bits [K]): row by row the tokens of logits [R, V] that may come within its margin [R] of
    the best under the noise of their ids [V], and all of a row whose largest logit is no number."""
    num_rows, num_tokens = logits.shape
    starts = np.zeros(num_rows + 1, dtype=np.int64)
    # Memory that is not written to takes no time.
    places, found = np.empty(num_rows * num_tokens, dtype=np.int64), np.empty(num_rows * num_tokens, dtype=np.uint32)
    bits, is_near, num_found = np.empty(TOGETHER, dtype=np.uint32), np.empty(TOGETHER, dtype=np.bool_), 0
    for row in range(num_rows):
        own, low, high, margin = logits[row], low_keys[row], high_keys[row], margins[row]
        best, has_nan = 0, False
        for place in range(num_tokens):
            has_nan |= own[place] != own[place]
            if own[place] > own[best]:
                best = place
        takes_all = has_nan or not np.isfinite(own[best])
        # What one token has come to, all others have to come near.
        noise_bits(ids[best : best + 1], low, high, bits)
        floor = own[best] + noise_of(bits[0]) - margin
        for first in range(0, num_tokens, TOGETHER):
            count = min(TOGETHER, num_tokens - first)
            noise_bits(ids[first : first + count], low, high, bits)
            come_near(own[first : first + count], bits, np.float32(floor - 1e-6 * abs(floor)), is_near)
            for index in range(count):
                if takes_all or is_near[index]:
                    places[num_found], found[num_found] = first + index, bits[index]
                    num_found += 1
                    if not takes_all:
                        floor = max(floor, own[first + index] + noise_of(bits[index]) - margin)
        starts[row + 1] = num_found
    return starts, places[:num_found].copy(), found[:num_found].copy()


@compiled
def noise_bits(ids: Words, low_key: np.uint32, high_key: np.uint32, bits: Words) -> None:
    """Fills bits with the 32 random ones of each token id, as in `gumbel_noise`."""
    for index in range(len(ids)):
        bits[index] = mixed(np.uint32(mixed(np.uint32(ids[index] ^ low_key)) ^ high_key))


@compiled
def mixed(x: np.uint32) -> np.uint32:
    """`noise.mix` of a 32-bit word, which overflows as it should."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(FIRST_FACTOR))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(SECOND_FACTOR))
    return np.uint32(x ^ (x >> np.uint32(16)))


@compiled
def noise_of(bits: np.uint32) -> float:
    """`noise.gumbel_of`, but for rounding."""
    return -np.log(-np.log1p(-min((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)))


@compiled
def come_near(logits: Floats, bits: Words, floor: np.float32, is_near: NDArray[np.bool_]) -> None:
    """Fills is_near: False only where no token of these random bits comes up to the floor.

    Noise of x takes an exponential of at most e^-x, and so a uniform number of less than that, in units of 2^-32 less than 2^y; and
    2^y is at most 1 + y where y is between 0 and 1.
    """
    for index in range(len(logits)):
        power = LOG2_E * (logits[index] - floor + SLACK) + np.float32(32)
        power = min(max(power, np.float32(0)), np.float32(31.5))
        whole = np.int32(power)
        most = (np.float32(1) + power - np.float32(whole)) * np.float32(np.uint32(1) << np.uint32(whole))
        is_near[index] = (np.float32(bits[index]) <= most) | (power > np.float32(31))
