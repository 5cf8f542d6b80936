"""Runs a step plan on the device: the meeting of scheduling and tensors."""

from collections.abc import Callable
from itertools import compress

import torch
from torch import Tensor

from eagle_rt.batch import Batch, to_device
from eagle_rt.engine.clocks import DeviceClock, StepClock
from eagle_rt.engine.gathering import PassCosts
from eagle_rt.engine.graphs import StepGraph, StepGraphs
from eagle_rt.engine.logprobs import logprobs_of, logprobs_of_each, logprobs_of_prompts, logprobs_of_trees, want_logprobs
from eagle_rt.engine.plan import NOTHING_PREFILLED, Chunk, Decoded, Prefilled, StepPlan, StepResult, tokens_of
from eagle_rt.engine.prepare import decode_sequences, host_sequences, prefill_batch, prefilled_sequence, sampling_batch
from eagle_rt.engine.request import Request
from eagle_rt.engine.traces import traces_of_forest, traces_of_trees, want_traces
from eagle_rt.speculate.headless_step import HeadlessStepper
from eagle_rt.speculate.host_step import HostStepper
from eagle_rt.speculate.host_verifier import HostOutcome
from eagle_rt.speculate.step import Stepper
from eagle_rt.speculate.tree_choice import FixedTree, TreeChoice
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

NOTHING_DECODED = HostOutcome([], [], [], False, torch.empty(0, 0), [])


class Runner:
    """Owns the models and the caches.

    graphs: captured steps, for batches that fit one; of what trees the batches draft that do not, too, is then `choice`'s to say.
    host_stepper: drafts where nothing is captured, or headless does, which has no head; without either, and for no speculation,
    steps are those of `stepper`, which draft for batches of up to max_batch_size.
    """

    def __init__(
        self,
        stepper: Stepper,
        host_stepper: HostStepper | None,
        headless: HeadlessStepper | None,
        tree_shape: TreeShape,
        page_size: int,
        device: str,
        max_batch_size: int | None,
    ) -> None:
        self.clock, self.pass_costs = StepClock(), PassCosts()
        self.stepper, self.tree_shape = stepper, tree_shape
        self._host_stepper, self._headless = host_stepper, headless
        self.graphs: StepGraphs | None = None
        self.choice: TreeChoice = FixedTree(tree_shape)
        self._steppers = {NO_SPECULATION: stepper.sized(NO_SPECULATION), tree_shape: stepper}
        self._page_size, self._device, self._max_batch_size = page_size, device, max_batch_size

    def use_graphs(self, graphs: StepGraphs, choice: TreeChoice) -> None:
        """Batches that are too large run what was captured eagerly."""
        self.graphs, self._steppers, self.choice = graphs, graphs.steppers, choice

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Do what the plan says; tokens come back to the host once per part."""
        self.clock.start()
        if plan.memories:
            own = self.stepper.pool.memories
            assert own, "or none would have been saved"
            own.copy(*(to_device(rows, self._device) for rows in zip(*plan.memories, strict=True)))
        if stepper := self.on_host:
            return self._run_on_host(plan, stepper)
        tree = self._tree_for(plan.decodes)
        # A captured step runs while the host launches the passes that read prompts.
        decoded = self._start_decoding(plan.decodes, tree) if plan.decodes else Decoded
        prefilled = self.start_prefill(plan.chunks) if plan.chunks else lambda: NOTHING_PREFILLED
        return decoded().result(tree, prefilled())

    @property
    def host_stepper(self) -> HostStepper | None:
        """What drafts, if the host decides on trees: captured steps leave it nothing to decide."""
        return None if self.graphs else self._host_stepper

    @property
    def headless(self) -> HeadlessStepper | None:
        """What makes steps without a head on the host, if any does."""
        return None if self.graphs else self._headless

    @property
    def on_host(self) -> HostStepper | HeadlessStepper | None:
        """Whichever of them makes the steps."""
        return self.host_stepper or self.headless

    def would_draft(self, request: Request, num_running: int) -> bool:
        """Whether a request that makes them so many would probably be drafted for."""
        stepper = self.host_stepper
        if not stepper:
            return True
        return request.bounds is not None and stepper.policy.wants_drafts(
            num_running, len(request.tokens), request.sampling.temperature > 0
        )

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        if stepper := self.on_host:
            stepper.forget(request_id)

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """Whether the plan is one captured step and nothing else, and still that of those who are left, so that another may follow
        before its result is known."""
        place = self._place_of(plan.decodes)
        return bool(plan.staying and not plan.chunks and place and place == self._place_of(plan.staying))

    @torch.inference_mode()
    def launch(self, plan: StepPlan, *, follows: bool) -> Callable[[], StepResult]:
        """Start a captured step; the returned function waits for its result. See `StepGraph.launch`."""
        tree = self._tree_for(plan.decodes)
        graph = self._graph_for(plan.decodes, tree)
        assert graph
        self.clock.start()
        rows = self._launch(graph, plan.decodes, tree, follows=follows)

        def result() -> StepResult:
            self.clock.start()
            return Decoded(rows()).result(tree, NOTHING_PREFILLED)

        return result

    def _launch(
        self, graph: StepGraph, requests: tuple[Request, ...], tree: TreeShape, *, follows: bool
    ) -> Callable[[], list[list[int]]]:
        """Start it; the returned function waits for its `StepOutcome.rows` and learns from those of requests that had not ended."""
        read, are_here = graph.launch(requests, follows=follows), [not request.finish_reason for request in requests]
        self.clock.mark("prepare")

        def rows() -> list[list[int]]:
            found = read()
            self.clock.mark("step")
            self._learn(requests, tree, [*compress(found.rows, are_here)], found.ms)
            return found.rows

        return rows

    def _tree_for(self, requests: tuple[Request, ...]) -> TreeShape:
        """What a step of these drafts."""
        is_small = self._max_batch_size is None or len(requests) <= self._max_batch_size
        if NO_SPECULATION in self._steppers and not (is_small and any(request.bounds for request in requests)):
            return NO_SPECULATION
        return self.choice.best(len(requests), is_sampled=is_sampled(requests))

    def _learn(self, requests: tuple[Request, ...], tree: TreeShape, rows: list[list[int]], ms: float) -> None:
        self.choice.learn(tree, [row[0] for row in rows], ms, is_sampled=is_sampled(requests))

    def _graph_for(self, requests: tuple[Request, ...], tree: TreeShape) -> StepGraph | None:
        place = self._place_of(requests)
        return self.graphs.find(place[0], tree, has_penalties=place[1]) if self.graphs and place else None

    def _place_of(self, requests: tuple[Request, ...]) -> tuple[int, bool] | None:
        """For how many requests, and whether with penalties, the step was captured that these would run in, with any tree."""
        size = self.graphs.size_for(len(requests)) if self.graphs else None
        if size is None or needs_host(requests):
            return None
        return size, any(request.sampling.has_penalties for request in requests)

    def _run_on_host(self, plan: StepPlan, stepper: HostStepper | HeadlessStepper) -> StepResult:
        outcome, prefilled, head_rows = NOTHING_DECODED, NOTHING_PREFILLED, None
        if plan.decodes:
            sequences = host_sequences(plan.decodes, self.tree_shape.num_scratch_rows, self._page_size)
            sampling = sampling_batch(list(plan.decodes), self._device)
            self.clock.mark("prepare")
            outcome = stepper.step(sequences, sampling, self.clock.mark)
        if plan.chunks:
            prefilled = self._prefill_on_host(plan.chunks, stepper)
            stepper.skip_pause()
        if isinstance(stepper, HostStepper):
            rows, have_read = stepper.drafter.rows, [chunk.request for chunk in plan.chunks]
            have_read += plan.decodes if outcome.has_read else ()
            head_rows = {request.id: rows[request.id].num_made for request in have_read}
        elif stepper.verifier.feature_layers:
            head_rows = {}  # a class that drafts has seen nothing of texts that others begin
        logprobs = logprobs_of(plan.decodes, outcome.logits, outcome.rows, outcome.tokens) | prefilled.logprobs
        traces, decoded = traces_of_forest(plan.decodes, outcome), (outcome.tokens, outcome.num_drafted, outcome.is_broken)
        return StepResult(prefilled.tokens, *decoded, head_rows, logprobs, prefilled.prompt_logprobs, traces)

    def _prefill_on_host(self, chunks: tuple[Chunk, ...], stepper: HostStepper | HeadlessStepper) -> Prefilled:
        """As `start_prefill`, but the head reads later, when it drafts, with what other texts have gained: a pass of its own would
        cost more, and if it never drafts it need not read."""
        clock = DeviceClock(is_gpu=self._device == "cuda")
        batch = prefill_batch(chunks, self._page_size, self._device)
        own = self.stepper
        output = own.target.forward(batch, own.pool, own.backend, stepper.verifier.feature_layers)
        ending, last_rows = self._ends(chunks, batch)
        chosen, logits = self._choose(output.hidden, ending, last_rows)
        clock.stop()
        tokens = chosen.tolist()
        self.pass_costs.learn(len(batch.tokens), clock.wait())
        if isinstance(stepper, HostStepper):
            assert output.features is not None
            self._put_aside(chunks, output.features, tokens, stepper)
        elif output.features is not None:
            starts, counts = [chunk.start for chunk in chunks], [chunk.num_rows for chunk in chunks]
            stepper.read([chunk.request.id for chunk in chunks], starts, counts, output.features)
        prefilled = self._told(chunks, output.hidden, ending, logits, tokens)
        self.clock.mark("prefill")
        return prefilled

    def _told(self, chunks: tuple[Chunk, ...], hidden: Tensor, ending: list[Chunk], logits: Tensor, tokens: list[int]) -> Prefilled:
        """The tokens that follow chunks which end their prompts, with what their requests are told. hidden: [T, H] of all rows;
        logits: [R, V] that the tokens were chosen by."""
        logprobs = logprobs_of_each([chunk.request for chunk in ending], logits, tokens)
        return Prefilled(tokens, logprobs, logprobs_of_prompts(chunks, hidden, self.stepper.target.logits))

    def _put_aside(self, chunks: tuple[Chunk, ...], features: Tensor, tokens: list[int], stepper: HostStepper) -> None:
        """For the head, features [T, F] of the rows of chunks; tokens: that follow the last ones."""
        next_tokens, drafter, behind = iter(tokens), stepper.drafter, []
        for chunk, own in zip(chunks, features.split([chunk.num_rows for chunk in chunks]), strict=True):
            request = chunk.request
            next_token = next(next_tokens) if chunk.is_last else request.tokens[chunk.stop]
            if chunk.is_first:
                drafter.rows.begin(request.id, request.num_head_rows, chunk.start, may_draft=request.bounds is not None)
            drafter.rows.add(request.id, own)
            if stepper.must_read(request.id):
                behind.append(prefilled_sequence(chunk, next_token, self._page_size))
        if behind:
            drafter.catch_up(behind)

    def _start_decoding(self, requests: tuple[Request, ...], tree: TreeShape) -> Callable[[], Decoded]:
        """A captured step runs on beside the host; any other has been made when this returns."""
        if graph := self._graph_for(requests, tree):
            rows = self._launch(graph, requests, tree, follows=False)
            return lambda: Decoded(rows())
        decoded = self._decode(requests, tree)
        return lambda: decoded

    def _decode(self, requests: tuple[Request, ...], tree: TreeShape) -> Decoded:
        sequences = decode_sequences(requests, self.tree_shape.num_scratch_rows, self._page_size, self._device)
        self.clock.mark("prepare")
        clock = DeviceClock(is_gpu=self._device == "cuda")
        outcome = self._steppers[tree].step(sequences, self.clock.mark)
        clock.stop()
        rows = outcome.rows.tolist()
        ms = clock.wait()
        if not (self.graphs and needs_host(requests)):  # or it would have been captured, and taken less
            self._learn(requests, tree, rows, ms)
        tokens = tokens_of(rows)
        decoded = Decoded(
            rows, logprobs_of_trees(requests, outcome, tokens), traces_of_trees(requests, outcome, tokens, tree.num_draft_tokens)
        )
        self.clock.mark("accept")
        return decoded

    @torch.inference_mode()
    def start_prefill(self, chunks: tuple[Chunk, ...]) -> Callable[[], Prefilled]:
        """Launch the passes that read them, and wait for nothing; the returned function does, for the tokens that follow them."""
        target, drafter, texts = self.stepper.target, self.stepper.drafter, self.stepper.texts
        clock = DeviceClock(is_gpu=self._device == "cuda")
        if texts:
            for request in (chunk.request for chunk in chunks if chunk.is_first):
                assert request.state_row is not None
                texts.begin(request.state_row, request.tokens)
        batch = prefill_batch(chunks, self._page_size, self._device)
        feature_layers = drafter.head.feature_layers if drafter else ()
        output = target.forward(batch, self.stepper.pool, self.stepper.backend, feature_layers)

        ending, last_rows = self._ends(chunks, batch)
        chosen, logits = self._choose(output.hidden, ending, last_rows)
        if drafter and output.features is not None:
            next_tokens = shifted_tokens(chunks, batch.tokens, chosen)
            state_rows = to_device([chunk.request.state_row for chunk in ending], self._device, torch.int64)
            drafter.extend(batch, next_tokens, output.features, last_rows, state_rows)
        clock.stop()

        def prefilled() -> Prefilled:
            found = chosen.tolist()
            self.pass_costs.learn(len(batch.tokens), clock.wait())
            told = self._told(chunks, output.hidden, ending, logits, found)
            self.clock.mark("prefill")
            return told

        return prefilled

    def _ends(self, chunks: tuple[Chunk, ...], batch: Batch) -> tuple[list[Chunk], Tensor]:
        """The chunks which end their prompts, and their last rows."""
        ends = [(chunk, stop - 1) for chunk, stop in zip(chunks, batch.query_starts[1:], strict=True) if chunk.is_last]
        return [chunk for chunk, _ in ends], to_device([row for _, row in ends], self._device, torch.int64)

    def _choose(self, hidden: Tensor, ending: list[Chunk], last_rows: Tensor) -> tuple[Tensor, Tensor]:
        """[R] the tokens that follow these chunks, and the logits [R, V] that they were chosen by; hidden: [T, H] of all rows."""
        if not ending:
            return last_rows, hidden[:0]  # none of either
        positions = to_device([[chunk.stop - 1] for chunk in ending], self._device)
        sampling = sampling_batch([chunk.request for chunk in ending], self._device)
        logits = self.stepper.target.logits(hidden[last_rows])
        return self.stepper.operations.choose(sampling.judged(logits)[:, None], positions, sampling)[:, 0], logits


def needs_host(requests: tuple[Request, ...]) -> bool:
    """Whether something must be looked at, or be known, on the host in every step of these, which captured ones do without."""
    return want_logprobs(requests) or want_traces(requests) or any(request.match for request in requests)


def is_sampled(requests: tuple[Request, ...]) -> bool:
    """Whether the next token of any is drawn."""
    return any(request.sampling.temperature > 0 for request in requests)


def shifted_tokens(chunks: tuple[Chunk, ...], tokens: Tensor, chosen: Tensor) -> Tensor:
    """[T] for every row of the chunks the token one position later: the text's own, or the one just chosen at its end."""
    shifted = tokens.roll(-1)
    row, num_ended = 0, 0
    for chunk in chunks:
        row += chunk.num_rows
        if chunk.is_last:
            shifted[row - 1] = chosen[num_ended]
            num_ended += 1
        else:
            shifted[row - 1] = chunk.request.tokens[chunk.stop]
    return shifted
