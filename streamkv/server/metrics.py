"""GET /metrics: the engine's counters and latency histograms in Prometheus' text format.

Owns one registry per application (no process-wide default, so that several applications live in
one process). Knows AsyncEngine.stats() and TokenStream's times, nothing deeper. Invariant: each
name exists from the start, with zeros, while the model is still loading. Names are the field's,
with the prefix `streamkv:`, so that existing boards need only the prefix changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route

from ..engine.async_engine import AsyncEngine
from ..engine.stream import TokenStream
from ..protocol import FinishReason

PREFIX = "streamkv:"

_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E_BUCKETS_S = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)

_GAUGES = {
    "num_requests_running": "sequences that hold a row of the batch",
    "num_requests_waiting": "sequences that wait for a row or for blocks",
    "kv_cache_usage_perc": "share of KV blocks held by sequences, 1 = all",
}
_COUNTERS = {
    "prompt_tokens_total": "prompt tokens of admitted requests",
    "generation_tokens_total": "tokens generated",
    "num_preemptions_total": "sequences that had to give their blocks back",
    "prefix_cache_queries_total": "prompt tokens looked up in the prefix cache",
    "prefix_cache_hits_total": "prompt tokens found in the prefix cache",
}


class ServerMetrics:
    """The registry of one application."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._live: dict[TokenStream, None] = {}  # entered, without a first token when last seen
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "arrival to first token", _TTFT_BUCKETS_S
        )
        self._e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "arrival to last token", _E2E_BUCKETS_S
        )
        for model in engine.model_ids:  # the series exist before the first request
            self._time_to_first_token.labels(model)
            self._e2e_latency.labels(model)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            PREFIX + name, help_text, ["model_name"], registry=self.registry, buckets=buckets
        )

    def text(self) -> bytes:
        """All of it in the text format."""
        for stream in list(self._live):
            self._observe_first_token(stream)
        return generate_latest(self.registry)

    def begin(self, stream: TokenStream) -> None:
        """Watch a stream that was entered."""
        self._live[stream] = None

    def end(self, stream: TokenStream) -> None:
        """Count the times of a stream that is left; one cut short counts as far as it came."""
        self._observe_first_token(stream)
        self._live.pop(stream, None)
        if stream.arrival_s is not None and stream.finish_s is not None:
            latency_s = stream.finish_s - stream.arrival_s
            self._e2e_latency.labels(stream.model).observe(latency_s)

    def _observe_first_token(self, stream: TokenStream) -> None:
        """Once per stream: when it is left, or at a scrape if that comes first."""
        if stream.arrival_s is None or stream.first_token_s is None or stream not in self._live:
            return
        del self._live[stream]
        self._time_to_first_token.labels(stream.model).observe(
            stream.first_token_s - stream.arrival_s
        )


class _EngineCollector(Collector):
    """Reads AsyncEngine.stats() at each scrape, on the event-loop thread."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats, model = self._engine.stats(), self._engine.model_ids[0]
        for name, help_text in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            gauge.add_metric([model], getattr(stats, name))
            yield gauge
        for name, help_text in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            counter.add_metric([model], getattr(stats, name))
            yield counter
        success = CounterMetricFamily(
            PREFIX + "request_success_total",
            "choices finished, by reason",
            labels=["model_name", "finished_reason"],
        )
        for reason in FinishReason:
            success.add_metric([model, reason], stats.request_success_total.get(reason, 0))
        yield success


@asynccontextmanager
async def observed(
    metrics: ServerMetrics, stream: AbstractAsyncContextManager[TokenStream]
) -> AsyncIterator[TokenStream]:
    """Enter `stream` and count its times."""
    async with stream as entered:
        metrics.begin(entered)
        try:
            yield entered
        finally:
            metrics.end(entered)


def metrics_of(request: HTTPConnection) -> ServerMetrics:
    metrics: ServerMetrics = request.app.state.metrics
    return metrics


async def get_metrics(request: Request) -> Response:
    return Response(metrics_of(request).text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


routes = [Route("/metrics", get_metrics, methods=["GET"])]
