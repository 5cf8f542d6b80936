"""Log-probabilities for the requests that have asked for them."""

from collections.abc import Callable, Sequence
from itertools import islice

from torch import Tensor

from eagle_rt.batch import to_device
from eagle_rt.engine.plan import Chunk
from eagle_rt.engine.request import Request
from eagle_rt.logprobs import Logprobs
from eagle_rt.speculate.logprobs import token_logprobs
from eagle_rt.speculate.step import StepOutcome

# Rows whose logits are made together: of a large vocabulary 64 take some tens of megabytes.
ROWS_AT_ONCE = 64


def want_logprobs(requests: Sequence[Request]) -> bool:
    return any(request.sampling.logprobs is not None for request in requests)


def logprobs_of(requests: Sequence[Request], logits: Tensor, rows: list[list[int]], tokens: list[list[int]]) -> Logprobs:
    """Of the tokens that each request gains, chosen after these rows of logits [T, V]."""
    gains = zip(requests, rows, tokens, strict=True)
    asked = [(request, own, gained) for request, own, gained in gains if request.sampling.logprobs is not None]
    if not asked:
        return {}
    of_tokens = logits[to_device([row for _, own, _ in asked for row in own], logits.device)]
    chosen = [token for _, _, gained in asked for token in gained]
    num_top = [request.sampling.logprobs or 0 for request, _, gained in asked for _ in gained]
    found = iter(token_logprobs(of_tokens, chosen, num_top))
    return {request.id: list(islice(found, len(gained))) for request, _, gained in asked}


def logprobs_of_each(requests: Sequence[Request], logits: Tensor, tokens: list[int]) -> Logprobs:
    """The same where each gains one, after its own row of logits [R, V]."""
    return logprobs_of(requests, logits, [[row] for row in range(len(tokens))], [[token] for token in tokens])


def logprobs_of_prompts(chunks: Sequence[Chunk], hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Logprobs:
    """Of the tokens of their prompts that follow each row of chunks, given the rows' hidden states [T, H]."""
    told: Logprobs = {}
    for chunk, own in zip(chunks, hidden.split([chunk.num_rows for chunk in chunks]), strict=True):
        if chunk.request.wants_prompt_logprobs:
            following = chunk.request.tokens[chunk.start + 1 : chunk.stop + 1]
            told[chunk.request.id] = []
            for first in range(0, len(following), ROWS_AT_ONCE):
                tokens = following[first : first + ROWS_AT_ONCE]
                num_top = [chunk.request.sampling.prompt_logprobs or 0] * len(tokens)
                told[chunk.request.id] += token_logprobs(logits_of(own[first : first + len(tokens)]), tokens, num_top)
    return told


def logprobs_of_trees(requests: Sequence[Request], outcome: StepOutcome, tokens: list[list[int]]) -> Logprobs:
    """The same after the nodes of accepted paths."""
    if not want_logprobs(requests):
        return {}
    batch_size, num_nodes, _ = outcome.logits.shape
    starts, paths = range(0, batch_size * num_nodes, num_nodes), outcome.acceptance.path.tolist()
    rows = [[start + node for node in path if node >= 0] for start, path in zip(starts, paths, strict=True)]
    return logprobs_of(requests, outcome.logits.flatten(0, 1), rows, tokens)
