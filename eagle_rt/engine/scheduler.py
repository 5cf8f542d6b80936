"""Which requests advance in the next step, and who holds which pages. Plain Python, no torch."""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from eagle_rt.cache.pages import PageAllocator
from eagle_rt.cache.prefix import PrefixCache, up_to_a_memory
from eagle_rt.cache.saved import SavedMemories
from eagle_rt.engine.gathering import Gathering
from eagle_rt.engine.plan import Chunk, StepPlan, StepResult
from eagle_rt.engine.request import Request, TokenEvent, check_prompt_length


@dataclass(frozen=True)
class SchedulerLimits:
    """page_size and num_pages of the cache; num_scratch rows that a decoding request needs past its text."""

    page_size: int
    num_pages: int
    num_scratch: int
    max_running: int
    chunk_size: int
    context_length: int

    def pages_for(self, num_rows: int) -> int:
        return -(-num_rows // self.page_size)


class Scheduler:
    """First come, first served; when pages run out, the latest arrival gives way and is recomputed later.

    would_draft: whether a request that is let in now would be drafted for, so that pages without the head's rows are of no use to
    it. gathering: makes prompts wait for others; None: none waits. saved: of models with memories; None: they have none, or nothing
    is shared.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        eos_token_ids: frozenset[int],
        *,
        use_prefix_cache: bool,
        would_draft: Callable[[Request, int], bool] = lambda request, num_running: True,
        gathering: Gathering | None = None,
        saved: SavedMemories | None = None,
    ) -> None:
        self.limits = limits
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: list[Request] = []  # in order of arrival
        self.num_preemptions = 0
        self._eos_token_ids = eos_token_ids
        self._allocator = PageAllocator(limits.num_pages)
        self._prefix_cache = PrefixCache(limits.page_size, self._allocator.release, enabled=use_prefix_cache)
        self._would_draft, self._gathering, self._saved = would_draft, gathering, saved
        self._free_state_rows = list(range(limits.max_running))
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_available_pages(self) -> int:
        """Free ones, and cached ones that nobody uses."""
        return self._allocator.num_free + self._prefix_cache.num_evictable

    @property
    def cache_use(self) -> float:
        """Share of the pages that running requests hold."""
        return 1 - self.num_available_pages / self.limits.num_pages

    def submit(self, request: Request) -> None:
        """Put a request in line.

        Raises:
            ValueError: its prompt is empty, fills the whole context, or its id is in use.
        """
        check_prompt_length(len(request.tokens), self.limits.context_length)
        if request.id in self.waiting or any(request.id == other.id for other in self.running):
            raise ValueError(f"request id {request.id!r} is already in use")
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting[request.id] = request

    def abort(self, request_id: str) -> Request | None:
        """Drop a request wherever it is; None if it is not here any more."""
        request = self.waiting.pop(request_id, None)
        if request is None:
            request = next((other for other in self.running if other.id == request_id), None)
            if request is None:
                return None
            self._leave(request)
        request.finish_reason = {"type": "abort"}
        return request

    def plan(self) -> StepPlan:
        """Choose the next step's work and secure the pages for it."""
        for request in list(self.running):
            # A request that gave way to an earlier one in this very loop is no longer running.
            if request.state_row is not None and not request.is_prefilling:
                self._secure_pages(request, request.num_cached + self.limits.num_scratch)
        if self._is_letting_in():
            self._admit()
        decodes = tuple(request for request in self.running if not request.is_prefilling)
        chunks, budget = [], self.limits.chunk_size
        for request in self.running:
            if request.is_prefilling and budget:
                stop = min(request.prefill_end, request.num_cached + budget)
                chunks.append(Chunk(request, request.num_cached, stop))
                budget -= stop - request.num_cached
        return StepPlan(tuple(chunks), decodes, len(self.running), self._memories_to_copy())

    def _memories_to_copy(self) -> tuple[tuple[int, int], ...]:
        pairs = [(request.memory_source, request.state_row) for request in self.running]
        for request in self.running:
            request.memory_source = None
        return tuple((source, target) for source, target in pairs if source is not None and target is not None)

    def plan_ahead(self, plan: StepPlan, max_gained: int) -> StepPlan | None:
        """The step after `plan`, whose result is not known yet: the same requests, with pages for whatever they gain in it, up to
        max_gained tokens each; those that have ended gain nothing. None if something else than decoding is due, or if pages are
        short."""
        staying = plan.staying
        if plan.chunks or staying != tuple(self.running) or self._is_letting_in():
            return None
        limits = [request.sampling.max_new_tokens for request in staying]
        if all(limit and request.num_output_tokens + 1 >= limit for request, limit in zip(staying, limits, strict=True)):
            return None
        wanted = [self.limits.pages_for(r.num_cached + max_gained + self.limits.num_scratch) for r in staying]
        missing = [max(0, count - len(request.pages)) for request, count in zip(staying, wanted, strict=True)]
        if sum(missing) > self.num_available_pages:
            return None
        for request, count in zip(staying, missing, strict=True):
            self._take_pages(request, count)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take a step's tokens into the requests and say what each gained. Those that left while it ran gain nothing."""
        events = []
        prefilled = iter(result.prefilled)
        for chunk in plan.chunks:
            chunk.request.num_cached = chunk.stop
            chunk.request.num_head_rows = result.num_head_rows(chunk.request)
            chunk.request.prompt_logprobs[chunk.start :] = result.prompt_logprobs.get(chunk.request.id, [])
            if chunk.is_last:
                events.append(self._append(chunk.request, [next(prefilled)], result))
        decoded = zip(plan.decodes, result.decoded, result.num_drafted, result.broken, strict=True)
        for request, tokens, num_drafted, is_broken in decoded:
            if request.finish_reason:
                continue
            request.num_cached += len(tokens)
            request.num_head_rows = result.num_head_rows(request)
            request.stats.count_step(len(tokens) - 1, num_drafted, is_broken)
            if request.num_shared_head_rows < request.prefill_end <= request.num_head_rows:
                self._share_pages(request)  # the head has read the prompt only now
            events.append(self._append(request, tokens, result))
        for chunk in plan.chunks:
            if chunk.is_last and chunk.request.state_row is not None:
                self._share_pages(chunk.request)
        return events

    def forget_prefixes(self) -> None:
        """Drop what is cached of texts that nobody is using."""
        self._prefix_cache.evict(self.limits.num_pages)

    def check_integrity(self) -> None:
        """Every page is in exactly one place, and every reference is counted.

        Raises:
            AssertionError: a page is lost, shared without being cached, or a count is off.
        """
        owners: list[int] = self._allocator.free_pages()
        users: dict[int, int] = {}
        for request in self.running:
            num_shared = len(request.shared)
            assert request.pages[:num_shared] == [node.page for node in request.shared]
            owners += request.pages[num_shared:]
            for node in request.shared:
                users[id(node)] = users.get(id(node), 0) + 1
        num_unused = 0
        for node in self._prefix_cache.nodes():
            owners.append(node.page)
            assert node.num_users == users.pop(id(node), 0)
            num_unused += node.num_users == 0
        assert not users
        assert num_unused == self._prefix_cache.num_evictable
        assert sorted(owners) == list(range(self.limits.num_pages))
        state_rows = self._free_state_rows + [request.state_row for request in self.running if request.state_row is not None]
        assert sorted(state_rows) == list(range(self.limits.max_running))
        if self._saved:
            saved = self._saved.rows() + [row for request in self.running for row in request.marks.values()]
            assert sorted(saved) == sorted(self._saved.all_rows)

    def _append(self, request: Request, tokens: list[int], result: StepResult) -> TokenEvent:
        """Add tokens up to the first that ends the request: it may be in the middle of an accepted run."""
        sampling = request.sampling
        kept, of_prompt = [], request.prompt_logprobs if request.wants_prompt_logprobs else None
        if sampling.max_new_tokens == 0:
            tokens, request.finish_reason = [], {"type": "length", "length": 0}
        for token in tokens:
            request.tokens.append(token)
            kept.append(token)
            ends_text = token in sampling.stop_token_ids or (token in self._eos_token_ids and not sampling.ignore_eos)
            if ends_text:
                request.finish_reason = {"type": "stop", "matched": token}
            elif request.num_output_tokens == sampling.max_new_tokens or len(request.tokens) == self.limits.context_length:
                request.finish_reason = {"type": "length", "length": request.num_output_tokens}
            if request.finish_reason:
                break
        if request.match:
            request.match.follow(kept)
            if request.match.failure:
                request.finish_reason = {"type": "abort", "message": request.match.failure}
        if request.finish_reason:
            self._leave(request)
        own, trace = result.logprobs.get(request.id), result.traces.get(request.id)
        return TokenEvent(request.id, kept, request.stats, request.finish_reason, own and own[: len(kept)], of_prompt, trace)

    def _is_letting_in(self) -> bool:
        """Whether requests that have a place now are let in now. Where a prompt is being read others join it."""
        ready = list(islice(self.waiting.values(), len(self._free_state_rows)))
        is_reading = any(request.is_prefilling for request in self.running)
        if self._gathering and not is_reading and self._gathering.waits(ready, len(self.running)):
            return False
        return bool(ready)

    def _admit(self) -> None:
        """Let waiting requests in, in order, while there are pages for their whole prompt and a step of everyone."""
        limits, num_running = self.limits, len(self.running)
        while self.waiting and self._free_state_rows:
            request = next(iter(self.waiting.values()))
            drafts = self._would_draft(request, min(limits.max_running, len(self.running) + len(self.waiting)))
            alike = [] if request.wants_prompt_logprobs else self._prefix_cache.match(request.tokens, with_head_rows=drafts)
            shared = alike
            if self._saved:
                shared = up_to_a_memory(alike)
            self._prefix_cache.acquire(shared)
            num_needed = limits.pages_for(len(request.tokens) + limits.num_scratch) - len(shared)
            if num_needed + len(self.running) > self.num_available_pages:
                self._prefix_cache.forget(shared)
                break
            del self.waiting[request.id]
            request.shared = shared
            request.pages = [node.page for node in shared]
            request.num_cached = request.num_matched = len(shared) * limits.page_size
            num_with_head_rows = next((index for index, node in enumerate(shared) if not node.has_head_rows), len(shared))
            request.num_head_rows = num_with_head_rows * limits.page_size
            request.prefill_end = len(request.tokens)
            request.state_row = heapq.heappop(self._free_state_rows)
            if request.stats.num_preemptions == 0:
                request.stats.num_prompt_tokens_cached = request.num_cached
            self._take_pages(request, num_needed)
            if self._saved:
                self._saved.begin(request, len(request.tokens), len(alike) * limits.page_size)
            self.running.append(request)
        if self._gathering:
            self._gathering.let_in(self.running[num_running:])
        self.running.sort(key=lambda other: other.arrival)

    def _secure_pages(self, request: Request, num_rows: int) -> None:
        """Give a request pages for its next step, at the cost of later arrivals, or of itself if it is the latest."""
        while (num_missing := self.limits.pages_for(num_rows) - len(request.pages)) > 0:
            if num_missing <= self.num_available_pages:
                self._take_pages(request, num_missing)
                return
            latest = self.running[-1]
            self._preempt(latest)
            if latest is request:
                return

    def _take_pages(self, request: Request, count: int) -> None:
        self._prefix_cache.evict(count - self._allocator.num_free)
        request.pages += self._allocator.allocate(count)

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        request.stats.num_preemptions += 1
        self._leave(request)
        request.num_cached = 0
        self.waiting[request.id] = request
        self.waiting.move_to_end(request.id, last=False)

    def _leave(self, request: Request) -> None:
        """Take a request out of the running, and keep what it has cached for prompts that begin alike."""
        self._share_pages(request)
        if self._saved:
            self._saved.end(request)
        num_shared = len(request.shared)
        self._prefix_cache.forget(request.shared)
        self._allocator.release(request.pages[num_shared:])
        request.pages, request.shared = [], []
        self.running.remove(request)
        assert request.state_row is not None
        heapq.heappush(self._free_state_rows, request.state_row)
        request.state_row = None

    def _share_pages(self, request: Request) -> None:
        request.num_shared_head_rows = request.num_head_rows
        request.shared = self._prefix_cache.insert(
            request.tokens, request.num_cached, request.pages, request.shared, request.num_head_rows
        )
        if self._saved:
            self._saved.settle(request)
