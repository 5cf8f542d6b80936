"""What a model's reply says, piece by piece: its thoughts, its answer and its calls, whichever way the model writes them."""

from dataclasses import dataclass, field
from typing import Protocol

from eagle_rt.engine.params import SamplingParams
from eagle_rt.server.calls import Call
from eagle_rt.server.tools import Tools


@dataclass
class ReplyPart:
    """What has become certain. answer: its words and its calls, in their order."""

    reasoning: str = ""
    answer: list[str | Call] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(own for own in self.answer if isinstance(own, str))

    @property
    def calls(self) -> list[Call]:
        return [own for own in self.answer if isinstance(own, Call)]


class AroundCalls:
    """Leaves out white space that only parts calls: before one, behind the last, and behind one where no words came before. An
    answer without calls stays as it is."""

    def __init__(self) -> None:
        self._space, self._has_words, self._has_calls = "", False, False

    def cut(self, answer: list[str | Call], *, is_last: bool) -> list[str | Call]:
        """The answer goes on with this, and ends if it is the last. White space waits for what follows it."""
        kept: list[str | Call] = []
        for own in answer:
            if isinstance(own, Call):
                self._space, self._has_calls = "", True
                kept.append(own)
                continue
            text = self._space + own
            words = text.rstrip()
            self._space = text[len(words) :]
            if words:
                kept.append(words.lstrip() if self._has_calls and not self._has_words else words)
                self._has_words = True
        if is_last and self._space and not self._has_calls:
            kept.append(self._space)
        return kept


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
