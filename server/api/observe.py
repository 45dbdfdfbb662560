"""Metrics for Prometheus and traces for OpenTelemetry, of requests and engines. Event loop only.

Requests are counted at their end; a scrape waits for no worker. A metric with vLLM's meaning has vLLM's name, with
`mlx_serve_` for `vllm:`. Labels and spans never hold a client's text. Spans are named by the conventions for
generative AI. Another thread sends them; an absent collector costs only the spans.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.api.record import OpenRequest, RequestRecord, Told
from server.app.config import StartError
from server.engine.request import EngineStats
from server.pool.served import EnginePort

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from server.engine.request import DraftStats

logger = logging.getLogger(__name__)

PREFIX = "mlx_serve"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
_REQUEST = ("model", "endpoint")


class Metrics:
    """One server's counters."""

    def __init__(self, engines: Callable[[], Mapping[str, EnginePort]], num_slots: int) -> None:
        """`engines` returns loaded models' engines by id."""
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engines, num_slots))
        self._success = self._counter("request_success", "Answers that ended well, by reason.", "finished_reason")
        self._failed = self._counter("request_failure", "Answers that failed or were cancelled, by reason.", "reason")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts, restored ones included.")
        self._generated = self._counter("generation_tokens", "Tokens of answers.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens that were restored, hence not evaluated.")
        self._restored = self._counter("restored_tokens", "Restored prompt tokens, by tier of their state.", "tier")
        self._saved = self._counter("saved_seconds", "Seconds that evaluating the restored tokens would have taken.")
        self._lost = self._counter("lost_tokens", "Prompt tokens evaluated again, by reason.", "reason")
        self._misses = self._counter("cache_misses", "Times that tokens were evaluated again, by reason.", "reason")
        self._queued = self._seconds("request_queue_time", "From a request's arrival to its slot.")
        self._restore = self._seconds("request_restore_time", "Time in which restored state was made live.")
        self._prefill = self._seconds("request_prefill_time", "Time in which a prompt was evaluated.")
        self._first = self._seconds("time_to_first_token", "From a request's arrival to its first text.")
        self._decode = self._seconds("request_decode_time", "From the first token of an answer to its last.")
        self._whole = self._seconds("e2e_request_latency", "From a request's arrival to the end of its answer.")
        self._each = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between the tokens of an answer.", _TOKEN_SECONDS
        )
        self._prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer_sizes = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)

    def tell(self, told: Told) -> None:
        """Counts a request that has ended."""
        if not isinstance(told, RequestRecord):
            return
        first, received = told.first, told.first.arrival.received
        labels = {"model": first.model_id, "endpoint": first.arrival.endpoint}
        if told.failure is None:
            self._success.labels(**labels, finished_reason=first.outcome).inc()
        else:
            self._failed.labels(**labels, reason=told.failure).inc()
        self._whole.labels(**labels).observe(told.total_seconds)
        if first.started is None or told.turn is None:
            return
        self._queued.labels(**labels).observe(max(first.started_at - received, 0.0))
        self._restore.labels(**labels).observe(first.started.restore_ms / 1000)
        if first.first_text_at is not None:
            self._first.labels(**labels).observe(first.first_text_at - received)
        self._note_tokens(labels, told)
        self._note_times(labels, first)
        self._saved.labels(**labels).inc(told.saved_seconds)
        for miss in told.turn.misses:
            self._misses.labels(**labels, reason=miss["reason"]).inc()
            self._lost.labels(**labels, reason=miss["reason"]).inc(miss["lost_tokens"])

    def _note_tokens(self, labels: dict[str, str], record: RequestRecord) -> None:
        counts, tier = record.counts, record.first.tier
        self._prompt.labels(**labels).inc(counts.prompt_tokens)
        self._queries.labels(**labels).inc(counts.prompt_tokens)
        self._hits.labels(**labels).inc(counts.cached_tokens)
        self._generated.labels(**labels).inc(counts.predicted_tokens)
        self._prompt_sizes.labels(**labels).observe(counts.prompt_tokens)
        self._answer_sizes.labels(**labels).observe(counts.predicted_tokens)
        if tier is not None:
            self._restored.labels(**labels, tier=tier).inc(counts.cached_tokens)

    def _note_times(self, labels: dict[str, str], first: OpenRequest) -> None:
        timings = first.timings
        if timings is None or not first.has_ended:
            return
        self._prefill.labels(**labels).observe(timings.prompt_ms / 1000)
        self._decode.labels(**labels).observe(timings.predicted_ms / 1000)
        if timings.predicted_tokens > 1:
            self._each.labels(**labels).observe(timings.predicted_ms / 1000 / (timings.predicted_tokens - 1))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, (*_REQUEST, *labels), registry=self.registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(f"{name}_seconds", text, _SECONDS)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, _REQUEST, registry=self.registry, buckets=tuple(buckets))


class _EngineCollector(Collector):
    """A reloaded model's counters restart at 0."""

    def __init__(self, engines: Callable[[], Mapping[str, EnginePort]], num_slots: int) -> None:
        self._engines = engines
        self._num_slots = num_slots

    def collect(self) -> Iterator[Metric]:
        stats = {model_id: engine.stats() for model_id, engine in self._engines().items()}
        for family, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, read in table:
                metric: GaugeMetricFamily | CounterMetricFamily = family(f"{PREFIX}_{name}", text, labels=("model",))
                for model_id, found in stats.items():
                    metric.add_metric((model_id,), read(found))
                yield metric
        slots = GaugeMetricFamily(f"{PREFIX}_slots", "Slots by activity.", labels=("model", "state"))
        held = GaugeMetricFamily(f"{PREFIX}_state_bytes", "State of past tokens by tier.", labels=("model", "tier"))
        for model_id, found in stats.items():
            requests, cache = found.requests, found.cache
            idle = max(self._num_slots - requests.prefilling - requests.decoding, 0)
            states = {"prefilling": requests.prefilling, "decoding": requests.decoding, "idle": idle}
            for state, number in states.items():
                slots.add_metric((model_id, state), number)
            tiers = {"live": cache.live_bytes, "memory": cache.stored_bytes, "disk": cache.disk_bytes}
            for tier, size in tiers.items():
                held.add_metric((model_id, tier), size)
        yield slots
        yield held
        yield from _draft_counters({model_id: found.drafts for model_id, found in stats.items() if found.drafts})


def _draft_counters(stats: "Mapping[str, DraftStats]") -> Iterator[Metric]:
    names, labels = f"{PREFIX}_spec_decode_num_{{}}_tokens", ("model", "source")
    drafted = CounterMetricFamily(names.format("draft"), "Tokens drafted for answers, by source.", labels=labels)
    accepted = CounterMetricFamily(names.format("accepted"), "Drafted tokens that answers hold.", labels=labels)
    for model_id, found in stats.items():
        for metric, counts in ((drafted, found.drafted), (accepted, found.accepted)):
            for source, count in counts.items():
                metric.add_metric((model_id, source), count)
    yield drafted
    yield accepted


def _used_share(stats: EngineStats) -> float:
    cache = stats.cache
    return (cache.live_bytes + cache.stored_bytes) / cache.budget_bytes if cache.budget_bytes else 0.0


_Read = Callable[[EngineStats], float]
_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("num_requests_running", "Requests that hold a slot.", lambda s: s.requests.prefilling + s.requests.decoding),
    ("num_requests_waiting", "Requests that wait for a slot.", lambda s: s.requests.waiting),
    ("kv_cache_usage_ratio", "Share of the budget for state that is used, 0 to 1.", _used_share),
    ("state_budget_bytes", "Budget for state in memory.", lambda s: s.cache.budget_bytes),
    ("cache_nodes", "Edges of the prefix tries.", lambda s: s.cache.num_nodes),
)
_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("num_preemptions", "Times that a running request had to wait for memory.", lambda s: s.num_preempted),
    ("evictions", "Leaves and snapshots given up for lack of memory.", lambda s: s.cache.num_evictions),
    ("page_ins", "Times that stored state was made live.", lambda s: s.cache.moved.page_ins),
    ("page_outs", "Times that live state left its slot.", lambda s: s.cache.moved.page_outs),
    ("disk_written_bytes", "Bytes of state written to disk.", lambda s: s.cache.moved.disk_written_bytes),
    ("disk_read_bytes", "Bytes of state read from disk.", lambda s: s.cache.moved.disk_read_bytes),
    ("disk_files_gone", "Files missing or damaged when they were read.", lambda s: s.cache.num_disk_files_gone),
)


PROVIDER = "mlx_serve"
PATH = "/v1/traces"
NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
SEND_SECONDS = 5.0
END_SECONDS = 3.0
"""Time to send remaining spans at the server's end."""
_COMPLETIONS = frozenset({"/v1/completions", "/completions", "/completion", "/infill", "/api/generate"})


def check_otlp(url: str) -> None:
    """Raises StartError if spans cannot be sent to `url`."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise StartError(f"--otlp is {url!r}; it must be an address such as http://127.0.0.1:4318")
    try:
        for name in NEEDED:
            importlib.import_module(name)
    except ImportError as error:
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise StartError(f"--otlp needs packages that are not installed: pip install {packages}") from error


class Tracing:
    """Sends one server's spans. Event loop only, except `close`."""

    def __init__(self, url: str, server_name: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # The library would log every batch that an absent collector loses, with a traceback.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        endpoint = url if urlsplit(url).path.strip("/") else url.rstrip("/") + PATH
        version = metadata.version("mlx-serve")
        about = {"service.name": "mlx-serve", "service.version": version, "service.instance.id": server_name}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(_telling(exporter, endpoint)))
        self._tracer = self._provider.get_tracer("mlx-serve", version)

    def tell(self, told: Told) -> None:
        """Makes an ended request's spans."""
        if not isinstance(told, RequestRecord):
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def at(moment: float) -> int:
            """Converts `time.monotonic()` to nanoseconds since 1970."""
            return int(told.ended_at * 1e9) - int((told.ended - moment) * 1e9)

        arrival, error = told.first.arrival, told.first.error
        parent = TraceContextTextMapPropagator().extract({"traceparent": arrival.trace_parent or ""})
        attributes = span_attributes(told)
        name = f"{attributes['gen_ai.operation.name']} {told.first.model_id}"
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=at(arrival.received))
        inside = set_span_in_context(span)
        for phase, start, end in phases(told):
            self._tracer.start_span(phase, inside, start_time=at(start)).end(at(end))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        span.end(at(told.ended))

    def close(self) -> None:
        """Sends the rest within `END_SECONDS`. For any thread."""
        ending = threading.Thread(target=self._provider.shutdown, name="mlx-serve-traces", daemon=True)
        ending.start()
        ending.join(END_SECONDS)


def span_attributes(record: RequestRecord) -> Mapping[str, Any]:
    """The attributes of a request's span."""
    first, counts, turn = record.first, record.counts, record.turn
    request, sampling = first.request, first.request.sampling
    found: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion" if first.arrival.endpoint in _COMPLETIONS else "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": first.model_id,
        "gen_ai.response.model": first.model_id,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": counts.prompt_tokens,
        "gen_ai.usage.output_tokens": counts.predicted_tokens,
        "url.path": first.arrival.endpoint,
        "mlx_serve.cached_tokens": counts.cached_tokens,
        "mlx_serve.evaluated_tokens": counts.evaluated_tokens,
    }
    if request.session_id is not None:
        found["gen_ai.conversation.id"] = request.session_id
    if sampling.seed is not None:
        found["gen_ai.request.seed"] = sampling.seed
    if record.failure is None:
        found["gen_ai.response.finish_reasons"] = (first.outcome,)
    else:
        found["error.type"] = record.failure
    if first.tier is not None:
        found["mlx_serve.tier"] = str(first.tier)
    if turn is not None and turn.miss is not None:
        found["mlx_serve.lost_tokens"] = turn.lost_tokens
        found["mlx_serve.miss"] = turn.miss["reason"]
    return found


def phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Yields phases, with starts and ends as `time.monotonic()`."""
    one, received = record.first, record.first.arrival.received
    if one.started is None:
        yield "queue", received, record.ended
        return
    restored_from = max(received, one.started_at - one.started.restore_ms / 1000)
    first = one.first_text_at if one.first_text_at is not None else record.ended
    yield "queue", received, restored_from
    yield "restore", restored_from, one.started_at
    yield "prefill", one.started_at, first
    if one.first_text_at is not None:
        yield "decode", first, record.ended


def _telling(exporter: "SpanExporter", endpoint: str) -> "SpanExporter":
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Telling(SpanExporter):
        def __init__(self) -> None:
            self._is_away = False

        def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
            result = exporter.export(spans)
            is_away = result is not SpanExportResult.SUCCESS
            if is_away and not self._is_away:
                logger.warning("%s takes no traces; those of requests until it does are lost", endpoint)
            elif self._is_away and not is_away:
                logger.info("%s takes traces again", endpoint)
            self._is_away = is_away
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Telling()
