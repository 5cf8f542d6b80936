"""A request, what it has gained so far, and what it is told. No torch here."""

from dataclasses import dataclass, field
from typing import Any

from eagle_rt.cache.prefix import CachedPage
from eagle_rt.engine.params import SamplingParams
from eagle_rt.logprobs import TokenLogprob
from eagle_rt.speculate.grammar_match import GrammarMatch
from eagle_rt.trace import StepTrace
from eagle_rt.tree_shape import TreeShape


def check_prompt_length(num_tokens: int, context_length: int) -> None:
    """Raises ValueError if a prompt is empty or leaves no room for a reply."""
    if num_tokens == 0:
        raise ValueError("the prompt is empty")
    if num_tokens >= context_length:
        raise ValueError(
            f"the prompt has {num_tokens} tokens, but the context length is {context_length} and a reply needs at least one of them"
        )


@dataclass
class RequestStats:
    """What speculation did for one request; `accepted_histogram[a]` counts the steps that kept `a` drafts; is_simulated: what was
    kept is made up."""

    num_steps: int = 0
    num_drafted: int = 0
    num_broken_drafts: int = 0
    num_prompt_tokens_cached: int = 0
    num_preemptions: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    is_simulated: bool = False

    def count_step(self, num_accepted: int, num_drafted: int, is_broken: bool) -> None:
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.num_broken_drafts += is_broken
        self.accepted_histogram += [0] * (num_accepted + 1 - len(self.accepted_histogram))
        self.accepted_histogram[num_accepted] += 1


class Request:
    """One reply in the making: the only long-lived mutable object, and only the scheduler writes it.

    The cache holds rows for the first num_cached of its tokens; of its `pages`, the first ones may belong to the prefix cache
    (`shared`). Of the rows, the draft head's cache has the first num_head_rows, of which the prefix cache has been told of the
    first num_shared_head_rows; num_matched of the target's were there when it was let in.
    Where layers have memories (`SavedMemories`), memory_source is the row that it goes on from, until that has been copied, and
    `marks` are positions where it will save what it remembers, and in which rows.
    `bounds` is the largest tree to draft for it; `match` follows its reply where that must match a grammar. `state_row` is its
    place among the running requests, None while it waits.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        seed: int,
        bounds: TreeShape | None = None,
        match: GrammarMatch | None = None,
    ) -> None:
        self.id = request_id
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.sampling = sampling
        self.seed = seed
        self.arrival = 0
        self.pages: list[int] = []
        self.shared: list[CachedPage] = []
        self.bounds, self.match = bounds, match
        self.num_cached = 0
        self.num_matched = 0
        self.num_head_rows = 0
        self.num_shared_head_rows = 0
        self.memory_source: int | None = None
        self.marks: dict[int, int] = {}
        self.prefill_end = 0
        self.state_row: int | None = None
        self.finish_reason: dict[str, Any] | None = None
        self.stats = RequestStats()
        self.prompt_logprobs: list[TokenLogprob] = []  # of the tokens after those that have been read

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether they are asked for and have not been told yet: until then all of the prompt is read."""
        return self.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_cached < self.prefill_end


@dataclass(frozen=True)
class TokenEvent:
    """Tokens that a request gained in one step, its counts so far, and with the last ones why it ended.

    finish_reason: {"type": "stop", "matched": token id}, {"type": "length", "length": n} or {"type": "abort"}, with a "message"
    where the engine had to give it up. logprobs: of the tokens, if it has asked for them; prompt_logprobs: with the first ones, of
    the prompt's but for the first, in the same way; trace: of the decode step that gained them, too.
    """

    request_id: str
    tokens: list[int]
    stats: RequestStats
    finish_reason: dict[str, Any] | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    trace: StepTrace | None = None

    @property
    def failure(self) -> str | None:
        """Why the engine had to give the request up, if it had to."""
        return self.finish_reason.get("message") if self.finish_reason else None
