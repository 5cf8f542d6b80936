"""The engine's totals as Prometheus metrics; the speculation counters have the names that vLLM and llama-server share."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_rt.engine.metrics import EngineMetrics

PREFIX = "eagle_rt"


class EngineCollector(Collector):
    """Reads the latest totals whenever it is scraped."""

    def __init__(self, current: Callable[[], EngineMetrics]) -> None:
        self._current = current

    def collect(self) -> Iterator[Metric]:
        metrics = self._current()
        counters = {
            "spec_decode_num_drafts": ("Trees verified, one per request and decode step.", metrics.num_drafts),
            "spec_decode_num_draft_tokens": ("Tokens drafted and verified.", metrics.num_draft_tokens),
            "spec_decode_num_accepted_tokens": ("Drafted tokens that the target confirmed.", metrics.num_accepted_tokens),
            "spec_decode_num_broken_drafts": (
                "Steps without a draft, because the head gave no numbers.",
                metrics.num_broken_drafts,
            ),
            "steps": ("Engine steps.", metrics.num_steps),
            "prompt_tokens": ("Prompt tokens processed.", metrics.num_prompt_tokens),
            "cached_prompt_tokens": ("Prompt tokens found in the prefix cache.", metrics.num_cached_prompt_tokens),
            "generation_tokens": ("Tokens generated.", metrics.num_generated_tokens),
            "requests_finished": ("Requests that ended.", metrics.num_finished),
            "preemptions": ("Requests put back in line for want of cache.", metrics.num_preemptions),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"{PREFIX}:{name}", text, value=value)
        per_position = CounterMetricFamily(
            f"{PREFIX}:spec_decode_num_accepted_tokens_per_pos", "Confirmed drafts by depth.", labels=["position"]
        )
        for position, value in enumerate(metrics.accepted_per_position):
            per_position.add_metric([str(position)], value)
        yield per_position
        seconds = CounterMetricFamily(f"{PREFIX}:step_seconds", "Time by part of the step.", labels=["part"])
        for part, value in metrics.seconds.items():
            seconds.add_metric([part], value)
        yield seconds
        gauges = {
            "requests_running": ("Requests being decoded or read.", metrics.num_running),
            "requests_waiting": ("Requests in line.", metrics.num_waiting),
            "spec_decode_simulated": ("1 where what is accepted is made up, for a benchmark.", int(metrics.is_simulated)),
            "cache_use": ("Share of the cache held by running requests.", metrics.cache_use),
            "mean_accepted_tokens_per_step": ("Tokens per request and decode step, since start.", metrics.mean_accepted_tokens),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"{PREFIX}:{name}", text, value=value)
