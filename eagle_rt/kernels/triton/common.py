"""What several kernels need: keys that order floats, and how work is cut."""

import os

import triton
import triton.language as tl

# The interpreter computes in numpy, which has no bfloat16.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED = tl.constexpr(IS_INTERPRETED)
# Below the key of every float, -inf included: an entry that is taken, or not there.
NO_KEY = tl.constexpr(-(2**31))
MINUS_INF_KEY = tl.constexpr(-2139095041)


@triton.jit
def float_key(x):
    """An int32 that orders like the float32 x; NaN is the least of all floats, beside -inf."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # -0.0 and 0.0 are equal.
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x != x, MINUS_INF_KEY, key)


@triton.jit
def key_float(key):
    """The float32 that has this key."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """The float32 x in another precision, rounded to nearest: the interpreter alone would cut bfloat16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def take_best(keys, ids):
    """The highest key, and the lowest id that has it."""
    highest = tl.max(keys, 0)
    return highest, tl.min(tl.where(keys == highest, ids, 2147483647), 0)


def padded(count: int, least: int = 1) -> int:
    """The next power of two, which Triton's blocks must have."""
    return max(least, triton.next_power_of_2(count))
