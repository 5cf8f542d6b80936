"""What a model thinks before it answers: told apart from the answer, and left free where the answer must match something."""

import json
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from eagle_rt.engine.params import Grammar, SamplingParams, message_of
from eagle_rt.server.text import length_of_begun
from eagle_rt.server.tools import json_format

# DeepSeek-R1's marks, which Qwen 3 and MiMo have too.
OPENS, CLOSES = "<think>", "</think>"
# Of a prompt, in tokens: how a template begins a reply.
TAIL = 32


class ReasoningReader:
    """Tells what a reply begins with, between the marks, from what follows, while it comes. White space around either is left out.

    has_begun: the prompt has opened it. Text that may be or hide a mark is held back until that is decided.
    """

    def __init__(self, *, has_begun: bool) -> None:
        self._held, self._may_begin, self._is_inside = "", True, has_begun
        self._is_empty = True  # what is being told, reasoning or the answer

    def read(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """The reply goes on with this, and ends if it is the last: (more reasoning, more of the answer)."""
        self._held += text
        if self._may_begin and not self._is_decided(is_last):
            return "", ""
        if not self._is_inside:
            return "", self._told()
        before, mark, after = self._held.partition(CLOSES)
        if mark:
            self._held = before
            reasoning = self._told().rstrip()
            self._held, self._is_inside, self._is_empty = after, False, True
            return reasoning, self._told()
        cut = len(before) if is_last else len(before) - length_of_begun(before, CLOSES)
        cut = len(before[:cut].rstrip())
        self._held = before[:cut]
        reasoning = self._told()
        self._held += before[cut:]
        return reasoning, ""

    def _is_decided(self, is_last: bool) -> bool:
        """Whether it is known by now if the reply begins with reasoning; if it does, behind the mark."""
        text = self._held.lstrip()
        if not is_last and OPENS.startswith(text):
            return False
        if text.startswith(OPENS):
            self._held, self._is_inside = text.removeprefix(OPENS), True
        elif not self._is_inside:
            self._is_empty = False  # a reply without reasoning stays as it is
        self._may_begin = False
        return True

    def _told(self) -> str:
        """All that is held, without white space at the beginning."""
        text, self._held = self._held.lstrip() if self._is_empty else self._held, ""
        self._is_empty = self._is_empty and not text
        return text


@dataclass(frozen=True)
class Reasoning:
    """Of one reply. has_begun: the prompt has opened it."""

    has_begun: bool

    def reader(self) -> ReasoningReader:
        return ReasoningReader(has_begun=self.has_begun)

    def before(self, params: SamplingParams) -> SamplingParams:
        """What the reply must match, if anything, is matched behind the reasoning.

        Raises:
            ValueError: that is too long.
        """
        answer = params.grammar and matched_format(params.grammar)
        if not answer:
            return params
        thoughts: dict[str, Any] = {
            "type": "tag",
            "begin": "" if self.has_begun else OPENS,
            "content": {"type": "any_text"},
            "end": [f"{CLOSES}\n\n", f"{CLOSES}\n", CLOSES],
        }
        if not self.has_begun:
            thoughts = {"type": "optional", "content": thoughts}
        whole = {"type": "structural_tag", "format": {"type": "sequence", "elements": [thoughts, answer]}}
        try:
            return replace(params, json_schema=None, regex=None, structural_tag=json.dumps(whole))
        except ValidationError as error:  # it has become too long
            raise ValueError(message_of(error)) from None


def reasoning_of(tokenizer: PreTrainedTokenizerBase, prompt: list[int], parser: str) -> Reasoning | None:
    """None where a model does not think, or the prompt has told it not to: by the thoughts that it has closed.

    parser: one of `config.REASONING_PARSERS`.
    """
    if parser == "none" or (parser == "auto" and CLOSES not in str(tokenizer.chat_template)):
        return None
    tail = str(tokenizer.decode(prompt[-TAIL:])).rstrip()
    return None if tail.endswith(CLOSES) else Reasoning(tail.endswith(OPENS))


def matched_format(grammar: Grammar) -> dict[str, Any] | None:
    """The grammar as a part of xgrammar's structural tags; None for one that cannot be a part."""
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    try:
        document = json.loads(grammar.text)
    except ValueError:
        return None  # which its compiler will say
    if grammar.kind == "json_schema":
        return json_format(document)
    return document.get("format") if isinstance(document, dict) else None
