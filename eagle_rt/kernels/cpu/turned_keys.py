"""Keys of a block turned, so that a vector holds one number of many keys, and what queries score of them; needs numba.

Nothing is then summed up within a vector, which would take as long as all products of a short key. Turning takes as long as the
scores of two to four queries, and many share a block: those of all heads and rows that see it.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types

from eagle_rt.kernels.cpu.vectors import FLAGS, I32, LANES, VECTOR_OF, ZERO, add_product, halves_of, operation, pointer
from eagle_rt.kernels.cpu.wide_vectors import WIDE, load_wide, spread_wide, store_wide

# Keys of a block.
BLOCK = 64


@operation
def turn_eight(_: Any, cache: Any, keys: Any, turned: Any, place: Any) -> Any:
    """LANES pairs each of as many keys, which begin at these places, to where LANES times two rows of `turned` begin at a place."""
    pairs = VECTOR_OF[cache.dtype]

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        rows = []
        for key in range(LANES):
            index = builder.extract_value(values[1], key)
            place = pointer(context, builder, cache, values[0], index, pairs.llvm_type)
            rows.append(builder.load(place, align=cache.dtype.bitwidth // 8))
        distance = 1
        while distance < LANES:  # rows and their partners change the numbers that lie on the other's side
            low = [place if not place & distance else LANES + place - distance for place in range(LANES)]
            high = [place + distance if not place & distance else LANES + place for place in range(LANES)]
            for row in range(LANES):
                if not row & distance:
                    both = rows[row], rows[row + distance]
                    rows[row], rows[row + distance] = (
                        builder.shuffle_vector(*both, ir.Constant(ir.VectorType(I32, LANES), places)) for places in (low, high)
                    )
            distance *= 2
        for number, row in enumerate(rows):
            for half, bits in enumerate(halves_of(builder, row, pairs)):
                index = builder.add(values[3], ir.Constant(values[3].type, (2 * number + half) * BLOCK))
                builder.store(bits, pointer(context, builder, turned, values[2], index, bits.type), align=4)
        return context.get_dummy_value()

    return types.void(cache, keys, turned, types.intp), build


@njit(cache=True)
def turn_keys(cache: np.ndarray, keys: np.ndarray, turned: np.ndarray) -> None:
    """Fills the first n columns of turned [2 * P, BLOCK] with the numbers of the keys that begin at places [n] of a cache."""
    last = len(keys) - 1
    for j in range(0, len(keys), LANES):
        a, b, c, d = keys[j], keys[min(j + 1, last)], keys[min(j + 2, last)], keys[min(j + 3, last)]
        e, f, g, h = keys[min(j + 4, last)], keys[min(j + 5, last)], keys[min(j + 6, last)], keys[min(j + 7, last)]
        for i in range(0, turned.shape[0] // 2, LANES):
            turn_eight(cache, (a + i, b + i, c + i, d + i, e + i, f + i, g + i, h + i), turned, 2 * i * BLOCK + j)


@njit(cache=True, fastmath=set(FLAGS))
def score_keys(even: np.ndarray, odd: np.ndarray, turned: np.ndarray, last: int, scores: np.ndarray) -> None:
    """Fills scores [2, BLOCK] of two queries, even, odd [2, P], for the keys in columns up to the last of `turn_keys`, and more
    that mean nothing: so many at a time that a processor need not wait for a sum before it adds to it."""
    for j in range(0, last, 4 * WIDE):
        one_first = one_second = one_third = one_fourth = spread_wide(ZERO)
        other_first = other_second = other_third = other_fourth = spread_wide(ZERO)
        for i in range(even.shape[1]):
            for half in range(2):
                place = (2 * i + half) * BLOCK + j
                one, other = spread_wide(odd[0, i] if half else even[0, i]), spread_wide(odd[1, i] if half else even[1, i])
                keys = load_wide(turned, place)
                one_first, other_first = add_product(one_first, keys, one), add_product(other_first, keys, other)
                keys = load_wide(turned, place + WIDE)
                one_second, other_second = add_product(one_second, keys, one), add_product(other_second, keys, other)
                keys = load_wide(turned, place + 2 * WIDE)
                one_third, other_third = add_product(one_third, keys, one), add_product(other_third, keys, other)
                keys = load_wide(turned, place + 3 * WIDE)
                one_fourth, other_fourth = add_product(one_fourth, keys, one), add_product(other_fourth, keys, other)
        store_wide(scores, j, one_first)
        store_wide(scores, j + WIDE, one_second)
        store_wide(scores, j + 2 * WIDE, one_third)
        store_wide(scores, j + 3 * WIDE, one_fourth)
        store_wide(scores, BLOCK + j, other_first)
        store_wide(scores, BLOCK + j + WIDE, other_second)
        store_wide(scores, BLOCK + j + 2 * WIDE, other_third)
        store_wide(scores, BLOCK + j + 3 * WIDE, other_fourth)
