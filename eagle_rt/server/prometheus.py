"""The engine's totals as Prometheus metrics; the speculation counters have the names that vLLM and llama-server share."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_rt.engine.metrics import EngineMetrics
from eagle_rt.speculate.acceptance import Calibration

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
            "spec_decode_num_undrafted": ("Decode steps of a request for which nothing was drafted.", metrics.num_undrafted),
            "spec_decode_num_accepted_tokens": ("Drafted tokens that the target confirmed.", metrics.num_accepted_tokens),
            "spec_decode_num_broken_drafts": (
                "Steps without a draft, because the head gave no numbers.",
                metrics.num_broken_drafts,
            ),
            "steps": ("Engine steps.", metrics.num_steps),
            "prompt_tokens": ("Prompt tokens processed.", metrics.num_prompt_tokens),
            "cached_prompt_tokens": ("Prompt tokens found in the prefix cache.", metrics.num_cached_prompt_tokens),
            "generation_tokens": ("Tokens generated.", metrics.num_generated_tokens),
            "requests_finished": ("Requests that ended by themselves.", metrics.num_finished),
            "requests_aborted": ("Requests that were given up, by their clients as a rule.", metrics.num_aborted),
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
        calibration = metrics.calibration
        if calibration:
            gauges |= {
                "spec_decode_brier_score": ("Mean squared error of the estimated acceptance.", calibration.brier_score),
                "spec_decode_raw_brier_score": ("The same of the head's sharpened probabilities.", calibration.raw_brier_score),
            }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"{PREFIX}:{name}", text, value=value)
        if calibration:
            yield from reliability(calibration)


def reliability(calibration: Calibration) -> Iterator[Metric]:
    """By estimated acceptance in tenths: nodes verified, the sum of their estimates, and how many were accepted."""
    columns = {
        "spec_decode_estimated_nodes": ("Verified nodes by estimated acceptance.", calibration.counts),
        "spec_decode_estimated_acceptance": ("The sum of those estimates.", calibration.predicted),
        "spec_decode_estimated_accepted": ("How many of those nodes were accepted.", calibration.accepted),
    }
    for name, (text, values) in columns.items():
        family = CounterMetricFamily(f"{PREFIX}:{name}", text, labels=["tenth"])
        for tenth, value in enumerate(values):
            family.add_metric([str(tenth)], value)
        yield family
