"""Gumbel noise inside a kernel; `kernels/noise.py` is the twin and says what it is."""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel_noise(seed, position, tokens):
    """float32 noise of token ids for one int64 seed and one int64 position."""
    # Blocks of one, not scalars: numpy, which interprets kernels, warns of scalars that wrap around.
    one = tl.zeros([1], tl.int64)
    seed, position = one + seed, one + position
    low_key = mix(seed.to(tl.uint32) ^ mix(position.to(tl.uint32)))
    high_key = mix((seed >> 32).to(tl.uint32) ^ mix((position + 0x9E3779B9).to(tl.uint32)))
    bits = mix(mix(tokens.to(tl.uint32) ^ low_key) ^ high_key)
    uniform = ((bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10).to(tl.float32)
    uniform = tl.minimum(uniform, 0.99999994039535522)
    # In float64, for want of a log1p that the interpreter knows too.
    exponential = -tl.log(1.0 - uniform.to(tl.float64))
    return -tl.log(exponential.to(tl.float32))
