"""Log-probabilities of replies in OpenAI's two formats."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle_rt.engine.text import Reply
from eagle_rt.logprobs import TokenLogprob


class TokenTexts:
    """What single tokens say; of one that is a part of a character that is a replacement character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __getitem__(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


# How tokens, their texts and log-probabilities are told, so many characters after the beginning of a reply.
Format = Callable[[TokenTexts, list[tuple[int, TokenLogprob]], int], dict[str, Any]]


class ToldLogprobs:
    """Of one reply, as it grows."""

    def __init__(self, reply: Reply, tokenizer: PreTrainedTokenizerBase, tell: Format) -> None:
        self._reply, self._texts, self._tell = reply, TokenTexts(tokenizer), tell
        self._num_told = self._offset = 0

    def more(self) -> dict[str, Any] | None:
        """Of the tokens that have come since the last call; None if nobody has asked."""
        reply, start = self._reply, self._num_told
        if not reply.has_logprobs:
            return None
        told = list(zip(reply.tokens[start:], reply.logprobs[start:], strict=True))
        self._num_told, offset = len(reply.tokens), self._offset
        self._offset += sum(len(self._texts[token]) for token, _ in told)
        return self._tell(self._texts, told, offset)


def chat_logprobs(texts: TokenTexts, told: list[tuple[int, TokenLogprob]], _offset: int) -> dict[str, Any]:
    """Of chat completions."""

    def named(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts[token], "logprob": logprob, "bytes": list(texts[token].encode())}

    content = [{**named(token, own.value), "top_logprobs": [named(*best) for best in own.top]} for token, own in told]
    return {"content": content, "refusal": None}


def completion_logprobs(texts: TokenTexts, told: list[tuple[int, TokenLogprob]], offset: int) -> dict[str, Any]:
    """Of text completions."""
    tokens = [texts[token] for token, _ in told]
    return {
        "tokens": tokens,
        "token_logprobs": [own.value for _, own in told],
        "top_logprobs": [{texts[token]: value for token, value in own.top} for _, own in told],
        "text_offset": [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))],
    }
