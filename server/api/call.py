"""Serves any request with a body.

A `Call` is planned on another thread, and again once a missing model is loaded. Use of the key, hold on the model and
answer lie on one stack, which every way out closes, also that of a client that leaves; a stream takes the stack over,
or the exchange itself for an answer that outlives its client. Event loop only.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeAlias

from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from models.errors import InvalidParameter
from server.api.activity import Unplanned
from server.api.answer import Answer, Exchange
from server.api.dialect import ApiContext, Dialect, ModelReady, client_of, context_of, dialect_of, namespace_of
from server.api.embedding import EmbeddingWork
from server.api.errors import ApiError, Code, explain, stopped
from server.api.guard import key_name_of
from server.api.params import Incoming
from server.api.record import Arrival
from server.api.sessions import ascii_text, header_text, resolve_session_id
from server.api.wire import JsonBody, Payload, check_amount, check_messages, parse_object
from server.app.log_events import TextsEmbedded
from server.pool.names import ModelNotLoaded, ModelSource
from server.pool.pool import LOADED

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
MAX_CLIENT_CHARACTERS = 64


@dataclass(frozen=True, eq=False)
class Change:
    """What a checked body asks to be kept."""

    work: Callable[[], Response]
    """Keeps it, on another thread."""
    model = keep_alive_seconds = None


Plan: TypeAlias = Exchange | EmbeddingWork | ModelReady | Change
"""What a body asks for; the model, if any, is loaded and held."""
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
"""An endpoint; raises the errors that `server.api.errors` maps."""
OpenExchange: TypeAlias = Callable[[ApiContext, Incoming], Exchange | ModelReady]
"""Checks a body and renders its prompt, on another thread. Raises the errors that `server.api.errors` maps.

Called again once the model is loaded: before that, changes nothing.
"""


def generate(id_prefix: str, *, may_stream: bool = True) -> Callable[[OpenExchange], Handler]:
    """Makes an endpoint for output; without `may_stream` a body's wish for a stream is ignored."""
    return partial(planned, id_prefix=id_prefix, may_stream=may_stream)


def inspect(describe: Callable[[ApiContext, Incoming], Payload]) -> Handler:
    """Makes an endpoint beyond a key's limits. `describe` works as `OpenExchange`."""
    opened = wraps(describe)(lambda context, incoming: ModelReady(None, describe(context, incoming)))
    return planned(opened, is_limited=False)


def planned(open_plan: Callable[[ApiContext, Incoming], Plan], **options: Any) -> Handler:
    """Makes an endpoint of any plan. `open_plan` works as `OpenExchange`."""

    @wraps(open_plan)
    async def respond(request: Request) -> Response:
        return await Call(request, open_plan, **options).respond()

    return respond


class AnswerStream(EventSourceResponse):
    """Streams frames; calls `on_close` however the stream ends."""

    def __init__(
        self,
        request: Request,
        frames: AsyncIterator[bytes],
        heartbeat: Callable[[], bytes],
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        config, dialect = context_of(request).config, dialect_of(request)
        self._on_close = on_close
        super().__init__(
            _with_error(frames, dialect, request.state.request_id),
            media_type=dialect.stream_media_type,
            ping=config.heartbeat_seconds,
            # Sends heartbeats as bytes, unchanged, like the frames.
            ping_message_factory=heartbeat,  # type: ignore[arg-type]
            shutdown_grace_period=config.drain_seconds,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns when the stream ended or the client left."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Sets no time-out, which costs more than sending: `connections.py` limits slow clients."""
        await send(message)


async def _with_error(frames: AsyncIterator[bytes], dialect: Dialect, request_id: str) -> AsyncIterator[bytes]:
    """Ends with an error frame after any error."""
    try:
        async for frame in frames:
            yield frame
    except Exception as error:  # the border of the process: the status is sent, so the stream must report the error
        yield dialect.error_frame(explain(error, request_id))


@dataclass(eq=False)
class Call:
    """One request with a body, from its arrival to its last byte."""

    _http: Request
    _open_plan: Callable[[ApiContext, Incoming], Plan]
    id_prefix: str = ""
    is_limited: bool = True
    """The key's limits and the server's end count."""
    may_stream: bool = False
    _received: float = field(default_factory=time.monotonic)
    _raw: bytes = b""
    _wants_stream: bool = False
    _loading: ModelSource | None = None
    _charged: Answer | EmbeddingWork | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._context, self._dialect = context_of(self._http), dialect_of(self._http)

    async def respond(self) -> Response:
        """The response, which owns the stack if it is a stream."""
        self._raw = await self._context.read_body(self._http)
        if self.is_limited and self._context.is_draining:
            raise stopped()
        response = None
        try:
            response = await self._unless_disconnected()
            return response
        finally:
            if not isinstance(response, AnswerStream):
                self._stack.close()

    async def _unless_disconnected(self) -> Response:
        task = asyncio.ensure_future(self._respond())
        gone = asyncio.ensure_future(_disconnected(self._http))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            logger.debug("%s: the client left", self._http.state.request_id)
            return Response(status_code=CLIENT_LEFT)
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.gather(gone, task, return_exceptions=True)

    async def _respond(self) -> Response:
        key = self._http.state.key
        if self.is_limited and key is not None:
            usage = self._context.rate_limits.admit(key, self._http.state.answer_headers)
            self._stack.callback(lambda: usage.end(self._charged.num_tokens if self._charged is not None else 0))
        try:
            plan = await self._plan()
        except ModelNotLoaded as error:
            return await self._respond_when_loaded(error.source)
        return await self._respond_to(plan)

    # -------------------------------------------------------------------------------------------------- planning

    async def _plan(self) -> Plan:
        """Raises ModelNotLoaded and the dialect's errors."""
        plan = await self._context.planning.run(client_of(self._http), len(self._raw), self._read)
        if plan.model is not None:
            hold = self._context.pool.try_hold(plan.model)
            if hold is None:
                # The model was unloaded during planning, or lacks the memory that it is due.
                raise ModelNotLoaded(self._context.pool.source_of(plan.model.base_id))
            self._stack.callback(hold.close)
            if plan.keep_alive_seconds is not None:
                hold.member.keep_alive_seconds = plan.keep_alive_seconds
        return plan

    async def _plan_loaded(self, source: ModelSource) -> Plan:
        """Raises PoolError and EngineStopped."""
        http, unplanned = self._http, self._context.activity.unplanned
        request_id = self.id_prefix + http.state.request_id.removeprefix("req_")
        namespace, session_id = http.state.asked_as
        own = namespace, key_name_of(http), session_id, self._received
        while True:
            self._loading = source
            unplanned[waiting := Unplanned(request_id, source.name, http.url.path, *own)] = None
            try:
                hold = await self._context.pool.load(source)
            finally:
                del unplanned[waiting]
            with hold as loaded:
                LOADED.set(loaded.member)
                try:
                    return await self._plan()
                except ModelNotLoaded as error:
                    source = error.source

    def _read(self) -> Plan:
        """Called on another thread."""
        check_amount(self._raw)
        fields, is_finite = parse_object(self._raw)
        self._http.state.asked_as = self._asked_as(fields)
        self._wants_stream = self.may_stream and self._dialect.wants_stream(fields)
        check_messages(fields)
        name = self._http.state.request_id.removeprefix("req_")
        plan = self._open_plan(self._context, Incoming(self._http, fields, self.id_prefix + name))
        if not is_finite:
            # No typed field refused the number, so it is inside an object with unchecked content.
            raise ApiError(Code.INVALID_JSON, "the body holds NaN, Infinity or a number as large, which is not JSON")
        return plan

    def _asked_as(self, fields: Mapping[str, Any]) -> tuple[str, str | None]:
        """The namespace and session of a refusal, as far as known."""
        salt = fields.get("cache_salt")
        try:
            session_id = resolve_session_id(fields, self._http.headers)
        except InvalidParameter:
            session_id = None
        return namespace_of(self._http, salt if isinstance(salt, str) else None), session_id

    # ------------------------------------------------------------------------------------------------- answering

    async def _respond_when_loaded(self, source: ModelSource) -> Response:
        """Loads and responds; a stream begins before a slow load ends, and heartbeats keep it open."""
        loading = asyncio.ensure_future(self._plan_loaded(source))
        # Whoever waits gets the error; a client that has left needs none.
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._stack.callback(loading.cancel)
        limit = self._context.config.heartbeat_seconds if self._wants_stream else None
        await asyncio.wait((loading,), timeout=limit)
        if loading.done():
            return await self._respond_to(loading.result())
        return self._stream(self._frames_when_loaded(loading))

    async def _frames_when_loaded(self, loading: "asyncio.Future[Plan]") -> AsyncIterator[bytes]:
        plan = await loading
        if not isinstance(plan, Exchange):
            assert isinstance(plan, ModelReady), "vectors are not streamed"
            yield bytes(JsonBody(plan.payload).body) + b"\n"
            return
        async for frame in plan.frames(self._begin(plan)):
            yield frame

    async def _respond_to(self, plan: Plan) -> Response:
        if isinstance(plan, ModelReady):
            return JsonBody(plan.payload)
        if isinstance(plan, Change):
            return await self._context.in_turn(self._context.storing, self._http, plan.work)
        if isinstance(plan, EmbeddingWork):
            return await self._compute(plan)
        answer = self._begin(plan)
        if self._wants_stream:
            return self._stream(plan.frames(answer))
        try:
            return JsonBody(await plan.body(answer))
        except Exception:
            answer.is_refused = True
            raise

    def _begin(self, exchange: Exchange) -> Answer:
        """Raises QueueFull and ApiError (429, 503)."""
        http = self._http
        if exchange.request.session_id is not None and (session_id := http.state.asked_as[1]) is not None:
            http.state.answer_headers["x-session-id"] = ascii_text(session_id)
        client = next(iter(header_text(http.headers.get("user-agent", "")).split()), "")[:MAX_CLIENT_CHARACTERS]
        of = key_name_of(http), http.headers.get("traceparent"), client if client.isprintable() else ""
        arrival = Arrival(http.url.path, self._received, *of)
        answer = self._charged = Answer(self._context, arrival, exchange)
        self._stack.callback(answer.close)
        exchange.begun(answer, self._stack)
        return answer

    def _stream(self, frames: AsyncIterator[bytes]) -> Response:
        return AnswerStream(self._http, frames, self._heartbeat, self._stack.close)

    def _heartbeat(self) -> bytes:
        answer = self._charged
        if isinstance(answer, Answer):
            has_begun = any(run.started is not None for run in answer.runs)
            return self._dialect.heartbeat(answer.progress, has_begun=has_begun)
        assert self._loading is not None, "a stream without an answer waits for its model"
        model_id = self._loading.id
        step = self._context.pool.loading.get(model_id, "done")
        return self._dialect.heartbeat(f"loading {model_id}: {step}", has_begun=False)

    async def _compute(self, work: EmbeddingWork) -> Response:
        self._charged = work
        response = await work.run(self._context.running_engine(work.model))
        total_ms = round(1000 * (time.monotonic() - self._received), 1)
        counts, http = (work.model.id, len(work.texts), work.num_tokens, total_ms), self._http
        logger.info(TextsEmbedded(http.state.request_id, http.url.path, *counts, key_name_of(http)))
        return response


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
