"""From plans in plain Python to tensors: the only way from the host to the device."""

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_rt.batch import Batch, HostRows, Slots, slots_at, to_device
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.plan import Chunk
from eagle_rt.engine.request import Request
from eagle_rt.speculate.grammar_masks import GrammarMasks
from eagle_rt.speculate.penalties import Penalties, Strengths
from eagle_rt.speculate.sampler import SamplingBatch
from eagle_rt.speculate.sequences import DecodeSequences, HostCache, HostSequence


def slots_of(pages: list[int], num_rows: int, page_size: int) -> Slots:
    """The slots of a sequence's first `num_rows` rows."""
    num_pages = -(-num_rows // page_size)
    first_page = pages[0]
    if pages[:num_pages] == list(range(first_page, first_page + num_pages)):
        return range(first_page * page_size, first_page * page_size + num_rows)
    return (np.array(pages[:num_pages])[:, None] * page_size + np.arange(page_size)).ravel()[:num_rows]


def sampling_batch(requests: list[Request], device: str) -> SamplingBatch:
    settings, matches = [request.sampling for request in requests], [request.match for request in requests]
    sampled = [row for row, setting in enumerate(settings) if setting.temperature > 0]
    return SamplingBatch(
        temperature=floats(settings, "temperature", device),
        top_k=to_device([max(setting.top_k, 0) for setting in settings], device),
        top_p=floats(settings, "top_p", device),
        min_p=floats(settings, "min_p", device),
        seeds=to_device([request.seed for request in requests], device),
        sampled=to_device(sampled, device, torch.int64),
        has_filters=any(settings[row].top_k > 0 or settings[row].top_p < 1 or settings[row].min_p > 0 for row in sampled),
        penalties=penalties_of(requests, device) if any(setting.has_penalties for setting in settings) else None,
        grammars=GrammarMasks(matches) if any(matches) else None,
    )


def floats(settings: list[SamplingParams], name: str, device: str) -> Tensor:
    """[B] one of their settings, whole numbers too as a kernel takes them."""
    return to_device([getattr(setting, name) for setting in settings], device, torch.float32)


def penalties_of(requests: list[Request], device: str) -> Penalties:
    """Counted anew in every step, so that nothing can put them out of step with the texts."""
    settings, told = [request.sampling for request in requests], [tokens_told_of(request) for request in requests]
    size = max(len(ids) for ids, *_ in told)

    def column(number: int) -> Tensor:
        values = [own[number] for own in told]
        return to_device(np.stack([np.pad(own, (0, size - len(own)), constant_values=own[0]) for own in values]), device)

    strengths = (floats(settings, f"{name}_penalty", device) for name in ("frequency", "presence", "repetition"))
    return Penalties(column(0), column(1), column(2), column(3), Strengths(*strengths))


def tokens_told_of(request: Request) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """The tokens that a request's settings tell something of, at least one; how often its reply has said each, whether its text
    has, and the bias of each."""
    setting, tokens = request.sampling, request.tokens
    start = 0 if setting.repetition_penalty != 1 else request.num_prompt_tokens
    text = tokens[start:] if setting.has_penalties else []
    biased = [token for token, _ in setting.logit_bias]
    ids, places = np.unique([*text, *biased, tokens[-1]], return_inverse=True)
    counts = np.bincount(places[request.num_prompt_tokens - start : len(text)], minlength=len(ids))
    is_seen, bias = np.zeros(len(ids), dtype=np.bool_), np.zeros(len(ids), dtype=np.float32)
    is_seen[places[: len(text)]] = True
    bias[places[len(text) : -1]] = [own for _, own in setting.logit_bias]
    return ids, counts, is_seen, bias


def decode_sequences(requests: tuple[Request, ...], num_scratch: int, page_size: int, device: str) -> DecodeSequences:
    """The sequences of a decode step, each with `num_scratch` rows past its cached ones."""
    num_cached = tuple(request.num_cached for request in requests)
    rows = tuple(slots_of(request.pages, request.num_cached + num_scratch, page_size) for request in requests)
    scratch = [slots_at(own, np.arange(cached, cached + num_scratch)) for own, cached in zip(rows, num_cached, strict=True)]
    return DecodeSequences(
        root_tokens=to_device([request.tokens[-1] for request in requests], device),
        positions=to_device(num_cached, device),
        cache=HostCache(num_cached, rows),
        scratch_slots=to_device(np.stack(scratch), device),
        state_rows=to_device([request.state_row for request in requests], device),
        sampling=sampling_batch(list(requests), device),
    )


def host_sequences(requests: tuple[Request, ...], num_scratch: int, page_size: int) -> list[HostSequence]:
    """The same for a step that the host decides on."""
    return [
        HostSequence(
            request.id,
            request.tokens,
            slots_of(request.pages, request.num_cached + num_scratch, page_size),
            request.sampling.temperature,
            request.bounds,
            request.state_row or 0,
        )
        for request in requests
    ]


def prefilled_sequence(chunk: Chunk, next_token: int, page_size: int) -> HostSequence:
    """A text up to the end of a chunk, and the token after it."""
    request = chunk.request
    rows = slots_of(request.pages, chunk.stop, page_size)
    return HostSequence(request.id, [*request.tokens[: chunk.stop], next_token], rows, request.sampling.temperature, request.bounds)


def prefill_batch(chunks: tuple[Chunk, ...], page_size: int, device: str) -> Batch:
    """All chunks side by side in one causal pass."""
    rows = tuple(slots_of(chunk.request.pages, chunk.stop, page_size) for chunk in chunks)
    places = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
    slots = np.concatenate([slots_at(own, own_places) for own, own_places in zip(rows, places, strict=True)])
    return Batch(
        tokens=to_device([token for chunk in chunks for token in chunk.request.tokens[chunk.start : chunk.stop]], device),
        positions=to_device(np.concatenate(places), device),
        slots=to_device(slots, device),
        query_starts=tuple(accumulate(map(len, places), initial=0)),
        rows=HostRows(tuple(chunk.stop for chunk in chunks), rows),
        tree_mask=None,
        state_rows=to_device([chunk.request.state_row for chunk in chunks], device),
        saves=tuple((b, count, row) for b, chunk in enumerate(chunks) for count, row in chunk.saves),
    )
