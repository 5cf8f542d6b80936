"""What a model thinks before it answers: told apart from the answer, and left free where the answer must match something."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.tokenizer import writes_harmony
from eagle_rt.server.calls import CallReader
from eagle_rt.server.harmony import Harmony
from eagle_rt.server.matching import behind, matched_format
from eagle_rt.server.replies import AroundCalls, ReplyForm, ReplyPart, ReplyReader
from eagle_rt.server.text import length_of_begun
from eagle_rt.server.tools import Tools

Marks = tuple[str, str]
# DeepSeek-R1's, which Qwen 3 and MiMo have too, Seed-OSS', Mistral's, and Gemma 4's.
THINK: Marks = ("<think>", "</think>")
KNOWN_MARKS = THINK, ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>")
# Of a prompt, in tokens: how a template begins a reply.
TAIL = 32


class ReasoningReader:
    """Tells what a reply begins with, between the marks, from what follows, while it comes. White space around either is left out.

    has_begun: the prompt has opened it. Text that may be or hide a mark is held back until that is decided.
    """

    def __init__(self, *, has_begun: bool, marks: Marks = THINK) -> None:
        self._held, self._may_begin, self._is_inside = "", True, has_begun
        self._opens, self._closes = marks
        self._is_empty = True  # what is being told, reasoning or the answer

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """The reply goes on with this, and ends if it is the last: (more reasoning, more of the answer)."""
        self._held += text
        if self._may_begin and not self._is_decided(is_last):
            return "", ""
        if not self._is_inside:
            return "", self._told()
        before, mark, after = self._held.partition(self._closes)
        if mark:
            self._held = before
            reasoning = self._told().rstrip()
            self._held, self._is_inside, self._is_empty = after, False, True
            return reasoning, self._told()
        cut = len(before) if is_last else len(before) - length_of_begun(before, self._closes)
        cut = len(before[:cut].rstrip())
        self._held = before[:cut]
        reasoning = self._told()
        self._held += before[cut:]
        return reasoning, ""

    def _is_decided(self, is_last: bool) -> bool:
        """Whether it is known by now if the reply begins with reasoning; if it does, behind the mark."""
        text = self._held.lstrip()
        if not is_last and self._opens.startswith(text):
            return False
        if text.startswith(self._opens):
            self._held, self._is_inside = text.removeprefix(self._opens), True
        elif not self._is_inside:
            self._is_empty = False  # a reply without reasoning stays as it is
        self._may_begin = False
        return True

    def _told(self) -> str:
        """All that is held, without white space at the beginning."""
        text, self._held = self._held.lstrip() if self._is_empty else self._held, ""
        self._is_empty = self._is_empty and not text
        return text


class MarkedReader:
    """Of a reply with marks around thoughts, which it begins with, and around calls. None of either: such marks are text."""

    def __init__(self, calls: CallReader | None, thoughts: ReasoningReader | None = None) -> None:
        self.tells_reasoning = thoughts is not None
        self._thoughts, self._calls, self._around_calls = thoughts, calls, AroundCalls()

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls if self._calls else 0

    def read(self, text: str, *, is_last: bool) -> ReplyPart:
        reasoning, text = self._thoughts.read(text, is_last=is_last) if self._thoughts else ("", text)
        if not self._calls:
            return ReplyPart(reasoning, [text] if text else [])
        return ReplyPart(reasoning, self._around_calls.cut(self._calls.read(text, is_last=is_last), is_last=is_last))


@dataclass(frozen=True)
class AllAnswer:
    """Of a model that does not think."""

    keeps_special_tokens = False

    def reader(self, tools: Tools | None, *, tells_reasoning: bool) -> ReplyReader:
        return MarkedReader(tools.reader() if tools else None)

    def before(self, params: SamplingParams, *, is_call: bool) -> SamplingParams:
        return params


@dataclass(frozen=True)
class Reasoning:
    """Between marks, before the answer. has_begun: the prompt has opened it."""

    has_begun: bool
    marks: Marks = THINK
    keeps_special_tokens = False

    def reader(self, tools: Tools | None, *, tells_reasoning: bool) -> ReplyReader:
        thoughts = ReasoningReader(has_begun=self.has_begun, marks=self.marks) if tells_reasoning else None
        return MarkedReader(tools.reader() if tools else None, thoughts)

    def before(self, params: SamplingParams, *, is_call: bool) -> SamplingParams:
        answer = params.grammar and matched_format(params.grammar)
        if not answer:
            return params
        opens, closes = self.marks
        thoughts: dict[str, Any] = {
            "type": "tag",
            "begin": "" if self.has_begun else opens,
            "content": {"type": "any_text"},
            "end": [f"{closes}\n\n", f"{closes}\n", closes],
        }
        return behind(params, [thoughts if self.has_begun else {"type": "optional", "content": thoughts}], answer)


def reply_form(tokenizer: PreTrainedTokenizerBase, prompt: list[int], parser: str) -> ReplyForm:
    """How this model replies to this prompt: whether it thinks first, unless the prompt has told it not to, by the thoughts that it
    has closed.

    parser: one of `config.REASONING_PARSERS`.
    """
    if parser == "gpt-oss" or (parser in ("auto", "none") and writes_harmony(tokenizer)):
        return Harmony(tells_reasoning=parser != "none")
    told = [marks for marks in KNOWN_MARKS if marks[1] in str(tokenizer.chat_template)]
    if parser == "none" or (parser == "auto" and not told):
        return AllAnswer()
    marks, tail = (told or [THINK])[0], str(tokenizer.decode(prompt[-TAIL:])).rstrip()
    return AllAnswer() if tail.endswith(marks[1]) else Reasoning(tail.endswith(marks[0]), marks)
