"""Experts of a feed-forward part on a CPU in one compiled function; needs numba. The twin is `kernels.experts`.

Rows that share an expert are multiplied with it together, so that its weights are read once.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from eagle_rt.kernels.cpu.gated import gate_rows, in_float32
from eagle_rt.kernels.cpu.multiply import Weights, multiply, weights_at
from eagle_rt.kernels.cpu.top_children import LOWEST, find_best
from eagle_rt.kernels.cpu.vectors import LOG2_E, ONE, ZERO, exp2, number_of, sigmoid, stored_as
from eagle_rt.kernels.cpu.wide_vectors import sum_of_powers
from eagle_rt.kernels.experts import LEAST_TOTAL, Mixing
from eagle_rt.kernels.gate import Gate

LEAST = np.float32(LEAST_TOTAL)


class ExpertWeights(NamedTuple):
    """router: to one output an expert that is chosen, a gate where `gates_shared`, and more that mean nothing. gate_and_up, down:
    every array with one more axis, the first, for experts. choice_bias, share_scales: [experts] or [0]. The others: see
    `kernels.experts.Mixing`."""

    router: Weights
    gate_and_up: Weights
    down: Weights
    choice_bias: NDArray[np.float32]
    share_scales: NDArray[np.float32]
    top_k: int
    normalizes: bool
    gate: Gate
    by_sigmoid: bool
    scale: np.float32
    num_shared: int
    gates_shared: bool
    num_groups: int
    top_groups: int
    weighs_inputs: bool


def expert_weights(
    router: Weights,
    gate_and_up: Weights,
    down: Weights,
    choice_bias: NDArray[np.float32],
    share_scales: NDArray[np.float32],
    mixing: Mixing,
) -> ExpertWeights:
    own = mixing._replace(gate=in_float32(mixing.gate), scale=np.float32(mixing.scale))  # pyright: ignore[reportArgumentType]
    return ExpertWeights(router, gate_and_up, down, choice_bias, share_scales, *own)  # pyright: ignore[reportArgumentType]


@njit(cache=True)
def mix_rows(x: np.ndarray, router_x: np.ndarray, weights: ExpertWeights, outputs: np.ndarray) -> None:
    """Fills outputs [R, H] with what the experts of every row of x [R, H] add to it, which a router chose by router_x [R, H]. Each
    is an `array_of`."""
    num_rows, num_experts, num_taken = len(x), len(weights.down.bias), weights.top_k + weights.num_shared
    logits = np.empty((num_rows, len(weights.router.bias)), dtype=np.float32)
    multiply(router_x, weights.router, logits)
    experts, shares = np.empty((num_rows, num_taken), dtype=np.int64), np.empty((num_rows, num_taken), dtype=np.float32)
    num_routed = num_experts - weights.num_shared
    route_rows(
        logits[:, :num_routed],
        weights.choice_bias,
        weights.by_sigmoid,
        weights.normalizes,
        weights.scale,
        weights.num_groups,
        weights.top_groups,
        experts[:, : weights.top_k],
        shares[:, : weights.top_k],
    )
    for r in range(num_rows):
        for k in range(weights.top_k if len(weights.share_scales) else 0):
            shares[r, k] *= weights.share_scales[experts[r, k]]
        for k in range(weights.top_k, num_taken):
            experts[r, k] = num_routed + k - weights.top_k
            shares[r, k] = sigmoid(logits[r, num_routed]) if weights.gates_shared else ONE
    ends, places = grouped(experts, num_experts)
    inputs = np.empty((num_rows * num_taken, x.shape[1]), dtype=x.dtype)
    copy_rows(x, places, inputs)
    if weights.weighs_inputs:
        weigh_rows(shares, places, inputs)
        shares[:] = ONE
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
def route_rows(
    logits: np.ndarray,
    choice_bias: np.ndarray,
    by_sigmoid: bool,
    normalizes: bool,
    scale: np.float32,
    num_groups: int,
    top_groups: int,
    experts: np.ndarray,
    shares: np.ndarray,
) -> None:
    """Fills experts and shares [R, top_k] of those that are chosen by logits [R, experts]: `kernels.experts.route`."""
    for r in prange(len(logits)):
        row, chosen, counts = logits[r], experts[r], shares[r]
        if by_sigmoid:
            whole = by_sigmoids(row, choice_bias, num_groups, top_groups, counts, chosen)
        else:
            whole = by_parts(row, num_groups, top_groups, counts, chosen)
        total = LEAST
        for k in range(len(counts)):
            total += counts[k]
        if not normalizes or whole != whole:  # no row that has no numbers may get some
            total = whole
        for k in range(len(counts)):
            counts[k] *= scale / total


@njit(cache=True)
def by_parts(row: np.ndarray, num_groups: int, top_groups: int, counts: np.ndarray, experts: np.ndarray) -> np.float32:
    """Fills how likely the likeliest experts of a row are, and which these are; what all are together."""
    find_best(of_best_groups(row, num_groups, top_groups, 1), counts, experts)
    highest = counts[0]
    for k in range(len(counts)):
        counts[k] = exp2((counts[k] - highest) * LOG2_E)
    return sum_of_powers(row, highest, LOG2_E)


@njit(cache=True)
def by_sigmoids(
    row: np.ndarray, bias: np.ndarray, num_groups: int, top_groups: int, counts: np.ndarray, experts: np.ndarray
) -> np.float32:
    """The same, each by itself; what a sigmoid is at most, or no number where one has none."""
    wanted = np.empty(len(row), dtype=np.float32)
    total = ZERO
    for place in range(len(row)):
        wanted[place] = sigmoid(row[place])
        total += wanted[place]
        if len(bias) > 0:
            wanted[place] += bias[place]
    find_best(of_best_groups(wanted, num_groups, top_groups, 2), counts, experts)
    for k in range(len(counts)):
        counts[k] = sigmoid(row[experts[k]])  # pyright: ignore[reportArgumentType]
    return ONE if total == total else total


@njit(cache=True)
def of_best_groups(wanted: np.ndarray, num_groups: int, top_groups: int, num_counted: int) -> np.ndarray:
    """How much a row's experts are wanted, and of other groups' not at all: `kernels.experts.of_best_groups`. num_counted: of how
    many experts groups are judged by."""
    if num_groups == 1:
        return wanted
    size, own = len(wanted) // num_groups, np.full(len(wanted), LOWEST)
    of_groups, best = np.empty(num_groups, dtype=np.float32), np.empty(top_groups, dtype=np.int64)
    counted, places = np.empty(num_counted, dtype=np.float32), np.empty(num_counted, dtype=np.int64)
    for group in range(num_groups):
        find_best(wanted[group * size : (group + 1) * size], counted, places)
        of_groups[group] = counted.sum()
    find_best(of_groups, np.empty(top_groups, dtype=np.float32), best)
    for group in best:
        own[group * size : (group + 1) * size] = wanted[group * size : (group + 1) * size]
    return own


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
def weigh_rows(shares: np.ndarray, places: np.ndarray, copies: np.ndarray) -> None:
    """Multiplies copies [R * K, H] at the places [R, K] of each row with its shares [R, K]."""
    for r in prange(len(places)):
        for k in range(places.shape[1]):
            place, share = places[r, k], shares[r, k]
            for h in range(copies.shape[1]):
                copies[place, h] = stored_as(share * number_of(copies[place, h]), copies)


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
