"""The seam between the server and its dialects: what a family of clients does in its own way.

A dialect is a folder of `server/api/`, handed to the application as one `Api`. Its `Dialect` says where clients put
their key and their session, how a stream is framed, and what an error looks like. Its endpoints make an `Exchange` of
each checked body: the engine's request, and how the answer to it is written. `server/api/endpoint.py` does the rest,
the same for all.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from models.output.pieces import OutputParser, Piece
from models.output.plain import PlainParser
from models.prompt.chat_template import Message, RenderedPrompt
from server.api.context import ServedModel
from server.api.conversation import Conversation
from server.api.errors import ApiError
from server.api.session_id import resolve_session_id
from server.diagnosis.prompt import Prompt, plain_prompt, prompt_of
from server.engine.events import Finished
from server.engine.request import GenerationRequest

OutputEvent: TypeAlias = Piece | Finished
"""What an answer is written from: pieces in order, then one `Finished`. Errors are raised instead."""
Payload: TypeAlias = Mapping[str, Any]


class Dialect(ABC):
    """What all endpoints of one family of clients have in common. Without state."""

    stream_media_type = "text/event-stream"
    takes_any_content_type = False
    """Whether programs that are no browsers may send JSON under any content type, as `curl -d` does by itself."""

    @abstractmethod
    def api_key(self, headers: Mapping[str, str]) -> str:
        """Returns the key that a request was sent with, or an empty text."""

    @abstractmethod
    def wrong_key(self) -> ApiError:
        """Returns the error for a request without the key, or with another."""

    def session_id(self, fields: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
        """Returns the session that a body's fields or the headers name, or None; raises SessionIdError."""
        return resolve_session_id(fields, headers)

    @abstractmethod
    def error_response(self, error: ApiError) -> Response:
        """Returns the answer to a request that cannot be served."""

    @abstractmethod
    def error_frame(self, error: ApiError) -> bytes:
        """Returns what ends a stream that has begun and cannot be completed."""

    @abstractmethod
    def heartbeat(self, progress: str) -> bytes:
        """Returns what keeps a silent stream open; empty where clients skip nothing. `progress` is a few words."""


class Exchange(ABC):
    """One checked request, and how its answer is written. Used once: either `frames` or `body` is called."""

    def __init__(
        self,
        model: ServedModel,
        request: GenerationRequest,
        prompt: RenderedPrompt,
        *,
        is_streamed: bool = False,
        conversation: Conversation | None = None,
    ) -> None:
        """`conversation` is what the prompt was rendered from, where it was."""
        self.model = model
        self.request = request
        self.prompt = prompt
        self.is_streamed = is_streamed
        self.conversation = conversation
        self.asked = _asked(model, request, prompt, conversation)
        """What the prompt was made of, to be compared with other requests."""
        self.parser: OutputParser = PlainParser()
        if conversation is not None:
            self.parser = model.output_parser(conversation.tools, prompt.text)

    @abstractmethod
    def frames(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[bytes]:
        """Yields the stream, its proper end included."""

    @abstractmethod
    async def body(self, events: AsyncIterator[OutputEvent]) -> Payload:
        """Returns the body of an answer that is not streamed."""

    def reply_messages(self) -> list[Message]:
        """Returns the answer as the client's next request will hold it. Called at the end, on another thread."""
        return []


def _asked(
    model: ServedModel, request: GenerationRequest, prompt: RenderedPrompt, conversation: Conversation | None
) -> Prompt:
    if conversation is None:
        return plain_prompt(prompt.text, model=model.id, namespace=request.namespace)
    made_of = (conversation.messages, conversation.tools, conversation.template_arguments)
    return prompt_of(*made_of, model=model.id, namespace=request.namespace)


@dataclass(frozen=True, eq=False)
class Api:
    """What the folder of a dialect hands to the application."""

    dialect: Dialect
    routes: Sequence[Route]
    own_paths: tuple[str, ...] = ()
    """Paths of this API; errors for those that are not served, and for all below them, have its shape, too."""

    def owns(self, path: str) -> bool:
        """Whether a path that is not served belongs to this API."""
        return any(path == own or path.startswith(f"{own}/") for own in self.own_paths)


def find_dialect(apis: Sequence[Api], scope: Scope) -> Dialect:
    """Returns the dialect whose path was asked for, whatever the method; the first one for all other paths."""
    for api in apis:
        if any(route.matches(scope)[0] is not Match.NONE for route in api.routes):
            return api.dialect
    owners = (api for api in apis if api.owns(scope["path"]))
    return next(owners, apis[0]).dialect


def dialect_of(request: Request) -> Dialect:
    """Returns the dialect that `server.api.boundary` found for a request."""
    dialect = request.state.dialect
    assert isinstance(dialect, Dialect)
    return dialect
