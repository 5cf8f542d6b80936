"""Log-probabilities of tokens, as plain numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the target held a token to be, and (token, value) of those that it held the likeliest, best first.

    Both are of the model's own logits: before temperature, filters, penalties and biases.
    """

    value: float
    top: list[tuple[int, float]]


# By the id of the request.
Logprobs = dict[str, list[TokenLogprob]]
