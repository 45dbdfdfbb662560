"""Serves a request of any generation endpoint around its dialect: body, planning, model, engine, answer,
disconnect.

A request is planned on another thread, where its model is looked up by name. If the model is not loaded, planning
ends with ModelNotLoaded; the model is loaded and the request planned again. The model is held, so it is not unloaded,
while the request is planned and answered. A dialect frames the stream; heartbeats, errors after the start and the
client's disconnect are handled here. Event loop only.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from models.prompt.chat_template import RenderedPrompt
from server.api.answer import Answer, AnswerInParts, Choices, ChoicesAnswer
from server.api.context import ApiContext, context_of
from server.api.conversation import Conversation, next_turn_requests, sent_back
from server.api.dialect import Dialect, Exchange, ModelReady, Payload, dialect_of
from server.api.errors import explain, stopped
from server.api.guard import key_name_of, known_key_of, namespace_of
from server.api.live.activity import Arrival
from server.api.params import Incoming
from server.api.rate_limits import Permit
from server.api.session_id import SessionIdError, ascii_text
from server.api.sessions import Origin
from server.api.wire import JsonBody, check_amount, check_messages, not_finite, parse_object, read_body
from server.app.log_events import TextsEmbedded
from server.engine.commands import HoldTurn
from server.pool.errors import ModelNotLoaded
from server.pool.members import ModelHold
from server.pool.pool import ModelPool
from server.pool.served import EnginePort, ServedModel

logger = logging.getLogger(__name__)

Planned = TypeVar("Planned")


@dataclass(frozen=True, eq=False)
class InUse(Generic[Planned]):
    """A planned request and its hold on a model; None as hold if the request needs no model any more."""

    planned: Planned
    hold: ModelHold | None = None

    def close(self) -> None:
        """Releases the model."""
        if self.hold is not None:
            self.hold.close()


async def plan_held(
    pool: ModelPool,
    plan: Callable[[], Awaitable[Planned]],
    model_of: Callable[[Planned], ServedModel | None],
    hold: ModelHold | None = None,
) -> InUse[Planned]:
    """Returns the result of `plan`, with its model loaded and held.

    `model_of` returns the model that a result needs, if any. `hold` is a hold that the caller already has; it is
    closed here unless it is returned. Raises what `plan` raises, PoolError and EngineStopped.
    """
    try:
        while True:
            try:
                planned = await plan()
            except ModelNotLoaded as error:
                if hold is not None:
                    hold.close()
                hold = None
                hold = await pool.load(error.source)
                continue
            model = model_of(planned)
            if model is not None and (hold is None or hold.model is not model):
                if hold is not None:
                    hold.close()
                hold = pool.try_hold(model)
                if hold is None:
                    # The model was unloaded during planning, or lacks memory that it has lent: plan again.
                    hold = await pool.load(pool.source_of(model.base_id))
                    continue
            if model is None and hold is not None:
                hold.close()
            return InUse(planned, hold)
    except BaseException:
        if hold is not None:
            hold.close()
        raise


class LoadingUse(Generic[Planned]):
    """A request whose model is being loaded; the caller waits for it or gives it up."""

    def __init__(self, pool: ModelPool, error: ModelNotLoaded, work: Awaitable[InUse[Planned]]) -> None:
        """`work` waits for the model named by `error`."""
        self._pool = pool
        self._model_id = error.source.id
        self._task = asyncio.ensure_future(work)
        self._is_taken = False

    @property
    def progress(self) -> str:
        """A few words on how far loading is."""
        return f"loading {self._model_id}: {self._pool.loading.get(self._model_id, 'done')}"

    async def is_done_within(self, seconds: float | None) -> bool:
        """Waits; returns whether loading ended, successfully or not."""
        done, _ = await asyncio.wait((self._task,), timeout=seconds)
        return bool(done)

    async def result(self) -> InUse[Planned]:
        """Returns the planned request, which the caller must close; raises the error that prevented it."""
        found = await asyncio.shield(self._task)
        self._is_taken = True
        return found

    def close(self) -> None:
        """Gives up waiting, unless the result was taken."""
        if self._is_taken:
            return
        if not self._task.cancel() and not self._task.cancelled() and self._task.exception() is None:
            self._task.result().close()


class AnswerStream(EventSourceResponse):
    """Streams frames to one client. Calls `on_close` however the stream ends, also after a disconnect."""

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        dialect: Dialect,
        *,
        request_id: str,
        heartbeat_seconds: float,
        drain_seconds: float,
        heartbeat: Callable[[], bytes],
        on_close: Callable[[], None],
    ) -> None:
        """Sends a heartbeat after `heartbeat_seconds` without a frame."""
        self._on_close = on_close
        super().__init__(
            _with_error(frames, dialect, request_id),
            media_type=dialect.stream_media_type,
            ping=heartbeat_seconds,
            # Sends heartbeats as bytes, unchanged, like the frames.
            ping_message_factory=heartbeat,  # type: ignore[arg-type]
            shutdown_grace_period=drain_seconds,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole stream; returns when it ended or the client left."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Sends without a time-out: a scope for one costs more than sending.

        `server/api/connections.py` limits how long a client may leave an answer unread.
        """
        await send(message)


async def _with_error(frames: AsyncIterator[bytes], dialect: Dialect, request_id: str) -> AsyncIterator[bytes]:
    """Yields the frames; after an error of any kind, also one in encoding, yields an error frame."""
    try:
        async for frame in frames:
            yield frame
    except Exception as error:  # the border of the process: the status is sent, so the stream must report the error
        yield dialect.error_frame(explain(error, request_id))


CLIENT_LEFT = 499
"""Status when the client has disconnected; only the access log shows it."""

Result = TypeVar("Result")
Opened: TypeAlias = Exchange | Choices | ModelReady | Payload
OpenExchange: TypeAlias = Callable[[ApiContext, Incoming], Opened]
"""Checks a body and renders its prompt; raises the errors that `server.api.errors` maps. Called on another
thread.

Returns the payload itself if no answer of the model is needed. Called again after the model was loaded, so it must
change nothing before it has found the model.
"""


async def generate(
    request: Request, id_prefix: str, open_exchange: OpenExchange, *, may_stream: bool = True
) -> Response:
    """Serves one request with a body. Raises the errors that `server.api.errors` maps; a disconnect is not an
    error.

    `id_prefix` starts the dialect's answer ids. `may_stream` is False for an endpoint that never streams, whatever
    the body says.
    """
    received = time.monotonic()
    context = context_of(request)
    raw = await read_body(request, context.config.max_body_bytes)
    if context.is_draining:
        raise stopped()
    request.state.may_stream = may_stream
    work = _admitted(context, request, raw, received, id_prefix, open_exchange)
    return await _unless_disconnected(request, work)


async def inspect(request: Request, describe: Callable[[ApiContext, Incoming], Payload]) -> Response:
    """Answers from the body and its model; `describe` runs on another thread and no engine is used.

    Raises the errors of `describe` and those that `server.api.errors` maps; a disconnect is not an error.
    """
    context = context_of(request)
    raw = await read_body(request, context.config.max_body_bytes)

    async def described() -> Response:
        work = partial(_decoded, context, request, raw, "", describe)
        plan = partial(context.planning.run, _client_of(request), len(raw), work)
        found = await plan_held(context.pool, plan, lambda payload: None)
        return JsonBody(found.planned)

    return await _unless_disconnected(request, described())


class Work(Protocol):
    """Work on texts other than generation, such as embedding."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens charged to the key's allowance."""
        ...

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        ...

    @property
    def keep_alive_seconds(self) -> float | None:
        """Seconds that the model stays loaded after its last request; None leaves the setting as it was."""
        ...

    async def run(self, engine: EnginePort) -> Response:
        """Returns the answer."""
        ...


async def compute(request: Request, open_work: Callable[[ApiContext, Incoming], Work]) -> Response:
    """Serves one request that generates nothing, within the limits of its key; a disconnect ends it.

    `open_work` checks the body on another thread. Raises the errors that `server.api.errors` maps.
    """
    context = context_of(request)
    raw = await read_body(request, context.config.max_body_bytes)
    if context.is_draining:
        raise stopped()
    return await _unless_disconnected(request, _computed(context, request, raw, open_work))


async def _computed(
    context: ApiContext, request: Request, raw: bytes, open_work: Callable[[ApiContext, Incoming], Work]
) -> Response:
    permit = context.rate_limits.admit(known_key_of(request), request.state.answer_headers)
    num_tokens, received = 0, time.monotonic()
    try:
        opened = partial(_decoded, context, request, raw, "", open_work)
        plan = partial(context.planning.run, _client_of(request), len(raw), opened)
        use = await plan_held(context.pool, plan, lambda work: work.model)
        work, num_tokens = use.planned, use.planned.num_tokens
        try:
            _keep_alive(use.hold, work.keep_alive_seconds)
            response = await work.run(context.running_engine(work.model))
            logger.info(_embedded(request, work, received))
            return response
        finally:
            use.close()
    finally:
        permit.close(num_tokens)


def _embedded(request: Request, work: Work, received: float) -> TextsEmbedded:
    return TextsEmbedded(
        request_id=request.state.request_id,
        path=request.url.path,
        model=work.model.id,
        num_texts=work.num_texts,
        prompt_tokens=work.num_tokens,
        total_ms=round(1000 * (time.monotonic() - received), 1),
        key=key_name_of(request.scope),
    )


async def _admitted(
    context: ApiContext, request: Request, raw: bytes, received: float, id_prefix: str, open_exchange: OpenExchange
) -> Response:
    permit = context.rate_limits.admit(known_key_of(request), request.state.answer_headers)
    try:
        response = await _answer(context, request, raw, received, id_prefix, open_exchange, permit)
    except BaseException:
        # After any failure, also cancellation, the request no longer runs.
        permit.close(0)
        raise
    if not isinstance(response, AnswerStream):
        permit.close(0)
    return response


async def _answer(
    context: ApiContext,
    request: Request,
    raw: bytes,
    received: float,
    id_prefix: str,
    open_exchange: OpenExchange,
    permit: Permit,
) -> Response:
    work = partial(_decoded, context, request, raw, id_prefix, open_exchange)
    plan = partial(context.planning.run, _client_of(request), len(raw), work)
    try:
        use = await plan_held(context.pool, partial(_loaded_first, plan), _model_of)
    except _Unloaded as unloaded:
        return await _answer_later(context, request, received, plan, unloaded.error, permit)
    return await _answer_now(context, request, use, received, permit)


class _Unloaded(Exception):
    """The request's model must be loaded first; a type of its own, so `plan_held` does not handle it."""

    def __init__(self, error: ModelNotLoaded) -> None:
        super().__init__(str(error))
        self.error = error


async def _loaded_first(plan: Callable[[], Awaitable[Opened]]) -> Opened:
    try:
        return await plan()
    except ModelNotLoaded as error:
        raise _Unloaded(error) from error


def _model_of(opened: Opened) -> ServedModel | None:
    if isinstance(opened, Choices):
        return opened.first.model
    return opened.model if isinstance(opened, Exchange | ModelReady) else None


async def _answer_now(
    context: ApiContext, request: Request, use: InUse[Opened], received: float, permit: Permit
) -> Response:
    opened = use.planned
    if not isinstance(opened, Exchange | Choices):
        return JsonBody(_payload(opened, use))
    begun = _begin(context, request, opened, use, received, permit)
    if not opened.is_streamed:
        return await _whole(begun)
    heartbeat = partial(_heartbeat, dialect_of(request), begun.answer)
    return _stream(context, request, begun.frames(), heartbeat, begun.close)


async def _answer_later(
    context: ApiContext,
    request: Request,
    received: float,
    plan: Callable[[], Awaitable[Opened]],
    error: ModelNotLoaded,
    permit: Permit,
) -> Response:
    """Answers once the model is loaded. If loading takes long, the stream begins earlier and heartbeats keep it
    open.
    """
    work = _plan_loaded(context, plan, error)
    loading = LoadingUse(context.pool, error, work)
    is_streamed = request.state.may_stream and request.state.wants_stream
    try:
        if await loading.is_done_within(context.config.heartbeat_seconds if is_streamed else None):
            return await _answer_now(context, request, await loading.result(), received, permit)
    except BaseException:
        loading.close()
        raise
    later = _LaterStream(context, request, loading, received, permit)
    return _stream(context, request, later.frames(), later.heartbeat, later.close)


async def _plan_loaded(
    context: ApiContext, plan: Callable[[], Awaitable[Opened]], error: ModelNotLoaded
) -> InUse[Opened]:
    hold = await context.pool.load(error.source)
    return await plan_held(context.pool, plan, _model_of, hold)


class _LaterStream:
    """A stream that began before its model was loaded."""

    def __init__(
        self, context: ApiContext, request: Request, loading: LoadingUse[Opened], received: float, permit: Permit
    ) -> None:
        self._context = context
        self._request = request
        self._loading = loading
        self._received = received
        self._permit = permit
        self._answer: AnswerInParts | ChoicesAnswer | None = None
        self._close: Callable[[], None] = lambda: permit.close(0)

    async def frames(self) -> AsyncIterator[bytes]:
        """Yields the stream once the model is loaded; raises the error that prevented loading."""
        use = await self._loading.result()
        opened = use.planned
        if not isinstance(opened, Exchange | Choices):
            yield bytes(JsonBody(_payload(opened, use)).body) + b"\n"
            return
        begun = _begin(self._context, self._request, opened, use, self._received, self._permit)
        self._answer, self._close = begun.answer, begun.close
        async for frame in begun.frames():
            yield frame

    def heartbeat(self) -> bytes:
        """Returns a heartbeat with the progress of loading, later of the answer."""
        dialect = dialect_of(self._request)
        return (
            dialect.early_heartbeat(self._loading.progress)
            if self._answer is None
            else _heartbeat(dialect, self._answer)
        )

    def close(self) -> None:
        """Ends the stream; call it on every way out."""
        self._loading.close()
        self._close()


def _payload(planned: ModelReady | Payload, use: InUse[Opened]) -> Payload:
    try:
        if not isinstance(planned, ModelReady):
            return planned
        _keep_alive(use.hold, planned.keep_alive_seconds)
        return planned.payload
    finally:
        use.close()


def _keep_alive(hold: ModelHold | None, seconds: float | None) -> None:
    if hold is not None and seconds is not None:
        hold.set_keep_alive(seconds)


@dataclass(frozen=True)
class _Begun:
    """A running answer and its format: the caller uses either `frames` or `body`, and calls `close` on every way
    out.
    """

    answer: AnswerInParts | ChoicesAnswer
    frames: Callable[[], AsyncIterator[bytes]]
    body: Callable[[], Awaitable[Payload]]
    close: Callable[[], None]


def _begin(
    context: ApiContext,
    request: Request,
    opened: Exchange | Choices,
    use: InUse[Opened],
    received: float,
    permit: Permit,
) -> _Begun:
    """Submits a request and returns its running answer. Raises QueueFull and ApiError (503)."""
    exchange = opened.first if isinstance(opened, Choices) else opened
    try:
        engine = context.running_engine(exchange.model)
        _keep_alive(use.hold, exchange.keep_alive_seconds)
        if exchange.request.session_id is not None:
            request.state.answer_headers["x-session-id"] = ascii_text(exchange.request.session_id)
        arrival = _arrival(context, request, received)
        if isinstance(opened, Choices):
            answers = ChoicesAnswer(engine, opened, arrival)
            return _begun_choices(context, arrival, opened, answers, engine, permit, use)
        answer = AnswerInParts(engine, opened, arrival)
    except BaseException:
        use.close()
        raise
    return _Begun(
        answer,
        lambda: opened.frames(answer.events()),
        lambda: opened.body(answer.events()),
        partial(_close, context, arrival, answer, engine, permit, use),
    )


def _arrival(context: ApiContext, request: Request, received: float) -> Arrival:
    return Arrival(
        endpoint=request.url.path,
        received=received,
        activity=context.activity,
        on_turn=context.sessions.record,
        conversations=context.conversations,
        key_name=key_name_of(request.scope),
        trace_parent=request.headers.get("traceparent"),
    )


def _note_end(context: ApiContext, arrival: Arrival, answer: Answer, exchange: Exchange) -> None:
    model_id, figures, turn = exchange.model.id, answer.figures, answer.turn
    saved = context.activity.note_counted(model_id, exchange.request.namespace, figures, turn)
    context.metrics.note_ended(model_id, arrival.endpoint, arrival.received, figures, turn, saved)
    if context.tracing is not None:
        context.tracing.note_ended(arrival, exchange.request, model_id, figures, turn)


def _begun_choices(
    context: ApiContext,
    arrival: Arrival,
    choices: Choices,
    answers: ChoicesAnswer,
    engine: EnginePort,
    permit: Permit,
    use: InUse[Opened],
) -> _Begun:
    return _Begun(
        answers,
        lambda: choices.frames(answers.events()),
        lambda: choices.body(answers.events()),
        partial(_close_choices, context, arrival, answers, choices, engine, permit, use),
    )


def _stream(
    context: ApiContext,
    request: Request,
    frames: AsyncIterator[bytes],
    heartbeat: Callable[[], bytes],
    close: Callable[[], None],
) -> AnswerStream:
    return AnswerStream(
        frames,
        dialect_of(request),
        request_id=request.state.request_id,
        heartbeat_seconds=context.config.heartbeat_seconds,
        drain_seconds=context.config.drain_seconds,
        heartbeat=heartbeat,
        on_close=close,
    )


def _decoded(
    context: ApiContext, request: Request, raw: bytes, id_prefix: str, read: Callable[[ApiContext, Incoming], Result]
) -> Result:
    check_amount(raw)
    fields, is_finite = parse_object(raw)
    request.state.origin = _origin_of(request, fields)
    request.state.wants_stream = dialect_of(request).wants_stream(fields)
    check_messages(fields)
    name = request.state.request_id.removeprefix("req_")
    result = read(context, Incoming(request, fields, id_prefix + name))
    if not is_finite:
        # No typed field refused the number, so it is inside an object with unchecked content.
        raise not_finite()
    return result


def _origin_of(request: Request, fields: Mapping[str, Any]) -> Origin:
    """Returns the namespace and session for recording a refusal, as far as the fields can be read."""
    salt = fields.get("cache_salt")
    try:
        session_id = dialect_of(request).session_id(fields, request.headers)
    except SessionIdError:
        session_id = None
    return Origin(namespace_of(request, salt if isinstance(salt, str) else None), session_id)


def _client_of(request: Request) -> str:
    """Returns a client's identity for fair planning: its address and, if sent, its key."""
    host = request.client.host if request.client else ""
    return f"{host} {dialect_of(request).api_key(request.headers)}"


def _heartbeat(dialect: Dialect, answer: AnswerInParts | ChoicesAnswer) -> bytes:
    progress = answer.progress()
    return dialect.heartbeat(progress) if answer.has_started else dialect.early_heartbeat(progress)


async def _whole(begun: _Begun) -> Response:
    try:
        return JsonBody(await begun.body())
    except Exception:
        begun.answer.leave_log()
        raise
    finally:
        begun.close()


def _close(
    context: ApiContext,
    arrival: Arrival,
    answer: AnswerInParts,
    engine: EnginePort,
    permit: Permit,
    use: InUse[Opened],
) -> None:
    answer.close()
    use.close()
    permit.close(sum(len(exchange.request.tokens) + len(part.token_ids) for exchange, part in answer.parts))
    for exchange, part in answer.parts:
        _note_end(context, arrival, part, exchange)
    exchange, last = answer.parts[-1]
    _prepare_next_turn(context, last, exchange, engine)


def _close_choices(
    context: ApiContext,
    arrival: Arrival,
    answers: ChoicesAnswer,
    choices: Choices,
    engine: EnginePort,
    permit: Permit,
    use: InUse[Opened],
) -> None:
    """Closes the answers of all choices; called on every way out. Most clients go on with the first choice."""
    answers.close()
    use.close()
    permit.close(answers.first.figures.counts.prompt + answers.num_predicted)
    _note_end(context, arrival, answers.first, choices.first)
    _prepare_next_turn(context, answers.first, choices.first, engine)


def _prepare_next_turn(context: ApiContext, answer: Answer, exchange: Exchange, engine: EnginePort) -> None:
    """Evaluates the answered turn ahead. If the answer calls tools, holds its state until the tools have answered."""
    request, conversation = exchange.request, exchange.conversation
    if answer.has_ended and conversation is not None and request.cache_prompt:
        context.in_background(_evaluate_ahead(exchange, conversation, engine, answer.token_ids))
    if answer.is_complete and exchange.parser.made_calls:
        label = request.session_id or request.request_id
        engine.execute_later(HoldTurn(request.state_namespace, label, request.tokens, answer.token_ids))


async def _evaluate_ahead(
    exchange: Exchange, conversation: Conversation, engine: EnginePort, reply_ids: Sequence[int]
) -> None:
    """Evaluates the finished turn once idle, as its next prompt may show it: with its thought and without."""

    def next_prefixes() -> list[RenderedPrompt]:
        variants = sent_back(exchange.reply_messages())
        return [conversation.followed_by(messages).stable_prefix() for messages in variants]

    try:
        for request in next_turn_requests(exchange.request, reply_ids, await asyncio.to_thread(next_prefixes)):
            async for _ in engine.submit(request):
                pass
    except Exception as error:  # no client waits for this, and the next turn evaluates missing tokens itself
        logger.debug("%s: not evaluated ahead: %s", exchange.request.request_id, error)


async def _unless_disconnected(request: Request, work: Awaitable[Response]) -> Response:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        logger.debug("%s: the client left", request.state.request_id)
        return Response(status_code=CLIENT_LEFT)
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
