"""Prometheus metrics of the front process: vLLM's names where one exists, in a registry of their own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from contracts.timings import BOUNDS_S
from stages.service import Service

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKEN_S = (
    *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0),
)
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))

# Stage values that vLLM has a name for, and how those of several LM stages become one series.
_VLLM_GAUGES: dict[str, tuple[str, Callable[[Iterable[float]], float]]] = {
    "num_requests_running": ("Requests being computed.", sum),
    "num_requests_waiting": ("Requests waiting to be scheduled.", sum),
    "kv_cache_usage_perc": ("Share of the KV cache in use, 1 = all of it.", max),
}
_VLLM_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests preempted for want of KV blocks.",
}

TIMING_TEXTS = {
    "stage_queue_seconds": "From an order's or a chunk's coming to the step that takes it up.",
    "stage_step_seconds": "One step of the stage.",
    "edge_credit_wait_seconds": "Sends that found the edge full.",
    "edge_copy_seconds": "The sender's copy into the edge.",
    "edge_delivery_seconds": "From a chunk's sending to its receiving.",
}


class PerToken(Collector):
    """What is observed at every token, in a tenth of the time of `Histogram.observe`."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts = [0] * (len(_TOKEN_S) + 1)
        self._total_s = 0.0
        self._num_tokens = 0

    def between_tokens(self, seconds: float) -> None:
        self._counts[bisect_left(_TOKEN_S, seconds)] += 1
        self._total_s += seconds

    def generated(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        labels = ["model_name"]
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=labels)
        tokens.add_metric([self._model], self._num_tokens)
        yield tokens
        times = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between tokens of a sample.", labels=labels
        )
        buckets = zip((*map(str, _TOKEN_S), "+Inf"), accumulate(self._counts), strict=True)
        times.add_metric([self._model], list(buckets), self._total_s)
        yield times


class StageCollector(Collector):
    """Reads the stages' latest values when scraped; nothing is copied between scrapes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._model = service.card.names[0]

    def describe(self) -> Iterable[Metric]:
        return ()  # names are only known when scraped

    def collect(self) -> Iterable[Metric]:
        by_name: dict[str, dict[str, float]] = {}
        for stage, values in self._service.stats().items():
            for name, value in values.items():
                by_name.setdefault(name, {})[stage] = value
        yield from self._vllm(by_name)
        for name, by_stage in sorted(by_name.items()):
            yield self._ours(name, by_stage)
        yield from self._timings()

    def _timings(self) -> Iterable[Metric]:
        """`le` counts are cumulative, as Prometheus wants them."""
        families: dict[str, HistogramMetricFamily] = {}
        for timing in self._service.timings():
            labels = ["model_name", "stage"]
            family = families.setdefault(
                timing.name,
                HistogramMetricFamily(f"omnistage:{timing.name}", TIMING_TEXTS[timing.name], labels=labels),
            )
            buckets = zip((*map(str, BOUNDS_S), "+Inf"), accumulate(timing.counts), strict=True)
            family.add_metric([self._model, timing.place], list(buckets), timing.total_s)
        yield from families.values()

    def _vllm(self, by_name: dict[str, dict[str, float]]) -> Iterable[Metric]:
        for name, (text, combine) in _VLLM_GAUGES.items():
            values = by_name.pop(name, {}).values()
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], combine(values) if values else 0.0)
            yield gauge
        for name, text in _VLLM_COUNTERS.items():
            values = (by_name.pop(f"{name}_total", None) or by_name.pop(name, {})).values()
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], sum(values))
            yield counter

    def _ours(self, name: str, by_stage: dict[str, float]) -> Metric:
        family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        metric = family(f"omnistage:{name}", f"Stage value {name}.", labels=["model_name", "stage"])
        for stage, value in by_stage.items():
            metric.add_metric([self._model, stage], value)
        return metric


class Metrics:
    """Counters and histograms of what clients saw. All calls are made on the event loop."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(StageCollector(service))
        model = service.card.names[0]
        self._labels = {"model_name": model}

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=self.registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets).labels(
                model
            )

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of accepted requests.")
        self.per_token = PerToken(model)
        self.registry.register(self.per_token)
        self.ttft_s = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self.accepted_s = histogram(
            "omnistage:time_to_prompt_seconds", "Arrival to a prompt whose media are known.", _TTFT_S
        )
        self.ttfa_s = histogram("omnistage:time_to_first_audio_seconds", "Arrival to first sound.", _TTFT_S)
        self.audio_s = counter("omnistage:audio_seconds", "Seconds of speech handed out.")
        self.speech_cut = counter("omnistage:speech_cut", "Spoken answers ended at their bound.")
        self.speech_mute = counter("omnistage:speech_mute", "Texts of which no sound came.")
        self.transcribed_s = counter("omnistage:transcribed_seconds", "Seconds of sound transcribed.")
        self.tpot_s = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per output token of a request.", _TOKEN_S
        )
        self.e2e_s = histogram("vllm:e2e_request_latency_seconds", "Arrival to the last token.", _E2E_S)
        self.request_prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self.request_generation_tokens = histogram("vllm:request_generation_tokens", "Tokens.", _TOKENS)
        self._success = Counter(
            "vllm:request_success",
            "Finished samples by reason: stop, length, abort (client left), error.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model, reason)  # a series that exists from the start can be rated
        self.open_requests = Gauge(
            "omnistage:api_open_requests", "Held open.", ["model_name"], registry=self.registry
        ).labels(model)
        self._rejected = Counter(
            "omnistage:api_requests_rejected",
            "Requests refused before they were accepted.",
            ["model_name", "status"],
            registry=self.registry,
        )

    def finished(self, reason: str) -> None:
        self._success.labels(self._labels["model_name"], reason).inc()

    def rejected(self, status: int) -> None:
        self._rejected.labels(self._labels["model_name"], str(status)).inc()

    def expose(self) -> bytes:
        return generate_latest(self.registry)
