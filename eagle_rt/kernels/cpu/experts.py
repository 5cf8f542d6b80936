"""Experts of a feed-forward part on a CPU in one compiled function; needs numba. The twin is `kernels.experts`.

Rows that share an expert are multiplied with it together, so that its weights are read once.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from eagle_rt.kernels.cpu.gated import gate_rows, in_float32
from eagle_rt.kernels.cpu.multiply import Weights, multiply, weights_at
from eagle_rt.kernels.cpu.top_children import find_best, sum_of_powers
from eagle_rt.kernels.cpu.vectors import LOG2_E, ONE, ZERO, exp2, number_of, stored_as
from eagle_rt.kernels.experts import Mixing
from eagle_rt.kernels.gate import Gate


class ExpertWeights(NamedTuple):
    """router: to one output an expert, and more that mean nothing. gate_and_up, down: every array with one more axis, the first,
    for experts. top_k, normalizes, gate: see `kernels.experts.Mixing`."""

    router: Weights
    gate_and_up: Weights
    down: Weights
    top_k: int
    normalizes: bool
    gate: Gate


def expert_weights(router: Weights, gate_and_up: Weights, down: Weights, mixing: Mixing) -> ExpertWeights:
    return ExpertWeights(router, gate_and_up, down, mixing.top_k, mixing.normalizes, in_float32(mixing.gate))


@njit(cache=True)
def mix_rows(x: np.ndarray, weights: ExpertWeights, outputs: np.ndarray) -> None:
    """Fills outputs [R, H] with what the experts of every row of x [R, H] add to it. Both are an `array_of`."""
    num_rows, num_experts, top_k = len(x), len(weights.down.bias), weights.top_k
    logits = np.empty((num_rows, len(weights.router.bias)), dtype=x.dtype)
    multiply(x, weights.router, logits)
    experts, shares = np.empty((num_rows, top_k), dtype=np.int64), np.empty((num_rows, top_k), dtype=np.float32)
    route_rows(logits, num_experts, weights.normalizes, experts, shares)
    ends, places = grouped(experts, num_experts)
    inputs = np.empty((num_rows * top_k, x.shape[1]), dtype=x.dtype)
    copy_rows(x, places, inputs)
    halves = np.empty((len(inputs), weights.gate_and_up.bias.shape[1]), dtype=x.dtype)
    for expert in range(num_experts):
        first, last = ends[expert], ends[expert + 1]
        if first < last:
            multiply(inputs[first:last], weights_at(weights.gate_and_up, expert), halves[first:last])
    gated = np.empty((len(inputs), halves.shape[1] // 2), dtype=x.dtype)
    gate_rows(halves, weights.gate, gated)
    for expert in range(num_experts):
        first, last = ends[expert], ends[expert + 1]
        if first < last:
            multiply(gated[first:last], weights_at(weights.down, expert), inputs[first:last])
    add_shares(inputs, places, shares, outputs)


@njit(cache=True, parallel=True)
def route_rows(logits: np.ndarray, num_experts: int, normalizes: bool, experts: np.ndarray, shares: np.ndarray) -> None:
    """Fills experts and shares [R, K]: `kernels.experts.route`."""
    for r in prange(len(logits)):
        row = logits[r, :num_experts]
        find_best(row, shares[r], experts[r])
        highest = shares[r, 0]
        total = ZERO
        for k in range(len(shares[r])):
            shares[r, k] = exp2((shares[r, k] - highest) * LOG2_E)
            total += shares[r, k]
        all_powers = sum_of_powers(row, highest, LOG2_E)
        if not normalizes or all_powers != all_powers:  # no row that has no numbers may get some
            total = all_powers
        for k in range(len(shares[r])):
            shares[r, k] *= ONE / total


@njit(cache=True)
def grouped(experts: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Of experts [R, K]: ([experts + 1] where the rows of each end and those of the next begin, [R, K] the place of each among all,
    in the order of experts and then of rows)."""
    ends, places = np.zeros(num_experts + 1, dtype=np.int64), np.empty_like(experts)
    for expert in experts.flat:
        ends[expert + 1] += 1
    for expert in range(num_experts):
        ends[expert + 1] += ends[expert]
    taken = ends[:-1].copy()
    for r in range(experts.shape[0]):
        for k in range(experts.shape[1]):
            places[r, k] = taken[experts[r, k]]
            taken[experts[r, k]] += 1
    return ends, places


@njit(cache=True, parallel=True)
def copy_rows(x: np.ndarray, places: np.ndarray, copies: np.ndarray) -> None:
    """Copies every row of x [R, H] to its places [R, K] among copies [R * K, H]."""
    for r in prange(len(x)):
        for place in places[r]:
            for h in range(x.shape[1]):
                copies[place, h] = x[r, h]


@njit(cache=True, parallel=True)
def add_shares(added: np.ndarray, places: np.ndarray, shares: np.ndarray, outputs: np.ndarray) -> None:
    """Fills outputs [R, H] with the sums of added [R * K, H] at the places [R, K] of each row, by their shares [R, K]."""
    for r in prange(len(outputs)):
        totals = np.zeros(outputs.shape[1], dtype=np.float32)
        for k in range(places.shape[1]):
            place, share = places[r, k], shares[r, k]
            for h in range(len(totals)):
                totals[h] += share * number_of(added[place, h])
        for h in range(len(totals)):
            outputs[r, h] = stored_as(totals[h], outputs)
