"""What a step has gained, written behind the texts that it was gained of; the twin is `TextTable.note` in torch."""

import triton
import triton.language as tl
from torch import Tensor

from eagle_rt.kernels.triton.common import padded


@triton.jit
def _note_tokens(texts, states, places, roots, tokens, stride_text, NUM_TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    text = texts + tl.load(states + sequence) * stride_text + tl.load(places + sequence)
    gained = tl.load(tokens + sequence * NUM_TOKENS + numbers - 1, mask=(numbers > 0) & (numbers <= NUM_TOKENS), other=0)
    own = tl.where(numbers == 0, tl.load(roots + sequence), gained)
    tl.store(text + numbers, own.to(tl.int32), mask=numbers <= NUM_TOKENS)


def note_tokens(texts: Tensor, states: Tensor, places: Tensor, roots: Tensor, tokens: Tensor) -> None:
    """Put the roots [B] at their places [B] in the texts [S, T] int32 in rows `states` [B], and tokens [B, D + 1] behind them."""
    batch_size, num_tokens = tokens.shape
    _note_tokens[(batch_size,)](
        texts, states, places, roots.contiguous(), tokens.contiguous(), texts.stride(0),
        NUM_TOKENS=num_tokens, BLOCK=padded(num_tokens + 1), num_warps=1,
    )  # fmt: skip
