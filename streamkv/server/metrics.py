"""GET /metrics: the engine's counters and latency histograms in Prometheus' text format.

Owns one registry per application (no process-wide default, so that several applications live in
one process). Knows AsyncEngine.stats() and TokenStream's times, nothing deeper. Invariant: each
name exists from the start, with zeros, while the model is still loading. Names that vLLM has as
well are the same, with the prefix `streamkv:`: existing boards need only the prefix changed.

Of the memory in use the share 1 - kv_cache_tokens_held / (kv_cache_blocks_held *
kv_cache_block_size) is wasted.
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
from .answers import Answers

PREFIX = "streamkv:"

_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E_BUCKETS_S = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)

# Name, the field of EngineStats it shows, what it is.
_GAUGES = (
    ("num_requests_running", "num_requests_running", "sequences that hold a row of the batch"),
    ("num_requests_waiting", "num_requests_waiting", "sequences that wait for a row or blocks"),
    (
        "num_requests_loading",
        "num_requests_loading",
        "of those that wait: for blocks from host memory or disk",
    ),
    ("kv_cache_usage_perc", "kv_cache_usage_perc", "share of KV blocks in use, 1 = all"),
    ("kv_cache_blocks_total", "num_blocks", "KV blocks there are"),
    ("kv_cache_blocks_held", "num_held_blocks", "KV blocks in use; a shared one counts once"),
    ("kv_cache_tokens_held", "num_held_tokens", "tokens in these blocks"),
    ("kv_cache_block_size", "block_size", "tokens that a KV block has room for"),
    ("kv_cache_blocks_pinned", "num_pinned_blocks", "cached KV blocks that are evicted last"),
    ("kv_cache_sessions", "num_sessions", "sessions whose KV blocks are kept"),
    ("kv_host_slots_total", "num_host_slots", "KV blocks that host memory has room for"),
    ("kv_host_slots_used", "num_host_slots_used", "KV blocks in host memory"),
)
_COUNTERS = (
    ("prompt_tokens_total", "prompt tokens of admitted requests"),
    ("generation_tokens_total", "tokens generated"),
    ("num_preemptions_total", "sequences that had to give their blocks back"),
    ("prefix_cache_queries_total", "prompt tokens looked up in the prefix cache"),
    ("prefix_cache_hits_total", "prompt tokens found in the prefix cache"),
    ("kv_blocks_evicted_total", "cached KV blocks that were taken for others"),
    ("kv_blocks_copied_total", "KV blocks copied before a write, as others share them"),
    ("kv_blocks_swapped_out_total", "KV blocks copied to host memory, also on their way to disk"),
    ("kv_blocks_swapped_in_total", "KV blocks copied back from host memory, also from disk"),
    ("kv_copies_failed_total", "copies of KV blocks that failed"),
    ("kv_store_reads_total", "KV blocks read from disk"),
    ("kv_store_writes_total", "KV blocks written to disk"),
    ("kv_store_failures_total", "KV blocks that could not be read or written"),
)
_LABELLED_COUNTERS = (  # and the label's values
    (
        "prefix_cache_hits_by_tier_total",
        "tokens found in the prefix cache by each sequence admitted, by where they were",
        "tier",
        ("device", "host", "disk"),
    ),
    (
        "preemptions_by_mode_total",
        "preemptions, by what became of the KV",
        "mode",
        ("swap", "recompute"),
    ),
    (
        "request_success_total",
        "choices finished, by reason",
        "finished_reason",
        tuple(FinishReason),
    ),
)


class ServerMetrics:
    """The registry of one application."""

    def __init__(self, engine: AsyncEngine, answers: Answers) -> None:
        self._engine = engine
        self._live: dict[TokenStream, None] = {}  # entered, without a first token when last seen
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self.registry.register(_AnswersCollector(answers, engine.model_ids[0]))
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
        for name, field, help_text in _GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            gauge.add_metric([model], getattr(stats, field))
            yield gauge
        for name, help_text in _COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            counter.add_metric([model], getattr(stats, name))
            yield counter
        for name, help_text, label, values in _LABELLED_COUNTERS:
            labels = ["model_name", label]
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=labels)
            counts = getattr(stats, name)
            for value in values:
                counter.add_metric([model, value], counts.get(value, 0))
            yield counter


class _AnswersCollector(Collector):
    """Reads the registry of answers at each scrape."""

    def __init__(self, answers: Answers, model: str) -> None:
        self._answers, self._model = answers, model

    def collect(self) -> Iterator[Metric]:
        answers = self._answers
        for name, value, help_text in (
            ("answers_running", answers.num_running, "answers that have not ended"),
            ("answers_kept", answers.num_kept, "answers that have ended and can be asked for"),
            ("resume_bytes", answers.budget.num_bytes, "bytes of events of resumable answers"),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        name, help_text = "streams_resumed_total", "streams that a reader has gone on with"
        counter = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name"])
        counter.add_metric([self._model], answers.num_resumed)
        yield counter


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
