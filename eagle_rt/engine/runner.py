"""Runs a step plan on the device: the meeting of scheduling and tensors."""

import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from eagle_rt.config import TreeShape
from eagle_rt.engine.graphs import StepGraph, StepGraphs
from eagle_rt.engine.prepare import decode_sequences, prefill_batch, sampling_batch
from eagle_rt.engine.request import Request
from eagle_rt.engine.scheduler import Chunk, StepPlan, StepResult
from eagle_rt.speculate.step import Stepper


class StepClock:
    """Seconds spent in each named part of the steps so far."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        """Everything since the last mark was `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


class Runner:
    """Owns the models and the caches. graphs: captured steps, for batches that fit one."""

    def __init__(self, stepper: Stepper, tree_shape: TreeShape, page_size: int, device: str) -> None:
        self.clock = StepClock()
        self.stepper, self.tree_shape = stepper, tree_shape
        self.graphs: StepGraphs | None = None
        self._page_size, self._device = page_size, device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Do what the plan says; tokens come back to the host once per part."""
        self.clock.start()
        rows = self._decode(plan.decodes) if plan.decodes else []
        prefilled = self._prefill(plan.chunks) if plan.chunks else []
        return self._result(prefilled, rows)

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """Whether the plan is one captured step and nothing else, so that another may follow before its result is known."""
        return bool(plan.decodes and not plan.chunks and self._graph_for(plan.decodes))

    @torch.inference_mode()
    def launch(self, plan: StepPlan, *, follows: bool) -> Callable[[], StepResult]:
        """Start a captured step; the returned function waits for its result. See `StepGraph.launch`."""
        graph = self._graph_for(plan.decodes)
        assert graph
        self.clock.start()
        read = graph.launch(plan.decodes, follows=follows)
        self.clock.mark("prepare")

        def result() -> StepResult:
            self.clock.start()
            rows = read()
            self.clock.mark("step")
            return self._result([], rows)

        return result

    def _graph_for(self, requests: tuple[Request, ...]) -> StepGraph | None:
        return self.graphs.find(len(requests)) if self.graphs else None

    def _result(self, prefilled: list[int], rows: list[list[int]]) -> StepResult:
        """rows: `StepOutcome.rows` on the host."""
        decoded, broken = [row[2 : 2 + row[0]] for row in rows], [bool(row[1]) for row in rows]
        return StepResult(prefilled, decoded, self.tree_shape.num_draft_tokens - 1, broken)

    def _decode(self, requests: tuple[Request, ...]) -> list[list[int]]:
        graph = self._graph_for(requests)
        if graph:
            rows = graph.launch(requests, follows=False)()
            self.clock.mark("step")
            return rows
        sequences = decode_sequences(requests, self.tree_shape.num_scratch_rows, self._page_size, self._device)
        self.clock.mark("prepare")
        rows = self.stepper.step(sequences, self.clock.mark).rows.tolist()
        self.clock.mark("accept")
        return rows

    def _prefill(self, chunks: tuple[Chunk, ...]) -> list[int]:
        target, drafter = self.stepper.target, self.stepper.drafter
        batch = prefill_batch(chunks, self._page_size, self._device)
        feature_layers = drafter.head.feature_layers if drafter else ()
        output = target.forward(batch, self.stepper.pool, self.stepper.backend, feature_layers)

        ending = [chunk for chunk in chunks if chunk.is_last]
        end_rows = [batch.query_starts[b + 1] - 1 for b, chunk in enumerate(chunks) if chunk.is_last]
        chosen = self._choose_next(output.hidden[end_rows], ending) if ending else batch.tokens[:0]
        if drafter and output.features is not None:
            next_tokens = shifted_tokens(chunks, batch.tokens, chosen)
            state_rows = torch.tensor([chunk.request.state_row for chunk in ending], dtype=torch.int64, device=self._device)
            last_rows = torch.tensor(end_rows, dtype=torch.int64, device=self._device)
            drafter.extend(batch, next_tokens, output.features, last_rows, state_rows)
        tokens = chosen.tolist()
        self.clock.mark("prefill")
        return tokens

    def _choose_next(self, hidden: Tensor, chunks: list[Chunk]) -> Tensor:
        """[R] the tokens that follow the chunks which end their prompts; hidden: [R, H] at their last rows."""
        positions = torch.tensor([[chunk.stop - 1] for chunk in chunks], device=self._device)
        sampling = sampling_batch([chunk.request for chunk in chunks], self._device)
        return self.stepper.operations.choose(self.stepper.target.logits(hidden)[:, None], positions, sampling)[:, 0]


def shifted_tokens(chunks: tuple[Chunk, ...], tokens: Tensor, chosen: Tensor) -> Tensor:
    """[T] for every row of the chunks the token one position later: the text's own, or the one just chosen at its end."""
    shifted = tokens.roll(-1)
    row, num_ended = 0, 0
    for chunk in chunks:
        row += chunk.stop - chunk.start
        if chunk.is_last:
            shifted[row - 1] = chosen[num_ended]
            num_ended += 1
        else:
            shifted[row - 1] = chunk.request.tokens[chunk.stop]
    return shifted
