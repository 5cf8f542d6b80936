"""Log-probabilities of replies in OpenAI's two formats."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle_rt.engine.text import Reply, Told

# What a single token says; of a part of a character that is a replacement character.
TextOf = Callable[[int], str]
# How tokens, of which the texts are given, and their log-probabilities are told, so many characters after the beginning of a reply.
Format = Callable[[TextOf, list[str], Told, int], dict[str, Any]]


class ToldLogprobs:
    """Of one reply, as it grows, and first of its prompt if that has them, too."""

    def __init__(self, reply: Reply, tokenizer: PreTrainedTokenizerBase, tell: Format) -> None:
        self._reply, self._tokenizer, self._tell = reply, tokenizer, tell
        self._num_told = self._offset = 0
        self._has_begun = False

    def more(self) -> dict[str, Any] | None:
        """Of the tokens that have come since the last call; None if nobody has asked."""
        reply, start = self._reply, self._num_told
        if not reply.has_logprobs:
            return None
        tokens, logprobs = reply.tokens[start:], [*reply.logprobs[start:]]
        self._num_told += len(tokens)
        if reply.prompt_logprobs is not None and not self._has_begun:
            tokens, logprobs, self._has_begun = [*reply.prompt, *tokens], [*reply.prompt_logprobs, *logprobs], True
        texts = [self._text_of(token) for token in tokens]
        told = self._tell(self._text_of, texts, logprobs, self._offset)
        self._offset += sum(map(len, texts))
        return told

    def _text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def chat_logprobs(text_of: TextOf, texts: list[str], logprobs: Told, _offset: int) -> dict[str, Any]:
    """Of chat completions, which tell nothing of prompts."""

    def named(text: str, value: float) -> dict[str, Any]:
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    content = [
        {**named(text, own.value), "top_logprobs": [named(text_of(token), value) for token, value in own.top]}
        for text, own in zip(texts, logprobs, strict=True)
        if own
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(text_of: TextOf, texts: list[str], logprobs: Told, offset: int) -> dict[str, Any]:
    """Of text completions."""
    return {
        "tokens": texts,
        "token_logprobs": [own and own.value for own in logprobs],
        "top_logprobs": [own and {text_of(token): value for token, value in own.top} for own in logprobs],
        "text_offset": list(accumulate(map(len, texts), initial=offset))[:-1],
    }
