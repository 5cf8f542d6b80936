"""Which tokens can win a draw, found by compiled functions; needs numba.

A token's noise is no larger than its random bits allow, so that most tokens need not be looked at closely: of a block of them only
those whose bits are few enough to bring the block's largest logit near the best. And most filters keep few tokens, all of which are
in blocks whose largest logit is large.
"""

import numpy as np
from numba import njit, prange

from eagle_rt.kernels.cpu.order import largest_order, number_in_order, order_of
from eagle_rt.kernels.cpu.vectors import LOG2_E, ZERO, number_of
from eagle_rt.kernels.cpu.wide_vectors import sum_of_powers
from eagle_rt.kernels.noise import FIRST_FACTOR, SECOND_FACTOR

# Tokens whose largest logit is known, and whose random bits are made together.
BLOCK = 256
# How much rounding may add to noise, by itself and as a share of what it is added to; and more than the most that noise can be.
SLACK, RELATIVE_SLACK, MOST_NOISE = 1e-3, 1e-6, 24.0
# By what share sums of many powers may be off.
SUM_SLACK = 1e-5
# So far below the largest, in units of the temperature, are tokens of which top-p is asked first, and then so many times as far.
FIRST_REACH, FARTHER = np.float32(4.0), np.float32(1.25)
NOTHING = np.float32(-np.inf)


@njit(cache=True, parallel=True)
def find_contenders(
    logits: np.ndarray,
    temperatures: np.ndarray,
    filters: tuple[np.ndarray, np.ndarray, np.ndarray],
    ids: np.ndarray,
    keys: tuple[np.ndarray, np.ndarray],
    margins: np.ndarray,
    places: np.ndarray,
    bits: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Fills counts [R], and of places and bits [R, V] the first ones of each row, ascending: the tokens of logits [R, V] that the
    filters keep and that may come within its margin of the best under the noise of their ids [V], and their random bits. All of a
    row whose largest logit is no number, or not a finite one.

    filters: top-k, 0 for none, top-p and min-p [R], see `speculate.sampler.filter_tokens`; keys: see `noise.noise_keys`.
    """
    top_ks, top_ps, min_ps = filters
    low_keys, high_keys = keys
    for r in prange(len(logits)):
        own = top_ks[r], top_ps[r], min_ps[r]
        counts[r] = find_in_row(logits[r], temperatures[r], own, ids, low_keys[r], high_keys[r], margins[r], places[r], bits[r])


@njit(cache=True)
def find_in_row(
    row: np.ndarray,
    temperature: np.float32,
    filters: tuple[int, np.float32, np.float32],
    ids: np.ndarray,
    low_key: np.uint32,
    high_key: np.uint32,
    margin: np.float32,
    places: np.ndarray,
    bits: np.ndarray,
) -> int:
    """See `find_contenders`; how many there are."""
    tops = largest_of_blocks(row)
    if not np.isfinite(number_in_order(tops.max())):
        for place in range(len(row)):
            places[place] = place
        noise_bits(ids, low_key, high_key, bits)
        return len(row)
    least = least_kept(row, tops, temperature, *filters)
    return contenders_of(row, tops, temperature, least, ids, low_key, high_key, margin, places, bits)


@njit(cache=True)
def largest_of_blocks(row: np.ndarray) -> np.ndarray:
    """[ceil(V / BLOCK)] `order_of` the largest number in each block."""
    tops = np.empty((len(row) + BLOCK - 1) // BLOCK, dtype=np.int32)
    for block in range(len(tops)):
        tops[block] = largest_order(row[block * BLOCK : (block + 1) * BLOCK])
    return tops


@njit(cache=True)
def contenders_of(
    row: np.ndarray,
    tops: np.ndarray,
    temperature: np.float32,
    least: np.float32,
    ids: np.ndarray,
    low_key: np.uint32,
    high_key: np.uint32,
    margin: np.float32,
    places: np.ndarray,
    bits: np.ndarray,
) -> int:
    """See `find_contenders`; how many there are. least: what a logit over the temperature must be at least."""
    own = np.empty(BLOCK, dtype=np.uint32)
    first = tops.argmax() * BLOCK
    while order_of(number_of(row[first])) != tops.max():
        first += 1
    # What one token has come to, all others have to come near.
    noise_bits(ids[first : first + 1], low_key, high_key, own)
    floor = below(np.float64(number_of(row[first]) / temperature) + noise_of(own[0]), margin)
    num_found = 0
    for block in range(len(tops)):
        top = number_in_order(tops[block]) / temperature
        needed = floor - np.float64(top)
        if top < least or needed > MOST_NOISE:
            continue
        start = block * BLOCK
        size = min(BLOCK, len(row) - start)
        noise_bits(ids[start : start + size], low_key, high_key, own)
        most = most_bits(needed)
        num_near = 0
        for index in range(size):
            num_near += own[index] <= most
        if num_near == 0:
            continue
        for index in range(size):
            if own[index] > most:
                continue
            scaled = number_of(row[start + index]) / temperature
            perturbed = np.float64(scaled) + noise_of(own[index])
            if scaled >= least and perturbed >= floor:
                places[num_found], bits[num_found] = start + index, own[index]
                num_found += 1
                floor = max(floor, below(perturbed, margin))
    return num_found


@njit(cache=True)
def below(perturbed: float, margin: np.float32) -> float:
    """What comes within the margin of that, rounded as it may be, is above this."""
    floor = perturbed - float(margin)
    return floor - SLACK - RELATIVE_SLACK * abs(floor)


@njit(cache=True)
def least_kept(
    row: np.ndarray, tops: np.ndarray, temperature: np.float32, top_k: int, top_p: np.float32, min_p: np.float32
) -> np.float32:
    """The least logit over the temperature that the filters keep."""
    raw = number_in_order(tops.max())
    highest, least = raw / temperature, NOTHING
    if 0 < top_k < len(row):
        kept = largest_scaled(row, tops, temperature, top_k)
        least = kept[-1] if top_p >= 1.0 else least_of_nucleus(kept, total_of(kept, highest), top_p)
    elif top_p < 1.0:
        total = np.float64(sum_of_powers(row, raw, LOG2_E / temperature))
        least = least_in_reach(row, tops, temperature, total, top_p)
    return max(least, highest + np.log(min_p)) if min_p > ZERO else least


@njit(cache=True)
def largest_scaled(row: np.ndarray, tops: np.ndarray, temperature: np.float32, top_k: int) -> np.ndarray:
    """The top_k largest logits over the temperature, and all that tie with the last of them, the largest first."""
    cut = NOTHING
    if top_k <= len(tops):  # the largest of so many blocks are at least so many
        cut = descending(numbers_of(tops))[top_k - 1] / temperature
    values = descending(at_least(row, tops, temperature, cut))
    last = top_k
    while last < len(values) and values[last] == values[top_k - 1]:
        last += 1
    return values[:last]


@njit(cache=True)
def numbers_of(tops: np.ndarray) -> np.ndarray:
    numbers = np.empty(len(tops), dtype=np.float32)
    for block in range(len(tops)):
        numbers[block] = number_in_order(tops[block])
    return numbers


@njit(cache=True)
def descending(values: np.ndarray) -> np.ndarray:
    """Sorted, in a function that takes long to compile and is compiled once."""
    return np.sort(values)[::-1]


@njit(cache=True)
def at_least(row: np.ndarray, tops: np.ndarray, temperature: np.float32, cut: np.float32) -> np.ndarray:
    """All logits over the temperature that are no less than the cut."""
    values, num_found = np.empty(len(row), dtype=np.float32), 0
    for block in range(len(tops)):
        if number_in_order(tops[block]) / temperature >= cut:
            for place in range(block * BLOCK, min(len(row), (block + 1) * BLOCK)):
                scaled = number_of(row[place]) / temperature
                if scaled >= cut:
                    values[num_found] = scaled
                    num_found += 1
    return values[:num_found]


@njit(cache=True)
def total_of(values: np.ndarray, highest: np.float32) -> float:
    total = 0.0
    for value in values:
        total += np.exp(np.float64(value) - highest)
    return total


@njit(cache=True)
def least_in_reach(row: np.ndarray, tops: np.ndarray, temperature: np.float32, total: float, top_p: np.float32) -> np.float32:
    """The same of all logits, of which those hold enough, mostly, that are not far below the largest. total: of the powers of
    all."""
    highest, reach = number_in_order(tops.max()) / temperature, FIRST_REACH
    enough = top_p * total * (1.0 + SUM_SLACK)
    while True:
        values = at_least(row, tops, temperature, highest - reach)
        if len(values) == len(row) or sum_of_powers(values, highest, LOG2_E) > enough:
            return least_of_nucleus(descending(values), total, top_p)
        reach *= FARTHER


@njit(cache=True)
def least_of_nucleus(values: np.ndarray, total: float, top_p: np.float32) -> np.float32:
    """Of values, the largest first, the last one above which is less than top_p of a total of powers (Holtzman et al., 2020)."""
    above, least = 0.0, values[0]
    for value in values:
        if above >= top_p * total:
            break
        least = value
        above += np.exp(np.float64(value) - values[0])
    return least


@njit(cache=True)
def noise_bits(ids: np.ndarray, low_key: np.uint32, high_key: np.uint32, bits: np.ndarray) -> None:
    """Fills bits with the 32 random ones of each token id, as in `gumbel_noise`."""
    for index in range(len(ids)):
        bits[index] = mixed(np.uint32(mixed(np.uint32(ids[index] ^ low_key)) ^ high_key))


@njit(cache=True)
def mixed(x: np.uint32) -> np.uint32:
    """`noise.mix` of a 32-bit word, which overflows as it should."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(FIRST_FACTOR))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(SECOND_FACTOR))
    return np.uint32(x ^ (x >> np.uint32(16)))


@njit(cache=True)
def noise_of(bits: np.uint32) -> float:
    """`noise.gumbel_of`, but for rounding."""
    return -np.log(-np.log1p(-min((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)))


@njit(cache=True)
def most_bits(noise: float) -> np.uint32:
    """The most random bits whose noise may be so much."""
    share = -np.expm1(-np.exp(-max(noise, -MOST_NOISE)))
    return np.uint32(min(2.0**32 - 1, share * 2.0**32 * (1 + RELATIVE_SLACK) + 1))
