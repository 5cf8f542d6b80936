"""From tokens to text while they come: whole characters only, stop strings cut out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.request import RequestStats, TokenEvent
from eagle_rt.logprobs import TokenLogprob
from eagle_rt.models.tokenizer import decode_tokens
from eagle_rt.trace import StepTrace

INCOMPLETE = "\ufffd"
# Of a text's first token nothing is known.
Told = list[TokenLogprob | None]


@dataclass(frozen=True)
class TextDelta:
    """What became certain of a reply: its new text, and at its end why it ended."""

    text: str
    finish_reason: dict[str, Any] | None


class Reply:
    """One reply, assembled from its token events.

    Text that could still become part of a stop string, or of a character, is held back until that is decided.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        prompt: list[int],
        *,
        keeps_special_tokens: bool = False,
    ) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # of the tokens, if they were asked for
        self.prompt_logprobs: Told | None = None  # of the prompt's, too
        self.traces: list[StepTrace] = []  # of the decode steps, in the same way
        self.text = ""
        self.finish_reason: dict[str, Any] | None = None
        self.stats = RequestStats()
        self.prompt = prompt
        self._decoded = partial(decode_tokens, tokenizer, keeps_special_tokens=keeps_special_tokens)
        self._stop, self._num_logprobs, self._is_traced = sampling.stop, sampling.logprobs, sampling.speculative.trace
        self._decoded_start = 0  # tokens from here on are decoded together, so that spaces between words survive
        self._decoded_end = 0
        self._num_released = 0

    def push(self, event: TokenEvent) -> TextDelta:
        """Take an event in. After the reply has finished, further events change nothing."""
        if self.finish_reason:
            return TextDelta("", self.finish_reason)
        if event.trace:
            self.traces.append(event.trace)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *event.prompt_logprobs]
        for index, token in enumerate(event.tokens):
            self.tokens.append(token)
            if event.logprobs:
                self.logprobs.append(event.logprobs[index])
            self._decode(is_last=False)
            if self._cut_at_stop_string():
                break
        self.stats = event.stats
        if event.finish_reason and not self.finish_reason:
            self._decode(is_last=True)
            if not self._cut_at_stop_string():
                self.finish_reason = event.finish_reason
        return TextDelta(self._release(), self.finish_reason)

    def meta_info(self) -> dict[str, Any]:
        """Counts in the names that SGLang's engine uses."""
        stats = self.stats
        num_accepted = sum(count * number for number, count in enumerate(stats.accepted_histogram))
        return {
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.tokens),
            "cached_tokens": stats.num_prompt_tokens_cached,
            "num_preemptions": stats.num_preemptions,
            "spec_verify_ct": stats.num_steps,
            "spec_draft_token_num": stats.num_drafted,
            "spec_accept_token_num": num_accepted,
            "spec_accept_length": 1 + num_accepted / stats.num_steps if stats.num_steps else 0.0,
            "spec_correct_drafts_histogram": stats.accepted_histogram,
            "spec_broken_drafts": stats.num_broken_drafts,
            "spec_simulated": stats.is_simulated,
            **self._logprobs_by_name(),
            **self.traces_by_name(),
        }

    @property
    def has_logprobs(self) -> bool:
        """Whether they were asked for."""
        return self._num_logprobs is not None

    def traces_by_name(self) -> dict[str, Any]:
        """What each decode step drafted and what became of it, if that was asked for, once the reply has ended."""
        if not (self._is_traced and self.finish_reason):
            return {}
        return {"spec_trace": [asdict(trace) for trace in self.traces]}

    def _logprobs_by_name(self) -> dict[str, Any]:
        """(log-probability, token, None) of each token, and of the likeliest in its place, if they were asked for."""
        told: dict[str, Any] = {}
        if self.prompt_logprobs is not None:
            told |= named_logprobs("input", self.prompt, self.prompt_logprobs)
        if self.has_logprobs:
            told |= named_logprobs("output", self.tokens, self.logprobs)
        return told

    def _decode(self, *, is_last: bool) -> None:
        before = self._decoded(self.tokens[self._decoded_start : self._decoded_end])
        now = self._decoded(self.tokens[self._decoded_start :])
        if now.endswith(INCOMPLETE) and not is_last:
            return
        self.text += now[len(before) :]
        self._decoded_start, self._decoded_end = self._decoded_end, len(self.tokens)

    def _cut_at_stop_string(self) -> bool:
        found = [(self.text.find(stop, self._num_released), stop) for stop in self._stop]
        found = [(position, stop) for position, stop in found if position >= 0]
        if not found:
            return False
        position, stop = min(found)
        self.text = self.text[:position]
        self.finish_reason = {"type": "stop", "matched": stop}
        return True

    def _release(self) -> str:
        end = len(self.text) if self.finish_reason else len(self.text) - self._num_held_back()
        released = self.text[self._num_released : end]
        self._num_released = max(end, self._num_released)
        return released

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that some stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self.text) - self._num_released), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0


def named_logprobs(kind: str, tokens: list[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
    """As SGLang tells them; kind: input or output."""
    own = [(logprob and logprob.value, token, None) for token, logprob in zip(tokens, logprobs, strict=True)]
    best = [logprob and [(value, token, None) for token, value in logprob.top] for logprob in logprobs]
    return {f"{kind}_token_logprobs": own, f"{kind}_top_logprobs": best}
