"""A load in which nothing is alike, and what of an engine's memory is missing after it."""

import random
import time
from collections import Counter
from typing import Any

import torch

from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.params import SamplingParams

TEMPERATURES = [0.0, 0.7, 1.0]
# More requests are submitted than run, so that some wait; of these one is aborted in so many steps.
SUBMITTED, STEPS_AN_ABORT = 1.25, 50


def mixed_load(core: EngineCore, prompts: list[list[int]], seconds: float, most_tokens: int) -> dict[str, Any]:
    """Requests of all lengths, greedy and sampled, coming, ending and hanging up for so long. most_tokens: of a reply, and of a
    prompt, which is a part of the `prompts`, one after the other.

    missing_pages: of the cache that nobody holds and nobody gets; more_bytes: of the GPU's memory that was taken after the first
    quarter and not given back.
    """
    rng, text = random.Random(0), [token for prompt in prompts for token in prompt]
    num_pages, most_running = core.scheduler.num_available_pages, core.scheduler.limits.max_running
    running: list[str] = []
    reasons: Counter[str] = Counter()
    num_steps = num_tokens = num_submitted = 0
    start, bytes_at_first = time.perf_counter(), None
    while (elapsed := time.perf_counter() - start) < seconds or core.has_work:
        while elapsed < seconds and len(running) < SUBMITTED * most_running:
            first = rng.randrange(len(text))
            sampling = SamplingParams(
                temperature=rng.choice(TEMPERATURES), max_new_tokens=rng.randint(1, most_tokens), ignore_eos=rng.random() < 0.5
            )
            name, num_submitted = str(num_submitted), num_submitted + 1
            core.submit(name, text[first : first + rng.randint(1, most_tokens)], sampling)
            running.append(name)
        if num_steps % STEPS_AN_ABORT == 0 and running:
            name = rng.choice(running)
            reasons["abort"] += core.abort(name) is not None
            running.remove(name)
        for event in core.step():
            num_tokens += len(event.tokens)
            if event.finish_reason:
                reasons[event.finish_reason["type"]] += 1
                running.remove(event.request_id)
        num_steps += 1
        if bytes_at_first is None and elapsed > seconds / 4:
            bytes_at_first = allocated_bytes()
    return {
        "seconds": round(time.perf_counter() - start, 1), "requests": num_submitted, "steps": num_steps,
        "tokens_per_second": round(num_tokens / (time.perf_counter() - start), 1), "ends": dict(reasons),
        "unanswered": len(running), "missing_pages": num_pages - core.scheduler.num_available_pages,
        "more_bytes": allocated_bytes() - (bytes_at_first or 0),
    }  # fmt: skip


def allocated_bytes() -> int:
    """Of the GPU's memory, 0 where there is none."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
