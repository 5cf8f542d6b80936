"""The scheduler under random load, with a made-up model in place of the real one."""

import random

import pytest

from eagle_rt.cache.saved import SavedMemories
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.plan import StepPlan, StepResult
from eagle_rt.engine.request import Request
from eagle_rt.engine.scheduler import Scheduler, SchedulerLimits

EOS = 0


def limits(**changes: int) -> SchedulerLimits:
    values = {"page_size": 4, "num_pages": 30, "num_scratch": 6, "max_running": 4, "chunk_size": 16, "context_length": 80}
    return SchedulerLimits(**{**values, **changes})


def next_token(tokens: list[int]) -> int:
    """What the made-up model says after a text."""
    return 1 + (sum(tokens) * 31 + len(tokens)) % 97


def run_step(plan: StepPlan, rng: random.Random) -> StepResult:
    """Accept a random number of drafts everywhere; only the tokens depend on the text."""
    prefilled = [next_token(chunk.request.tokens) for chunk in plan.chunks if chunk.is_last]
    decoded = []
    for request in plan.decodes:
        text = list(request.tokens)
        for _ in range(rng.randrange(1, 5)):
            text.append(next_token(text))
        decoded.append(text[len(request.tokens) :])
    return StepResult(prefilled, decoded, [3] * len(decoded), [False] * len(decoded))


def solo(prompt: list[int], sampling: SamplingParams, context_length: int) -> list[int]:
    text = list(prompt)
    while True:
        text.append(next_token(text))
        num_output = len(text) - len(prompt)
        if text[-1] in sampling.stop_token_ids or num_output == sampling.max_new_tokens or len(text) == context_length:
            return text[len(prompt) :]


class MadeUpMemories:
    """What a model with memories would remember in each row: the text itself."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.num_copied = 0

    def run(self, plan: StepPlan) -> None:
        """Before its result is known."""
        for source, target in plan.memories:
            self.rows[target] = self.rows[source]
            self.num_copied += 1
        for chunk in plan.chunks:
            tokens, row = chunk.request.tokens, chunk.request.state_row
            assert row is not None
            assert chunk.start == 0 or self.rows[row] == tokens[: chunk.start]
            self.rows[row] = tokens[: chunk.stop]
            self.rows |= {saved: tokens[: chunk.start + count] for count, saved in chunk.saves}
        for request in plan.decodes:
            assert request.state_row is not None
            assert self.rows[request.state_row] == request.tokens[: request.num_cached]

    def keep(self, plan: StepPlan, result: StepResult) -> None:
        """More than a reply needs, too."""
        for request, tokens in zip(plan.decodes, result.decoded, strict=True):
            assert request.state_row is not None
            self.rows[request.state_row] = [*request.tokens, *tokens[:-1]]


@pytest.mark.parametrize("seed", range(16))
def test_random_load_on_a_pool_too_small(seed: int) -> None:
    rng, memories, saved = random.Random(seed), MadeUpMemories(), None
    own_limits = limits(page_size=rng.choice([1, 4]), num_pages=rng.choice([30, 100]))
    if own_limits.page_size * own_limits.num_pages < 90:
        own_limits = limits(page_size=1, num_pages=100)
    if seed >= 12:
        saved = SavedMemories(range(5, 5 + rng.choice([1, 2, 4])), own_limits.page_size)
    use_prefix_cache = seed % 3 > 0 or saved is not None
    scheduler = Scheduler(own_limits, frozenset({EOS}), use_prefix_cache=use_prefix_cache, saved=saved)
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    outputs: dict[str, list[int]] = {}
    finished: set[str] = set()
    aborted: set[str] = set()
    shared_start = [rng.randrange(1, 9) for _ in range(20)]
    for _ in range(5000):
        if len(requests) < 60 and rng.random() < 0.5:
            prompt = shared_start[: rng.randrange(0, 20)] + [rng.randrange(1, 9) for _ in range(rng.randrange(1, 40))]
            stop = tuple(rng.sample(range(1, 98), rng.choice([0, 0, 2])))
            sampling = SamplingParams(max_new_tokens=rng.choice([1, 5, 30, None]), stop_token_ids=stop)
            name = f"r{len(requests)}"
            requests[name] = (prompt, sampling)
            outputs[name] = []
            scheduler.submit(Request(name, prompt, sampling, seed=0))
        if requests and rng.random() < 0.03:
            name = rng.choice(list(requests))
            if scheduler.abort(name):
                aborted.add(name)
                assert name not in finished
        plan = scheduler.plan()
        scheduler.check_integrity()
        assert sum(chunk.stop - chunk.start for chunk in plan.chunks) <= scheduler.limits.chunk_size
        for request in plan.decodes:
            assert len(request.pages) * scheduler.limits.page_size >= request.num_cached + scheduler.limits.num_scratch
        result = run_step(plan, rng)
        if saved:
            memories.run(plan)
            memories.keep(plan, result)
        for event in scheduler.commit(plan, result):
            outputs[event.request_id] += event.tokens
            if event.finish_reason:
                finished.add(event.request_id)
        scheduler.check_integrity()
        if len(requests) == 60 and not scheduler.has_work:
            break
    assert finished | aborted == set(requests), "a request starved"
    for name in finished:
        assert outputs[name] == solo(*requests[name], scheduler.limits.context_length), name
    assert scheduler.num_available_pages == scheduler.limits.num_pages
    assert bool(memories.num_copied) == bool(saved)


def test_texts_that_others_have_left_stay_cached_while_there_is_room() -> None:
    scheduler, rng = Scheduler(limits(num_pages=60), frozenset(), use_prefix_cache=True), random.Random(0)
    texts = [[number] * 17 for number in range(1, 6)]

    def num_cached(name: str, text: list[int]) -> int:
        scheduler.submit(Request(name, text, SamplingParams(max_new_tokens=9), 0))
        ended = []
        while scheduler.has_work:
            plan = scheduler.plan()
            ended += [event for event in scheduler.commit(plan, run_step(plan, rng)) if event.finish_reason]
            scheduler.check_integrity()
        return ended[0].stats.num_prompt_tokens_cached

    assert [num_cached(f"first {number}", text) for number, text in enumerate(texts)] == [0] * 5
    assert [num_cached(f"again {number}", text) for number, text in enumerate(texts)] == [16] * 5


def test_what_the_head_has_read_later_is_shared_at_once() -> None:
    """And not only when the request that it was read for has left."""
    scheduler = Scheduler(limits(), frozenset(), use_prefix_cache=True)
    text = list(range(1, 10))
    scheduler.submit(Request("a", text, SamplingParams(max_new_tokens=20), 0))
    plan = scheduler.plan()
    scheduler.commit(plan, StepResult([1], [], [], [], head_rows={"a": 0}))
    for num_head_rows, num_cached in ((0, 0), (9, 8)):
        plan = scheduler.plan()
        scheduler.commit(plan, StepResult([], [[1]], [0], [False], head_rows={"a": num_head_rows}))
        scheduler.check_integrity()
        scheduler.submit(Request("b", [*text, 5, 5], SamplingParams(max_new_tokens=1), 0))
        scheduler.plan()
        assert scheduler.running[-1].num_cached == num_cached
        scheduler.abort("b")


def test_who_is_let_in_leaves_a_page_for_everyone_else() -> None:
    """Or the first step would take it away from the latest."""
    scheduler = Scheduler(limits(num_pages=8), frozenset(), use_prefix_cache=False)
    scheduler.submit(Request("a", [1, 2, 3], SamplingParams(max_new_tokens=9), 0))
    scheduler.commit(scheduler.plan(), StepResult([1], [], [], []))
    scheduler.plan()
    num_left = scheduler.num_available_pages
    longest = 4 * num_left - 6
    for length, is_let_in in ((longest, False), (longest - 4, True)):
        scheduler.submit(Request("b", [1] * length, SamplingParams(max_new_tokens=9), 0))
        scheduler.plan()
        assert (scheduler.running[-1].id == "b") is is_let_in
        scheduler.abort("b")


@pytest.mark.parametrize(("longest", "is_planned"), [(2, False), (3, True), (None, True)])
def test_no_step_runs_ahead_of_one_that_ends_all_replies(longest: int | None, is_planned: bool) -> None:
    scheduler = Scheduler(limits(), frozenset(), use_prefix_cache=False)
    for name in "ab":
        scheduler.submit(Request(name, [1, 2, 3], SamplingParams(max_new_tokens=longest), 0))
    scheduler.commit(scheduler.plan(), StepResult([1, 1], [], [], []))
    plan = scheduler.plan()
    assert bool(scheduler.plan_ahead(plan, max_gained=4)) is is_planned
    if is_planned:
        assert all(len(request.pages) * 4 >= 3 + 4 + 6 for request in scheduler.running)


def test_first_come_first_served() -> None:
    scheduler = Scheduler(limits(max_running=1), frozenset(), use_prefix_cache=False)
    for name in "abc":
        scheduler.submit(Request(name, [1, 2, 3], SamplingParams(max_new_tokens=2), 0))
    order = []
    rng = random.Random(0)
    while scheduler.has_work:
        plan = scheduler.plan()
        order += [event.request_id for event in scheduler.commit(plan, run_step(plan, rng)) if event.finish_reason]
    assert order == ["a", "b", "c"]


def test_the_latest_arrival_gives_way() -> None:
    scheduler = Scheduler(limits(num_pages=24, page_size=1, context_length=18), frozenset(), use_prefix_cache=False)
    early = Request("early", [1, 2, 3], SamplingParams(max_new_tokens=None), 0)
    late = Request("late", [4, 5, 6], SamplingParams(max_new_tokens=None), 0)
    scheduler.submit(early)
    scheduler.submit(late)
    scheduler.submit(Request("later", [7, 8, 9], SamplingParams(max_new_tokens=None), 0))  # waits, behind the others
    finished = []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert "late" not in scheduler.waiting or len(scheduler.running) == 1, "who gave way comes first"
        result = StepResult(
            [next_token(c.request.tokens) for c in plan.chunks if c.is_last],
            [[next_token(r.tokens)] for r in plan.decodes],
            [0] * len(plan.decodes),
            [False] * len(plan.decodes),
        )
        finished += [event.request_id for event in scheduler.commit(plan, result) if event.finish_reason]
        scheduler.check_integrity()
    assert finished == ["early", "late", "later"]
    assert early.stats.num_preemptions == 0
    assert late.stats.num_preemptions > 0


def test_prompts_are_shared_while_they_run() -> None:
    scheduler = Scheduler(limits(num_pages=100), frozenset(), use_prefix_cache=True)
    prompt = list(range(1, 18))
    scheduler.submit(Request("first", prompt, SamplingParams(), 0))
    plan = scheduler.plan()
    scheduler.commit(plan, StepResult([], [], [], []))
    plan = scheduler.plan()
    scheduler.commit(plan, StepResult([5], [], [], []))
    second = Request("second", prompt, SamplingParams(), 0)
    scheduler.submit(second)
    scheduler.plan()
    assert second.stats.num_prompt_tokens_cached == 16
    assert second.pages[:4] == scheduler.running[0].pages[:4]


def test_thousands_in_line_cost_little() -> None:
    """Planning looks at the head of the line only: the number of requests it touches does not grow with the line."""
    scheduler = Scheduler(limits(), frozenset(), use_prefix_cache=True)
    touched = 0

    class CountingTokens(list):
        def __len__(self) -> int:
            nonlocal touched
            touched += 1
            return super().__len__()

    for number in range(5000):
        request = Request(f"r{number}", [1, 2, 3], SamplingParams(), 0)
        request.tokens = CountingTokens(request.tokens)
        scheduler.submit(request)
    touched = 0
    scheduler.plan()
    assert touched < 200


@pytest.mark.parametrize(("prompt", "message"), [([], "empty"), ([1] * 80, "80 tokens, but the context length is 80")])
def test_prompts_that_cannot_be_served(prompt: list[int], message: str) -> None:
    scheduler = Scheduler(limits(), frozenset(), use_prefix_cache=True)
    with pytest.raises(ValueError, match=message):
        scheduler.submit(Request("r", prompt, SamplingParams(), 0))


def test_a_stop_token_cuts_inside_an_accepted_run() -> None:
    scheduler = Scheduler(limits(), frozenset({EOS}), use_prefix_cache=True)
    request = Request("r", [1, 2, 3], SamplingParams(), 0)
    scheduler.submit(request)
    scheduler.commit(scheduler.plan(), StepResult([5], [], [], []))
    events = scheduler.commit(scheduler.plan(), StepResult([], [[6, EOS, 7]], [3], [False]))
    assert events[0].tokens == [6, EOS]
    assert events[0].finish_reason == {"type": "stop", "matched": EOS}
    scheduler.check_integrity()
