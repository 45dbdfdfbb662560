"""`POST /api/pull`: downloads a model, and says in lines how far it is."""

from collections.abc import AsyncIterator
from typing import NotRequired, TypedDict

import mlx.core as mx
from starlette.requests import Request
from starlette.responses import Response

from models.errors import ModelError, ModelNotFound, RepositoryNotFound
from models.hub import PullChecking, PullEvent, PullPlanned, PullProgress, pull
from models.names import BUILT_IN, parse_repository, shorten, suggest
from models.short_names import find_family, largest
from server.api.auth import is_owner
from server.api.body import parse_object, read_body
from server.api.context import context_of
from server.api.dialect import dialect_of
from server.api.errors import ApiError, Code
from server.api.json_body import JsonBody
from server.api.ollama.dialect import line
from server.api.ollama.fields import IN_PULL
from server.api.stream import AnswerStream
from server.api.typed_body import BodyModel, parse_body
from server.config import ServerConfig
from server.memory_budget import comfortable_weights_bytes, largest_weights_bytes, read_machine
from server.pulls import Pulls


class PullBody(BodyModel):
    """Body of `POST /api/pull`."""

    model: str | None = None
    name: str | None = None
    """Its older name."""
    stream: bool | None = None
    """An answer is streamed unless this is false."""


class PullStatus(TypedDict):
    """One line: what is being done, and how far it is."""

    status: str
    digest: NotRequired[str]
    """`sha256:` and the digest of the file that is fetched."""
    total: NotRequired[int]
    """Bytes of that file."""
    completed: NotRequired[int]
    """Those that are here."""


async def pull_model(request: Request) -> Response:
    """Answers while a model is downloaded; raises ApiError (400, 403, 404)."""
    context = context_of(request)
    if not is_owner(request, context.config):
        message = "only who runs the server downloads models: on its own machine, or by an operator's key"
        raise ApiError(Code.OPERATOR_ONLY, message)
    fields, _ = parse_object(await read_body(request, context.config.max_body_bytes))
    body = parse_body(PullBody, dict(fields), IN_PULL)
    name = _wanted(body.model or body.name)
    steps = context.kept(pulls_of).steps(name)
    if body.stream is False:
        return JsonBody(await _last(steps))
    return AnswerStream(
        _lines(steps),
        dialect_of(request),
        request_id=request.state.request_id,
        heartbeat_seconds=context.config.heartbeat_seconds,
        drain_seconds=context.config.drain_seconds,
        heartbeat=lambda: b"",
        on_close=lambda: None,
    )


def pulls_of(config: ServerConfig) -> Pulls:
    """Returns the downloads of a server."""
    return Pulls(pull, lambda: largest_weights_bytes(read_machine(mx.device_info())))


def _wanted(name: str | None) -> str:
    """Returns the name of what is to be downloaded, of a family the largest that fits; raises ApiError (400, 404)."""
    if not name:
        raise ApiError(Code.MISSING_PARAMETER, "model is required", "model")
    plain = name.removesuffix(":latest")
    family = find_family(name)
    if family:
        found = largest(family, comfortable_weights_bytes(read_machine(mx.device_info()))) or family[0]
        return found.name
    if plain not in BUILT_IN and parse_repository(plain) is None:
        reason = f"pull model manifest: {shorten(plain)[:200]!r}: {suggest(plain)}"
        raise ApiError(Code.MODEL_NOT_FOUND, reason, "model")
    return plain


async def _lines(steps: AsyncIterator[PullEvent]) -> AsyncIterator[bytes]:
    yield line(PullStatus(status="pulling manifest"))
    try:
        async for event in steps:
            for status in _told(event):
                yield line(status)
    except ModelError as error:
        raise _as_api_error(error) from error
    yield line(PullStatus(status="writing manifest"))
    yield line(PullStatus(status="success"))


async def _last(steps: AsyncIterator[PullEvent]) -> PullStatus:
    """Returns what is said at the end; raises ApiError."""
    try:
        async for _ in steps:
            pass
    except ModelError as error:
        raise _as_api_error(error) from error
    return {"status": "success"}


def _told(event: PullEvent) -> list[PullStatus]:
    match event:
        case PullProgress(file=file, file_bytes=here) if file is not None:
            digest = f"sha256:{file.digest}"
            status = f"pulling {file.digest[:12]}"
            return [{"status": status, "digest": digest, "total": file.num_bytes, "completed": here}]
        case PullChecking():
            return [{"status": "verifying sha256 digest"}]
        case PullPlanned() | PullProgress():
            return []


def _as_api_error(error: ModelError) -> ApiError:
    """Returns what a client is told: its name is wrong, or this machine or the hub cannot do it."""
    if isinstance(error, ModelNotFound | RepositoryNotFound):
        return ApiError(Code.MODEL_NOT_FOUND, f"pull model manifest: {error}", "model")
    return ApiError(Code.MODEL_UNUSABLE, str(error), "model")
