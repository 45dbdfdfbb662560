"""Metrics for Prometheus and traces for OpenTelemetry, of requests and engines. Event loop only.

Requests are counted at their end; a scrape waits for no worker. A metric with vLLM's meaning has vLLM's name, with
`mlx_serve_` for `vllm:`. Labels and spans never hold a client's text. Spans are named by the conventions for
generative AI. Another thread sends them; an absent collector costs only the spans.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.api.record import RequestRecord
from server.app.config import StartError
from server.engine.engine import Engine
from server.engine.request import EngineStats

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

PREFIX = "mlx_serve"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
_REQUEST = ("model", "endpoint")


_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "request_queue_time_seconds": ("From a request's arrival to its slot.", _SECONDS),
    "request_restore_time_seconds": ("Time in which restored state was made live.", _SECONDS),
    "request_prefill_time_seconds": ("Time in which a prompt was evaluated.", _SECONDS),
    "time_to_first_token_seconds": ("From a request's arrival to its first text.", _SECONDS),
    "request_decode_time_seconds": ("From the first token of an answer to its last.", _SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to the end of its answer.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean time between the tokens of an answer.", _TOKEN_SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", _TOKENS),
}
_COUNTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "request_success": ("Answers that ended well, by reason.", ["finished_reason"]),
    "request_failure": ("Answers that failed or were cancelled, by reason.", ["reason"]),
    "prompt_tokens": ("Tokens of prompts, restored ones included.", []),
    "generation_tokens": ("Tokens of answers.", []),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", []),
    "prefix_cache_hits": ("Prompt tokens that were restored, hence not evaluated.", []),
    "restored_tokens": ("Restored prompt tokens, by tier of their state.", ["tier"]),
    "rounded_tokens": ("Restored prompt tokens whose state was stored in 8 bits.", []),
    "saved_seconds": ("Seconds that evaluating the restored tokens would have taken.", []),
    "healed_tokens": ("Prompt tokens restored since a prompt was shown otherwise than sent.", []),
    "lost_tokens": ("Prompt tokens evaluated again, by reason.", ["reason"]),
    "cache_misses": ("Times that tokens were evaluated again, by reason.", ["reason"]),
    "tool_calls": ("Calls in answers, by the model's format and what became of them.", ["format", "outcome"]),
}


class Metrics:
    """One server's counters."""

    def __init__(self, engines: Callable[[], Mapping[str, Engine]], num_slots: int) -> None:
        """`engines` returns loaded models' engines by id."""
        self.registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(engines, num_slots))
        self._counters = {
            name: Counter(f"{PREFIX}_{name}", text, (*_REQUEST, *labels), registry=registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"{PREFIX}_{name}", text, _REQUEST, registry=registry, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def tell(self, record: RequestRecord) -> None:
        """Counts a request that has ended."""
        labels = (record.first.model_id, record.first.arrival.endpoint)
        for name, value in _observed(record):
            self._histograms[name].labels(*labels).observe(value)
        for name, value, *of in _counted(record):
            self._counters[name].labels(*labels, *of).inc(value)


def _observed(record: RequestRecord) -> Iterator[tuple[str, float]]:
    first, received = record.first, record.first.arrival.received
    yield "e2e_request_latency_seconds", record.total_seconds
    if first.started is None:
        return
    yield "request_queue_time_seconds", max(first.started_at - received, 0.0)
    yield "request_restore_time_seconds", first.started.restore_ms / 1000
    yield "request_prompt_tokens", record.turn.prompt_tokens
    yield "request_generation_tokens", record.turn.completion_tokens
    if first.first_text_at is not None:
        yield "time_to_first_token_seconds", first.first_text_at - received
    if first.timings is not None:
        yield "request_prefill_time_seconds", first.timings.prompt_ms / 1000
        yield "request_decode_time_seconds", first.timings.predicted_ms / 1000
        if first.timings.token_ms is not None:
            yield "request_time_per_output_token_seconds", first.timings.token_ms / 1000


def _counted(record: RequestRecord) -> Iterator[tuple[str, float, *tuple[str, ...]]]:
    """Yields a counter's name, how much is added, and values of its own labels."""
    turn = record.turn
    yield ("request_success", 1, turn.finish) if record.failure is None else ("request_failure", 1, record.failure)
    if record.first.started is None:
        return
    yield "prompt_tokens", turn.prompt_tokens
    yield "prefix_cache_queries", turn.prompt_tokens
    yield "prefix_cache_hits", turn.cached_tokens
    yield "generation_tokens", turn.completion_tokens
    yield "saved_seconds", record.saved_seconds
    if turn.tier is not None:
        yield "restored_tokens", turn.cached_tokens, turn.tier
    if turn.rounded_tokens:
        yield "rounded_tokens", turn.rounded_tokens
    if turn.healed is not None:
        yield "healed_tokens", turn.healed.saved_tokens
    for miss in turn.misses:
        yield "cache_misses", 1, miss.reason
        yield "lost_tokens", miss.lost_tokens, miss.reason
    for one in record.choices:
        name, outcomes = one.tool_calls
        for outcome, count in outcomes.items():
            yield "tool_calls", count, name, outcome


def _used_share(stats: EngineStats) -> float:
    cache = stats.cache
    return (cache.live_bytes + cache.stored_bytes) / cache.budget_bytes if cache.budget_bytes else 0.0


def _tiers(stats: EngineStats) -> Mapping[str, float]:
    return {"live": stats.cache.live_bytes, "memory": stats.cache.stored_bytes, "disk": stats.cache.disk_bytes}


def _drafts(count: str) -> "_Read":
    return lambda stats: getattr(stats.drafts, count, {})


_Read: TypeAlias = Callable[[EngineStats], float | Mapping[str, float]]
_ENGINE_GAUGES: Sequence[tuple[str, str, str, _Read]] = (
    ("num_requests_running", "Requests that hold a slot.", "", lambda s: s.requests.prefilling + s.requests.decoding),
    ("num_requests_waiting", "Requests that wait for a slot.", "", lambda s: s.requests.waiting),
    ("kv_cache_usage_ratio", "Share of the budget for state that is used, 0 to 1.", "", _used_share),
    ("state_budget_bytes", "Budget for state in memory.", "", lambda s: s.cache.budget_bytes),
    ("state_bytes", "State of past tokens by tier.", "tier", _tiers),
    ("cache_nodes", "Edges of the prefix tries.", "", lambda s: s.cache.num_nodes),
)
_ENGINE_COUNTERS: Sequence[tuple[str, str, str, _Read]] = (
    ("num_preemptions", "Times that a running request had to wait for memory.", "", lambda s: s.num_preempted),
    ("evictions", "Leaves and snapshots given up for lack of memory.", "", lambda s: s.cache.num_evictions),
    ("page_ins", "Times that stored state was made live.", "", lambda s: s.cache.moved.page_ins),
    ("page_outs", "Times that live state left its slot.", "", lambda s: s.cache.moved.page_outs),
    ("disk_written_bytes", "Bytes of state written to disk.", "", lambda s: s.cache.moved.disk_written_bytes),
    ("disk_read_bytes", "Bytes of state read from disk.", "", lambda s: s.cache.moved.disk_read_bytes),
    ("engine_stuck", "Times that a step of the engine was taken for a hang.", "", lambda s: s.num_stuck),
    ("encoded_images", "Images for which a vision tower was evaluated.", "", lambda s: s.num_encoded),
    ("disk_files_gone", "Files evicted, cleared, replaced or damaged.", "", lambda s: s.cache.num_disk_files_gone),
    ("spec_decode_num_draft_tokens", "Tokens drafted for answers, by source.", "source", _drafts("drafted")),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that answers hold.", "source", _drafts("accepted")),
)


class _EngineCollector(Collector):
    """A reloaded model's counters restart at 0."""

    def __init__(self, engines: Callable[[], Mapping[str, Engine]], num_slots: int) -> None:
        self._engines = engines
        self._num_slots = num_slots

    def collect(self) -> Iterator[Metric]:
        stats = {model_id: engine.stats() for model_id, engine in self._engines().items()}
        slots = ("slots", "Slots by activity.", "state", lambda engine: engine.requests.slots(self._num_slots))
        for family, table in ((GaugeMetricFamily, [*_ENGINE_GAUGES, slots]), (CounterMetricFamily, _ENGINE_COUNTERS)):
            for name, text, label, read in table:
                labels = ("model", label) if label else ("model",)
                metric: GaugeMetricFamily | CounterMetricFamily = family(f"{PREFIX}_{name}", text, labels=labels)
                for model_id, engine in stats.items():
                    values = read(engine)
                    for part, value in values.items() if isinstance(values, Mapping) else [("", values)]:
                        metric.add_metric((model_id, part)[: len(labels)], value)
                yield metric


PROVIDER = "mlx_serve"
PATH = "/v1/traces"
NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
SEND_SECONDS = 5.0
END_SECONDS = 3.0
"""Time to send remaining spans at the server's end."""
_COMPLETIONS = frozenset({"/v1/completions", "/completions", "/completion", "/infill", "/api/generate"})


def check_otlp() -> None:
    """Raises StartError if spans cannot be sent."""
    try:
        for name in NEEDED:
            importlib.import_module(name)
    except ImportError as error:
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise StartError(f"--otlp needs packages that are not installed: pip install {packages}") from error


class Tracing:
    """Sends one server's spans. Event loop only, except `close`."""

    def __init__(self, url: str, server_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # The library would log every batch that an absent collector loses, with a traceback.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        endpoint = url if urlsplit(url).path.strip("/") else url.rstrip("/") + PATH
        version = metadata.version("mlx-serve")
        about = {"service.name": "mlx-serve", "service.version": version, "service.instance.id": server_name}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("mlx-serve", version)

    def tell(self, record: RequestRecord) -> None:
        """Makes an ended request's spans."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def at(moment: float) -> int:
            """Converts `time.monotonic()` to nanoseconds since 1970."""
            return int(record.ended_at * 1e9) - int((record.ended - moment) * 1e9)

        arrival, error = record.first.arrival, record.first.error
        parent = TraceContextTextMapPropagator().extract({"traceparent": arrival.trace_parent or ""})
        attributes = span_attributes(record)
        name = f"{attributes['gen_ai.operation.name']} {record.first.model_id}"
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=at(arrival.received))
        inside = set_span_in_context(span)
        for phase, start, end in phases(record):
            self._tracer.start_span(phase, inside, start_time=at(start)).end(at(end))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        span.end(at(record.ended))

    def close(self) -> None:
        """Sends the rest within `END_SECONDS`. For any thread."""
        ending = threading.Thread(target=self._provider.shutdown, name="mlx-serve-traces", daemon=True)
        ending.start()
        ending.join(END_SECONDS)


def span_attributes(record: RequestRecord) -> Mapping[str, Any]:
    """The attributes of a request's span."""
    first, turn = record.first, record.turn
    request, sampling = first.request, first.request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion" if first.arrival.endpoint in _COMPLETIONS else "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": turn.model,
        "gen_ai.response.model": turn.model,
        "gen_ai.response.id": turn.id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": turn.prompt_tokens,
        "gen_ai.usage.output_tokens": turn.completion_tokens,
        "url.path": first.arrival.endpoint,
        "mlx_serve.cached_tokens": turn.cached_tokens,
        "mlx_serve.evaluated_tokens": turn.evaluated_tokens,
        "gen_ai.conversation.id": request.session_id,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.response.finish_reasons": (turn.finish,) if record.failure is None else None,
        "error.type": record.failure,
        "mlx_serve.tier": turn.tier,
        "mlx_serve.lost_tokens": turn.lost_tokens if turn.miss is not None else None,
        "mlx_serve.miss": turn.miss.reason if turn.miss is not None else None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Yields phases, with starts and ends as `time.monotonic()`."""
    choice, received = record.first, record.first.arrival.received
    if choice.started is None:
        yield "queue", received, record.ended
        return
    restored_from = max(received, choice.started_at - choice.started.restore_ms / 1000)
    first = choice.first_text_at if choice.first_text_at is not None else record.ended
    yield "queue", received, restored_from
    yield "restore", restored_from, choice.started_at
    yield "prefill", choice.started_at, first
    if choice.first_text_at is not None:
        yield "decode", first, record.ended


def _exporter(endpoint: str) -> "SpanExporter":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    class Exporter(OTLPSpanExporter):
        is_away = False

        def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
            result = super().export(spans)
            was_away, self.is_away = self.is_away, result is not SpanExportResult.SUCCESS
            if self.is_away and not was_away:
                logger.warning("%s takes no traces; those of requests until it does are lost", endpoint)
            elif was_away and not self.is_away:
                logger.info("%s takes traces again", endpoint)
            return result

    return Exporter(endpoint=endpoint, timeout=SEND_SECONDS)
