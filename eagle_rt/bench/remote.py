"""Measuring a running server over HTTP."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from eagle_rt.bench.workload import Workload

TIMEOUT_SECONDS = 600


def measure_server(
    base_url: str, workload: Workload, batch_size: int, sampling_params: dict[str, Any], api_key: str | None
) -> dict[str, Any]:
    """`batch_size` prompts in flight at a time, through /generate. There is no speed-up here: a server has one setting.

    Raises:
        requests.RequestException: the server cannot be reached or refuses.
    """
    session = requests.Session()
    if api_key:
        session.headers["Authorization"] = f"Bearer {api_key}"

    def ask(prompt: list[int]) -> dict[str, Any]:
        body = {"input_ids": prompt, "sampling_params": sampling_params}
        response = session.post(f"{base_url}/generate", json=body, timeout=TIMEOUT_SECONDS)
        response.raise_for_status()
        return response.json()["meta_info"]

    ask(workload.prompts[0])
    start = time.perf_counter()
    with ThreadPoolExecutor(batch_size) as pool:
        infos = list(pool.map(ask, workload.prompts))
    seconds = time.perf_counter() - start
    num_tokens = sum(info["completion_tokens"] for info in infos)
    num_steps = sum(info["spec_verify_ct"] for info in infos)
    num_accepted = sum(info["spec_accept_token_num"] for info in infos)
    return {
        "batch_size": batch_size,
        "tokens_per_second": round(num_tokens / seconds, 1),
        "mean_accepted_tokens": round(1 + num_accepted / num_steps, 3) if num_steps else 0.0,
        "num_tokens": num_tokens,
    }
