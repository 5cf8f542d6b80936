"""The best draft tokens of a row on a CPU in one compiled function; needs numba. The twin is `tree.expand.top_children`."""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from eagle_rt.kernels.cpu.order import BLOCK, largest_order, order_of
from eagle_rt.kernels.cpu.threads import use_torch_threads
from eagle_rt.kernels.cpu.vectors import LOG2_E, array_of, number_of
from eagle_rt.kernels.cpu.wide_vectors import sum_of_powers

LOWEST, LEAST_NUMBER = np.float32(-np.inf), np.finfo(np.float32).min


def top_children(logits: Tensor, top_k: int, sharpness: float) -> tuple[Tensor, Tensor]:
    """The top_k tokens of draft logits [R, W], and their log-probabilities after multiplying with `sharpness`, float32.

    Of equal ones the first come first. A row with a NaN has log-probabilities -inf throughout, and other rows have numbers.
    """
    use_torch_threads()
    scores = torch.empty(len(logits), top_k, dtype=torch.float32)
    tokens = torch.empty(len(logits), top_k, dtype=torch.int64)
    find_in_rows(array_of(logits), np.float32(sharpness), scores.numpy(), tokens.numpy())
    return scores, tokens


@njit(cache=True, parallel=True)
def find_in_rows(logits: np.ndarray, sharpness: np.float32, scores: np.ndarray, tokens: np.ndarray) -> None:
    for r in prange(len(logits)):
        find_best(logits[r], scores[r], tokens[r])
        highest = scores[r, 0]
        total = sum_of_powers(logits[r], highest, sharpness * LOG2_E)
        has_numbers = total == total
        for k in range(len(scores[r])):
            score = (scores[r, k] - highest) * sharpness - np.log(total)
            scores[r, k] = max(score, LEAST_NUMBER) if has_numbers else LOWEST


@njit(cache=True)
def find_best(row: np.ndarray, best: np.ndarray, tokens: np.ndarray) -> None:
    """Fills best, tokens [K] with the largest of a row and where they are, the best first; what is no number is the least."""
    top_k = len(best)
    for first in range(0, len(row), BLOCK):
        last = min(first + BLOCK, len(row))
        if first < top_k or largest_order(row[first:last]) > order_of(best[top_k - 1]):
            find_among(row, first, last, best, tokens)


@njit(cache=True)
def find_among(row: np.ndarray, first: int, last: int, best: np.ndarray, tokens: np.ndarray) -> None:
    """`find_best` after the numbers before these places."""
    top_k = len(best)
    for token in range(first, last):
        value = number_of(row[token])
        if not (token < top_k or value > best[top_k - 1]):
            continue
        if value != value:
            value = LOWEST
        place = min(token, top_k - 1)
        while place > 0 and best[place - 1] < value:
            best[place], tokens[place] = best[place - 1], tokens[place - 1]
            place -= 1
        best[place], tokens[place] = value, token
