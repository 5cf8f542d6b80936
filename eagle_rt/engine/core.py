"""The engine without its surroundings: requests in, token events out, one step at a time."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from eagle_rt.engine.grammars import Grammars
from eagle_rt.engine.metrics import EngineMetrics
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.plan import StepPlan, StepResult
from eagle_rt.engine.request import Request, RequestStats, TokenEvent
from eagle_rt.engine.runner import Runner
from eagle_rt.engine.scheduler import Scheduler
from eagle_rt.speculate.grammar_match import GrammarMatch


@dataclass(frozen=True)
class LaunchedStep:
    """A captured step that is running; `result` waits for it."""

    plan: StepPlan
    result: Callable[[], StepResult]


class EngineCore:
    """Not thread-safe: one thread submits, aborts and steps.

    grammars: compiles what replies shall match; None: they can't be made to match anything.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, vocab_size: int, random_seed: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.grammars: Grammars | None = None
        self.metrics = EngineMetrics()
        self._launched: LaunchedStep | None = None
        self._vocab_size = vocab_size
        self._seeds = random.Random(random_seed)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._launched is not None

    def submit(self, request_id: str, prompt: list[int], sampling: SamplingParams, match: GrammarMatch | None = None) -> None:
        """Put a request in line. match: follows the reply, for settings with a grammar.

        Raises:
            ValueError: the prompt is empty, too long, or holds ids outside the vocabulary, as a bias may, or more is to be drafted
                than the engine drafts, or the reply shall match a grammar while what is accepted is made up.
        """
        assert (match is None) == (sampling.grammar is None), "or the reply would match nothing, and nobody would know"
        if match and self.runner.stepper.simulates:
            raise ValueError("a reply can't match a grammar while --speculative-simulate-accept-length makes up what is accepted")
        outside = next((token for token in prompt if not 0 <= token < self._vocab_size), None)
        if outside is not None:
            raise ValueError(f"prompt token {outside} is outside the vocabulary of {self._vocab_size}")
        outside = next((token for token, _ in sampling.logit_bias if not 0 <= token < self._vocab_size), None)
        if outside is not None:
            raise ValueError(f"logit_bias has token {outside}, which is outside the vocabulary of {self._vocab_size}")
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        bounds = sampling.speculative.within(self.runner.tree_shape)
        request = Request(request_id, prompt, sampling, seed, bounds, match)
        request.stats.is_simulated = self.runner.stepper.simulates
        self.scheduler.submit(request)

    def abort(self, request_id: str, *, is_complete: bool = False) -> TokenEvent | None:
        """End a request now; None if it has already ended. is_complete: nobody gave it up, its text has come to a stop string."""
        request = self.scheduler.abort(request_id)
        self.runner.forget(request_id)
        if not request:
            return None
        if is_complete:
            self._count_finished(request.stats)
        else:
            self.metrics.num_aborted += 1
        return TokenEvent(request.id, [], request.stats, request.finish_reason)

    def step(self) -> list[TokenEvent]:
        """Plan, run, commit. A captured step is launched before the one ahead of it is read: its events come one call later."""
        launched = self._launched
        if launched:
            plan = None
            if self.runner.can_run_ahead(launched.plan):
                plan = self.scheduler.plan_ahead(launched.plan, self.runner.tree_shape.max_depth + 1)
            self._launched = LaunchedStep(plan, self.runner.launch(plan, follows=True)) if plan else None
            return self._commit(launched.plan, launched.result())
        plan = self.scheduler.plan()
        if not plan:
            return []
        if self.runner.can_run_ahead(plan):
            self._launched = LaunchedStep(plan, self.runner.launch(plan, follows=False))
            return []
        return self._commit(plan, self.runner.run(plan))

    def close(self) -> None:
        """Let go of what does not end by itself: other processes that hold the model."""
        self.runner.stepper.target.close()

    def _commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        has_left = [request.finish_reason is not None for request in plan.decodes]
        events = self.scheduler.commit(plan, result)

        metrics = self.metrics
        metrics.num_steps += 1
        metrics.num_decode_steps += bool(plan.decodes)
        metrics.num_prompt_tokens += sum(chunk.num_rows for chunk in plan.chunks)
        decoded = zip(result.decoded, result.num_drafted, result.broken, has_left, strict=True)
        for tokens, num_drafted, is_broken, is_gone in decoded:
            if not is_gone:
                metrics.count_decode(len(tokens) - 1, num_drafted, is_broken)
        metrics.num_generated_tokens += sum(len(event.tokens) for event in events)
        for event in events:
            if event.finish_reason:
                if event.failure:
                    metrics.num_aborted += 1
                else:
                    self._count_finished(event.stats)
                self.runner.forget(event.request_id)
        return events

    def _count_finished(self, stats: RequestStats) -> None:
        self.metrics.num_finished += 1
        self.metrics.num_cached_prompt_tokens += stats.num_prompt_tokens_cached

    def forget_metrics(self) -> None:
        """Count from here on, as if nothing had run before: after a warm-up."""
        self.metrics = EngineMetrics()
        self.runner.clock.seconds.clear()

    def current_metrics(self) -> EngineMetrics:
        """The totals, with the current load filled in."""
        scheduler, metrics = self.scheduler, self.metrics
        metrics.num_running, metrics.num_waiting = len(scheduler.running), len(scheduler.waiting)
        metrics.num_preemptions = scheduler.num_preemptions
        metrics.cache_use = scheduler.cache_use
        metrics.is_simulated = self.runner.stepper.simulates
        metrics.seconds = dict(self.runner.clock.seconds)
        stepper = self.runner.host_stepper
        metrics.calibration = stepper.policy.calibration if stepper else None
        return metrics


def run_to_end(
    core: EngineCore, prompts: list[list[int]], params: list[SamplingParams], on_step: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """The replies to prompts that are submitted all at once; on_step is called after each step."""
    replies: dict[str, list[int]] = {}
    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        replies[str(index)] = []
        core.submit(str(index), prompt, sampling)
    while core.has_work:
        for event in core.step():
            replies[event.request_id] += event.tokens
        on_step()
    return list(replies.values())
