"""What a step is to do, and what it has come to: data only, no torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from eagle_rt.engine.request import Request
from eagle_rt.logprobs import Logprobs
from eagle_rt.trace import Traces
from eagle_rt.tree_shape import TreeShape


@dataclass(frozen=True)
class Chunk:
    """Rows start .. stop - 1 of a prompt (or of a preempted text) to process; `is_last`: its next token is then chosen."""

    request: Request
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def is_first(self) -> bool:
        return self.start == self.request.num_matched

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.prefill_end

    @property
    def saves(self) -> list[tuple[int, int]]:
        """After how many of its rows what is remembered is to be saved, and where."""
        return [(own - self.start, row) for own, row in self.request.marks.items() if self.start < own <= self.stop]


@dataclass(frozen=True)
class StepPlan:
    """What the next step does: prompt chunks in one pass, and one decode step for every request past its prompt.

    load: how many requests are running, those whose prompts have yet to be read among them. memories: what is saved to be copied
    first: (from, to) rows.
    """

    chunks: tuple[Chunk, ...]
    decodes: tuple[Request, ...]
    load: int
    memories: tuple[tuple[int, int], ...] = ()

    @property
    def staying(self) -> tuple[Request, ...]:
        """Those of `decodes` that have not ended, as they may while the step runs."""
        return tuple(request for request in self.decodes if not request.finish_reason)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decodes)


@dataclass(frozen=True)
class StepResult:
    """prefilled: the token chosen after each last chunk, in the plan's order; decoded: for each decoding request the tokens
    gained; num_drafted: drafts verified for each; broken: which heads gave no numbers. head_rows: how many rows of a request, by
    its id, the draft head's cache holds, where that has changed; None where it holds all that are cached. logprobs: by its id, of
    the tokens of each request that has asked for them; prompt_logprobs: of those that follow a chunk's, in the same way; traces: of
    the trees."""

    prefilled: list[int]
    decoded: list[list[int]]
    num_drafted: list[int]
    broken: list[bool]
    head_rows: dict[str, int] | None = None
    logprobs: Logprobs = field(default_factory=dict)
    prompt_logprobs: Logprobs = field(default_factory=dict)
    traces: Traces = field(default_factory=dict)

    def num_head_rows(self, request: Request) -> int:
        """Of a request that this step has gained tokens for."""
        return request.num_cached if self.head_rows is None else self.head_rows.get(request.id, request.num_head_rows)


class Prefilled(NamedTuple):
    """The token that follows each prompt that has been read to its end, and what requests are told that have asked."""

    tokens: list[int]
    logprobs: Logprobs
    prompt_logprobs: Logprobs


NOTHING_PREFILLED = Prefilled([], {}, {})


@dataclass(frozen=True)
class Decoded:
    """`StepOutcome.rows` of one decode step on the host, and what requests are told of it that have asked."""

    rows: list[list[int]] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=dict)
    traces: Traces = field(default_factory=dict)

    def result(self, tree: TreeShape, read: Prefilled) -> StepResult:
        """tree: that the step has drafted; read: what has been beside it."""
        tokens, broken, num_drafted = (
            tokens_of(self.rows),
            [bool(row[1]) for row in self.rows],
            [tree.num_nodes - 1] * len(self.rows),
        )
        logprobs = self.logprobs | read.logprobs
        return StepResult(read.tokens, tokens, num_drafted, broken, None, logprobs, read.prompt_logprobs, self.traces)


def tokens_of(rows: list[list[int]]) -> list[list[int]]:
    """What each request gains."""
    return [row[2 : 2 + row[0]] for row in rows]
