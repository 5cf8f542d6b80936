"""Log-probabilities of the tokens that the target has chosen."""

import torch
from torch import Tensor

from eagle_rt.logprobs import TokenLogprob

# What OpenAI's API says of tokens that are hardly possible; JSON has no infinity.
LEAST = -9999.0


def token_logprobs(logits: Tensor, tokens: list[int], num_top: list[int]) -> list[TokenLogprob]:
    """Of R tokens, each chosen after a row of logits [R, V], and of the num_top [R] likeliest in each row."""
    logprobs = torch.log_softmax(logits.float(), dim=1).nan_to_num(nan=LEAST).clamp(min=LEAST)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(max(num_top), logprobs.shape[1]), dim=1)
    rows = zip(own, best.indices.tolist(), best.values.tolist(), num_top, strict=True)
    return [TokenLogprob(value, list(zip(ids[:count], values[:count], strict=True))) for value, ids, values, count in rows]
