"""Traces for OpenTelemetry (`--otlp`): a span for each request, and below it queue, restore, prefill and decode.

Names follow the conventions for generative AI. No span holds text of a prompt or of an answer. Spans are made when an
answer has ended, on the event loop, and sent by a thread of their own; a collector that is away costs spans, nothing
else. Needs the packages of the extra `otlp`, which are imported only where spans are wanted.
"""

import importlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from server.api.answer_figures import AnswerFigures
from server.api.arrival import Arrival
from server.api.session_records import TurnRecord
from server.engine.request import GenerationRequest
from server.errors import StartError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

logger = logging.getLogger(__name__)

PROVIDER = "mlx_serve"
PATH = "/v1/traces"
"""Where collectors take traces, if the address names no path."""
NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
SEND_SECONDS = 5.0
END_SECONDS = 3.0
"""How long the end of the server waits for what is still to be sent."""
_COMPLETIONS = frozenset({"/v1/completions", "/completions", "/completion", "/infill", "/api/generate"})


def check_otlp(url: str) -> None:
    """Raises StartError where spans cannot be sent to `url`."""
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
    """Sends the spans of one server. Event loop only, but for `close`."""

    def __init__(self, url: str, server_name: str) -> None:
        """`url` is a collector's; see `check_otlp`."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # The library tells of a collector that is away with every batch, and with a traceback.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        endpoint = url if urlsplit(url).path.strip("/") else url.rstrip("/") + PATH
        version = metadata.version("mlx-serve")
        about = {"service.name": "mlx-serve", "service.version": version, "service.instance.id": server_name}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(_telling(exporter, endpoint)))
        self._tracer = self._provider.get_tracer("mlx-serve", version)

    def note_ended(
        self,
        arrival: Arrival,
        request: GenerationRequest,
        model_id: str,
        figures: AnswerFigures,
        turn: TurnRecord | None,
    ) -> None:
        """Makes the spans of a request whose answer has ended, with all of its choices."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now, now_ns = time.monotonic(), time.time_ns()

        def at(moment: float) -> int:
            """Returns a reading of `time.monotonic()` as nanoseconds since 1970."""
            return now_ns - int((now - moment) * 1e9)

        operation = "text_completion" if arrival.endpoint in _COMPLETIONS else "chat"
        attributes = _attributes(operation, arrival, request, model_id, figures, turn)
        parent = TraceContextTextMapPropagator().extract({"traceparent": arrival.trace_parent or ""})
        span = self._tracer.start_span(
            f"{operation} {model_id}", parent, SpanKind.SERVER, attributes, start_time=at(arrival.received)
        )
        inside = set_span_in_context(span)
        for name, start, end in _phases(arrival.received, figures, now):
            self._tracer.start_span(name, inside, start_time=at(start)).end(at(end))
        if figures.error is not None:
            span.set_status(Status(StatusCode.ERROR, type(figures.error).__name__))
        span.end(at(now))

    def close(self) -> None:
        """Sends what is left, as far as that takes no longer than `END_SECONDS`. For any thread."""
        ending = threading.Thread(target=self._provider.shutdown, name="mlx-serve-traces", daemon=True)
        ending.start()
        ending.join(END_SECONDS)


def _attributes(
    operation: str,
    arrival: Arrival,
    request: GenerationRequest,
    model_id: str,
    figures: AnswerFigures,
    turn: TurnRecord | None,
) -> Mapping[str, Any]:
    counts, sampling, started = figures.counts, request.sampling, figures.started
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model_id,
        "gen_ai.response.model": model_id,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": counts.prompt,
        "gen_ai.usage.output_tokens": counts.predicted,
        "url.path": arrival.endpoint,
        "mlx_serve.cached_tokens": counts.cached,
        "mlx_serve.evaluated_tokens": counts.evaluated,
    }
    if request.session_id is not None:
        found["gen_ai.conversation.id"] = request.session_id
    if sampling.seed is not None:
        found["gen_ai.request.seed"] = sampling.seed
    if figures.has_ended and figures.outcome is not None:
        found["gen_ai.response.finish_reasons"] = (figures.outcome,)
    else:
        found["error.type"] = type(figures.error).__name__ if figures.error is not None else "cancelled"
    if started is not None and started.tier is not None:
        found["mlx_serve.tier"] = str(started.tier)
    if turn is not None and turn.miss is not None:
        found["mlx_serve.lost_tokens"] = turn.lost_tokens
        found["mlx_serve.miss"] = turn.miss.reason.value
    return found


def _phases(received: float, figures: AnswerFigures, now: float) -> Iterator[tuple[str, float, float]]:
    """Yields name, start and end of each phase, as readings of `time.monotonic()`."""
    if figures.started is None:
        yield "queue", received, now
        return
    slot_at = figures.started_at
    restored_from = max(received, slot_at - figures.started.restore_ms / 1000)
    first = figures.first_text_at if figures.first_text_at is not None else now
    yield "queue", received, restored_from
    yield "restore", restored_from, slot_at
    yield "prefill", slot_at, first
    if figures.first_text_at is not None:
        yield "decode", first, now


def _telling(exporter: "SpanExporter", endpoint: str) -> "SpanExporter":
    """Returns an exporter that says once that its collector does not answer, and once that it does again."""
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
