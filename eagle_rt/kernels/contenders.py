"""Draws and perturbed logits on a CPU, where noise is made only for tokens that can come near the best.

Noise for all tokens, and sorting them all to filter some, costs more than a small model's pass: 25 ms a row of 150,000. The twin is
`filter_tokens(scaled) + gumbel_noise(...)`, see `speculate/sampler.py`.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.kernels.compiled import is_compiled
from eagle_rt.kernels.noise import gumbel_of, noise_keys

READ_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class RowSettings:
    """How R rows of logits are looked at, each [R]: positive temperatures, filters as in `speculate.sampler.filter_tokens`, and the
    keys of their noise, seeds and positions."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


def can_leave_out(logits: Tensor) -> bool:
    return is_compiled and logits.device.type == "cpu" and not torch.compiler.is_compiling()


def drawn_tokens(logits: Tensor, settings: RowSettings) -> Tensor:
    """[R] the token of each row of logits [R, V], of those that the filters keep, with the largest logit / temperature + noise."""
    starts, places, values = near_best(logits, settings, all_ids(logits.shape[1]), torch.zeros(len(logits)))
    return torch.tensor([places[start + values[start:stop].argmax()] for start, stop in pairwise(starts)], dtype=torch.int64)


def compile_now() -> None:
    """Rather than with the first token that is drawn."""
    if is_compiled:
        one, none = torch.ones(1), torch.zeros(1, dtype=torch.int64)
        for dtype in READ_DTYPES:
            drawn_tokens(torch.zeros(1, 2, dtype=dtype), RowSettings(one, none, one, 0 * one, none, none))


def perturbed_contenders(logits: Tensor, settings: RowSettings, tokens: Tensor, margins: Tensor) -> Tensor:
    """[R, V] float32 of logits [R, V] over the temperature plus the noise of token ids [V]; -inf where the filters keep no token,
    and at most tokens that are more than their row's margin [R] below its best, and only at such."""
    starts, places, values = near_best(logits, settings, tokens.numpy().astype(np.uint32), margins)
    perturbed = torch.full(logits.shape, -torch.inf)
    perturbed.numpy()[np.repeat(np.arange(len(logits)), np.diff(starts)), places] = values
    return perturbed


@lru_cache(maxsize=2)
def all_ids(vocab_size: int) -> NDArray[np.uint32]:
    return np.arange(vocab_size, dtype=np.uint32)


def near_best(
    logits: Tensor, settings: RowSettings, ids: NDArray[np.uint32], margins: Tensor
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """(starts [R + 1], places [K], perturbed logits [K]): row by row the tokens, of these ids [V], that may come within its margin
    [R] of the best."""
    from eagle_rt.kernels.cpu.contenders import find_contenders  # not everywhere is numba installed
    from eagle_rt.kernels.cpu.threads import use_torch_threads
    from eagle_rt.kernels.cpu.vectors import array_of

    use_torch_threads()
    logits = (logits if logits.dtype in READ_DTYPES else logits.float()).contiguous()
    low_keys, high_keys = (keys.numpy().astype(np.uint32) for keys in noise_keys(settings.seeds, settings.positions))
    temperature, top_p, min_p = (own.float().numpy() for own in (settings.temperature, settings.top_p, settings.min_p))
    # Memory that is not written to takes no time.
    places, bits = np.empty(logits.shape, dtype=np.int32), np.empty(logits.shape, dtype=np.uint32)
    counts = np.empty(len(logits), dtype=np.int64)
    filters = settings.top_k.numpy(), top_p, min_p
    find_contenders(
        array_of(logits), temperature, filters, ids, (low_keys, high_keys), margins.float().numpy(), places, bits, counts
    )
    places, bits = (np.concatenate([own[:count] for own, count in zip(rows, counts, strict=True)]) for rows in (places, bits))
    rows = np.repeat(np.arange(len(logits)), counts)
    own = logits[torch.from_numpy(rows), torch.from_numpy(places).long()].float() / settings.temperature[torch.from_numpy(rows)]
    return np.concatenate(([0], counts.cumsum())), places, (own + gumbel_of(torch.from_numpy(bits.astype(np.int64)))).numpy()
