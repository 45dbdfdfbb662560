"""What every generation endpoint does around its dialect: body, thread, engine, stream or whole, disconnect."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from models.prompt.chat_template import RenderedPrompt
from server.api.answer import Answer
from server.api.auth import key_name_of, known_key_of, namespace_of
from server.api.body import check_amount, check_messages, not_finite, parse_object, read_body
from server.api.context import ApiContext, EnginePort, context_of
from server.api.conversation import Conversation
from server.api.dialect import Dialect, Exchange, Payload, dialect_of
from server.api.errors import stopped
from server.api.header_text import ascii_text
from server.api.json_body import JsonBody
from server.api.next_turn import next_turn_requests, sent_back
from server.api.params import Incoming
from server.api.rate_limits import Permit
from server.api.refusals import Origin
from server.api.session_id import SessionIdError
from server.api.stream import AnswerStream
from server.engine.commands import HoldTurn

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""Status for a client that is no longer there; nobody reads it but the access log."""

Result = TypeVar("Result")
OpenExchange: TypeAlias = Callable[[ApiContext, Incoming], Exchange | Payload]
"""Checks a body and renders its prompt; raises what `server.api.errors` knows. Called on another thread.

A request that needs no answer of the model is answered with the payload returned.
"""


async def generate(request: Request, id_prefix: str, open_exchange: OpenExchange) -> Response:
    """Serves one request with a body. Raises what `server.api.errors` knows; a client that left is not an error.

    `id_prefix` is what the dialect's names of answers begin with.
    """
    received = time.monotonic()
    context = context_of(request)
    raw = await read_body(request, context.config.max_body_bytes)
    if context.is_draining:
        raise stopped()
    work = _admitted(context, request, raw, received, id_prefix, open_exchange)
    return await _unless_disconnected(request, work)


async def inspect(request: Request, describe: Callable[[ApiContext, Incoming], Payload]) -> Response:
    """Answers from the body alone, which `describe` checks on another thread; no engine is asked.

    Raises what `describe` and `server.api.errors` know; a client that left is not an error.
    """
    context = context_of(request)
    raw = await read_body(request, context.config.max_body_bytes)

    async def described() -> Response:
        work = partial(_decoded, context, request, raw, "", describe)
        return JsonBody(await context.planning.run(_client_of(request), len(raw), work))

    return await _unless_disconnected(request, described())


async def _admitted(
    context: ApiContext, request: Request, raw: bytes, received: float, id_prefix: str, open_exchange: OpenExchange
) -> Response:
    """Answers within the limits of the request's key."""
    permit = context.rate_limits.admit(known_key_of(request), request.state.answer_headers)
    try:
        response = await _answer(context, request, raw, received, id_prefix, open_exchange, permit)
    except BaseException:
        # However it failed, being cancelled included, it runs no longer.
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
    exchange = await context.planning.run(_client_of(request), len(raw), work)
    if not isinstance(exchange, Exchange):
        return JsonBody(exchange)
    engine = context.running_engine(exchange.model)
    if exchange.request.session_id is not None:
        request.state.answer_headers["x-session-id"] = ascii_text(exchange.request.session_id)
    key_name = key_name_of(request.scope)
    answer = Answer(engine, exchange, received, context.sessions.record, context.conversations, key_name)
    close = partial(_close, context, answer, exchange, engine, permit)
    if not exchange.is_streamed:
        return await _whole(answer, exchange, close)
    return AnswerStream(
        exchange.frames(answer.events()),
        dialect_of(request),
        request_id=exchange.request.request_id,
        heartbeat_seconds=context.config.heartbeat_seconds,
        drain_seconds=context.config.drain_seconds,
        heartbeat=partial(_heartbeat, dialect_of(request), answer),
        on_close=close,
    )


def _decoded(
    context: ApiContext, request: Request, raw: bytes, id_prefix: str, read: Callable[[ApiContext, Incoming], Result]
) -> Result:
    """Returns what `read` makes of the decoded body."""
    check_amount(raw)
    fields, is_finite = parse_object(raw)
    request.state.origin = _origin_of(request, fields)
    check_messages(fields)
    name = request.state.request_id.removeprefix("req_")
    result = read(context, Incoming(request, fields, id_prefix + name))
    if not is_finite:
        # No typed field has refused the number, so it stands inside an object whose content is not checked.
        raise not_finite()
    return result


def _origin_of(request: Request, fields: Mapping[str, Any]) -> Origin:
    """Returns whose request it is, as far as its fields can be read; a refusal is recorded under that."""
    salt = fields.get("cache_salt")
    try:
        session_id = dialect_of(request).session_id(fields, request.headers)
    except SessionIdError:
        session_id = None
    return Origin(namespace_of(request, salt if isinstance(salt, str) else None), session_id)


def _client_of(request: Request) -> str:
    """Returns what tells clients apart that take turns at planning: the address, and the key where one is sent."""
    host = request.client.host if request.client else ""
    return f"{host} {dialect_of(request).api_key(request.headers)}"


def _heartbeat(dialect: Dialect, answer: Answer) -> bytes:
    progress = answer.progress()
    return dialect.heartbeat(progress) if answer.has_started else dialect.early_heartbeat(progress)


async def _whole(answer: Answer, exchange: Exchange, close: Callable[[], None]) -> Response:
    try:
        return JsonBody(await exchange.body(answer.events()))
    finally:
        close()


def _close(context: ApiContext, answer: Answer, exchange: Exchange, engine: EnginePort, permit: Permit) -> None:
    """Ends an answer on every way out. The state of one that asks for tools is held until they have answered."""
    answer.close()
    permit.close(len(exchange.request.tokens) + len(answer.token_ids))
    request, conversation = exchange.request, exchange.conversation
    if answer.has_ended and conversation is not None and request.cache_prompt:
        context.in_background(_evaluate_ahead(exchange, conversation, engine, answer.token_ids))
    if answer.is_complete and exchange.parser.made_calls:
        label = request.session_id or request.request_id
        engine.execute_later(HoldTurn(request.namespace, label, request.tokens, answer.token_ids))


async def _evaluate_ahead(
    exchange: Exchange, conversation: Conversation, engine: EnginePort, reply_ids: Sequence[int]
) -> None:
    """Evaluates a finished turn as its next prompt may show it, with its thought and without, once idle."""

    def next_prefixes() -> list[RenderedPrompt]:
        variants = sent_back(exchange.reply_messages())
        return [conversation.followed_by(messages).stable_prefix() for messages in variants]

    try:
        for request in next_turn_requests(exchange.request, reply_ids, await asyncio.to_thread(next_prefixes)):
            async for _ in engine.submit(request):
                pass
    except Exception as error:  # nobody waits for it, and the next turn evaluates what is missing
        logger.debug("%s: not evaluated ahead: %s", exchange.request.request_id, error)


async def _unless_disconnected(request: Request, work: Awaitable[Response]) -> Response:
    """Returns the result of `work`, cancelling it as soon as the client is gone."""
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
