"""What a model's reply says, piece by piece: its thoughts, its answer and its calls, whichever way the model writes them."""

from dataclasses import dataclass, field
from typing import Protocol

from eagle_rt.engine.params import SamplingParams
from eagle_rt.server.calls import Call
from eagle_rt.server.tools import Tools


@dataclass
class ReplyPart:
    """What has become certain."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


class ReplyReader(Protocol):
    """Of one reply. tells_reasoning: apart from the content. num_calls: found so far."""

    tells_reasoning: bool

    @property
    def num_calls(self) -> int: ...

    def read(self, text: str, *, is_last: bool) -> ReplyPart:
        """The reply goes on with this, and ends if it is the last. Text is held back until it is known what it is part of."""
        ...


class ReplyForm(Protocol):
    """How a model writes a reply. keeps_special_tokens: by marks that are tokens of their own."""

    @property
    def keeps_special_tokens(self) -> bool: ...

    def reader(self, tools: Tools | None, *, tells_reasoning: bool) -> ReplyReader: ...

    def before(self, params: SamplingParams, *, is_call: bool) -> SamplingParams:
        """What the reply must match, if anything, is matched by the answer; is_call: it is a call, not what a user is told.

        Raises:
            ValueError: that is too long, or nested too deeply.
        """
        ...
