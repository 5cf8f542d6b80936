"""Decode steps captured as CUDA graphs: one replay drafts, verifies and keeps, and the host reads its result once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_rt.batch import to_device
from eagle_rt.engine.clocks import DeviceClock
from eagle_rt.engine.prepare import penalties_of
from eagle_rt.engine.request import Request
from eagle_rt.kernels.dispatch import triton_kernel
from eagle_rt.speculate.penalty_tables import PenaltyTables, penalty_tables
from eagle_rt.speculate.sampler import SamplingBatch
from eagle_rt.speculate.sequences import DecodeSequences, scratch_rows
from eagle_rt.speculate.step import StepOutcome, Stepper
from eagle_rt.tree_shape import TreeShape

# Copies beside a head's tree are captured for batches of up to so many: in larger ones their rows are far from free.
MOST_COPYING = 8
# How often every step is timed, and the least that it is believed to take.
NUM_TIMED, LEAST_MS = 3, 1e-3


@dataclass(frozen=True)
class GraphLimits:
    """What a captured step must have room for.

    max_pages: of one request, scratch rows included. padding_page and padding_state: where the rows of a batch that no request
    fills read and write; no request is ever given them.
    """

    page_size: int
    max_pages: int
    num_scratch: int
    padding_page: int
    padding_state: int


class HostInputs:
    """One side of the pinned memory that `StepInputs` fills from: integers [5, B], floats [3, B] and pages [B, P]."""

    def __init__(self, batch_size: int, limits: GraphLimits, *, is_pinned: bool) -> None:
        self.integers = torch.zeros(5, batch_size, dtype=torch.int64, pin_memory=is_pinned)
        self.floats = torch.zeros(3, batch_size, dtype=torch.float32, pin_memory=is_pinned)
        self.pages = torch.full((batch_size, limits.max_pages), limits.padding_page, dtype=torch.int32, pin_memory=is_pinned)
        self._limits = limits
        self._written: list[list[int]] = [[] for _ in range(batch_size)]

    def write(self, requests: tuple[Request, ...]) -> None:
        """Everything but the pages: requests in the first rows, and padding in the others."""
        self.integers.zero_()
        self.integers[2].fill_(self._limits.padding_state)
        self.floats.zero_()
        self.floats[1].fill_(1.0)
        if not requests:
            return
        count, settings = len(requests), [request.sampling for request in requests]
        self.integers[:, :count] = torch.tensor(
            [
                [request.tokens[-1] for request in requests],
                [request.num_cached for request in requests],
                [request.state_row for request in requests],
                [request.seed for request in requests],
                [max(setting.top_k, 0) for setting in settings],
            ]
        )
        self.floats[:, :count] = torch.tensor(
            [[getattr(setting, name) for setting in settings] for name in ("temperature", "top_p", "min_p")]
        )

    def write_pages(self, requests: tuple[Request, ...]) -> None:
        """Only the rows that have changed since this memory was last written."""
        for row, written in enumerate(self._written):
            pages = requests[row].pages if row < len(requests) else []
            if pages != written:
                self.pages[row].fill_(self._limits.padding_page)
                self.pages[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
                self._written[row] = list(pages)


class StepInputs:
    """Everything a step reads, at fixed places on the device, filled through pinned host memory.

    Host memory that a copy may still be reading is left alone: there are two sides, used in turns, and no step is launched before
    the last but one has been read.
    """

    def __init__(self, batch_size: int, limits: GraphLimits, device: str, penalties: PenaltyTables | None) -> None:
        self._limits, self._penalties, self._device = limits, penalties, device
        self._sides = [HostInputs(batch_size, limits, is_pinned=device == "cuda") for _ in range(2)]
        host = self._sides[0]
        self._integers, self._floats, self._pages = host.integers.to(device), host.floats.to(device), host.pages.to(device)
        self.fill(())
        self._padding = self._integers[:, :1].clone()
        self._every = torch.arange(batch_size, device=device)

    def fill(self, requests: tuple[Request, ...]) -> None:
        """Put requests into the first rows, and padding into the others."""
        host = self._sides[0]
        host.write(requests)
        self._integers.copy_(host.integers, non_blocking=True)
        self._floats.copy_(host.floats, non_blocking=True)
        if self._penalties:
            self._penalties.fill(penalties_of(list(requests), self._device) if requests else None)
        self.fill_pages(requests)

    def fill_pages(self, requests: tuple[Request, ...]) -> None:
        """Only tell which pages they have; all else is as the last step left it, but for those that have ended, which become
        padding."""
        host = self._sides[0]
        host.write_pages(requests)
        self._pages.copy_(host.pages, non_blocking=True)
        ended = [row for row, request in enumerate(requests) if request.finish_reason]
        if ended:
            self._integers[:, to_device(ended, self._device)] = self._padding
        self._sides.reverse()

    @property
    def batch_size(self) -> int:
        return self._pages.shape[0]

    def sequences(self) -> DecodeSequences:
        """The sequences that are filled in at the time when the device gets there."""
        root_tokens, num_cached, state_rows, seeds, top_k = self._integers
        temperature, top_p, min_p = self._floats
        limits = self._limits
        cache, scratch_slots = scratch_rows(num_cached, self._pages, limits.page_size, limits.num_scratch)
        settings = temperature, top_k, top_p, min_p, seeds
        sampling = SamplingBatch(*settings, sampled=self._every, has_filters=True, penalties=self._penalties)
        return DecodeSequences(root_tokens, num_cached, cache, scratch_slots, state_rows, sampling)

    def advance(self, outcome: StepOutcome) -> Tensor:
        """Make the sequences those of the next step, without the host, which gets the outcome's rows."""
        acceptance, padding_state = outcome.acceptance, self._limits.padding_state
        root_tokens, num_cached, state_rows = self._integers[:3]
        if self._penalties:
            steps = torch.arange(acceptance.tokens.shape[1], device=root_tokens.device)
            is_said = (steps < acceptance.num_emitted[:, None]) & (state_rows != padding_state)[:, None]
            self._penalties.count(acceptance.tokens, is_said)
        if kernel := triton_kernel("finish_step", root_tokens):
            kept = acceptance.tokens, acceptance.num_accepted, outcome.head_scores
            return kernel(*kept, state_rows, padding_state, root_tokens, num_cached)
        last_tokens = acceptance.tokens.gather(1, acceptance.num_accepted[:, None])[:, 0]
        is_real = state_rows != padding_state
        root_tokens.copy_(torch.where(is_real, last_tokens, root_tokens))
        num_cached.add_(acceptance.num_emitted * is_real)
        return outcome.rows


@dataclass(frozen=True)
class GraphResult:
    """What a captured step has come to. rows: `StepOutcome.rows`, one for each request; ms: what it took on the device."""

    rows: list[list[int]]
    ms: float


class StepGraph:
    """A step with trees of one shape for as many requests as the inputs have room for, which steps with other trees share. On a
    CPU, which has no graphs, it is the same callable run eagerly."""

    def __init__(self, stepper: Stepper, inputs: StepInputs, device: str, memory: Any) -> None:
        self._stepper, self._inputs = stepper, inputs
        self._graph: torch.cuda.CUDAGraph | None = None
        shape = inputs.batch_size, stepper.max_depth + 3  # of `StepOutcome.rows`
        self._hosts = [torch.empty(shape, dtype=torch.int64, pin_memory=device == "cuda") for _ in range(2)]
        if device == "cuda":
            # Twice before, so that no kernel is compiled and no workspace made while the stream is captured.
            for _ in range(2):
                self._step()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=memory):
                self._output = self._step()

    @property
    def memory(self) -> Any:
        """The memory that graphs which never run at the same time can share."""
        return self._graph.pool() if self._graph else None

    def launch(self, requests: tuple[Request, ...], *, follows: bool) -> Callable[[], GraphResult]:
        """Start a step; the returned function waits for it and says what it has come to.

        follows: the last launch with these inputs, whatever its trees, was of the same requests, and this one goes on from where
        that leaves them, which the host need not know yet; some may have ended. At most two steps may be waiting to be read.
        """
        clock = DeviceClock(is_gpu=self._graph is not None)
        (self._inputs.fill_pages if follows else self._inputs.fill)(requests)
        if self._graph:
            self._graph.replay()
            output = self._output
        else:
            output = self._step()
        self._hosts.reverse()
        host = self._hosts[0]
        host.copy_(output, non_blocking=True)
        clock.stop()

        def read() -> GraphResult:
            ms = clock.wait()
            return GraphResult(host[: len(requests)].tolist(), ms)

        return read

    def _step(self) -> Tensor:
        return self._inputs.advance(self._stepper.step(self._inputs.sequences()))


class StepGraphs:
    """Captured steps with trees of a few shapes, the largest first in `steppers`, for a few batch sizes, with penalties and
    without; a batch runs in the smallest that holds it. Large batches have no copies beside what a head drafts."""

    def __init__(self, steppers: dict[TreeShape, Stepper], batch_sizes: list[int], limits: GraphLimits, device: str) -> None:
        self.batch_sizes, self.steppers = sorted(batch_sizes), steppers
        self._graphs: dict[tuple[int, TreeShape, bool], StepGraph] = {}
        memory, target = None, next(iter(steppers.values())).target
        with torch.inference_mode():
            tables = penalty_tables(self.batch_sizes[-1], target.spec.vocab_size, device)
            # The largest first: the others then live in its memory.
            for batch_size in reversed(self.batch_sizes):
                for penalties in (tables.first(batch_size), None):
                    inputs = StepInputs(batch_size, limits, device, penalties)
                    for tree, stepper in steppers.items():
                        if copies_beside(tree) and batch_size > MOST_COPYING:
                            continue
                        graph = StepGraph(stepper, inputs, device, memory)
                        self._graphs[batch_size, tree, penalties is not None], memory = graph, graph.memory

    @property
    def trees(self) -> list[TreeShape]:
        return list(self.steppers)

    def size_for(self, batch_size: int) -> int | None:
        """None where the batch is larger than all of them."""
        return next((size for size in self.batch_sizes if size >= batch_size), None)

    def find(self, batch_size: int, tree: TreeShape, *, has_penalties: bool = False) -> StepGraph | None:
        """None where the batch is larger than all of them."""
        size = self.size_for(batch_size)
        return None if size is None else self._graphs[size, tree, has_penalties]

    @torch.inference_mode()
    def measured_ms(self) -> dict[int, dict[TreeShape, float]]:
        """What a step takes by batch size and tree: the least of a few turns of all of them, over padding alone."""
        measured: dict[int, dict[TreeShape, float]] = {size: {} for size in self.batch_sizes}
        for _ in range(NUM_TIMED):
            for (size, tree, has_penalties), graph in self._graphs.items():
                if not has_penalties:
                    ms = max(LEAST_MS, graph.launch((), follows=False)().ms)
                    measured[size][tree] = min(ms, measured[size].get(tree, ms))
        return measured


def copies_beside(tree: TreeShape) -> bool:
    """Whether a head drafts it and the text repeats some of it."""
    return bool(tree.num_steps and tree.num_copied)


def default_batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, ... and `largest` itself."""
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return sizes + [largest] * (largest > 1)
