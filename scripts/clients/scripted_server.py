"""The real server and engine, except that what the model says stands in a script.

An agent's turns then go the way its proof needs, while prompts, state and reuse are real: each answer is bound to the
script's next text, and the model evaluates every token of it.
"""

import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import uvicorn
from numpy.typing import NDArray

from models.output.call_formats import HERMES, CallFormat
from models.output.grammar import CompiledGrammar, Grammar, GrammarKind, OutputGrammar
from scripts.clients.scripted_model import TOOL_RESULT
from server.api.connections import HttpConfig, Limits
from server.app.config import ServerConfig
from server.app.service import open_service
from server.engine.engine import Engine
from server.engine.messages import Generation
from server.engine.request import Delta, Event, Finished, GenerationRequest, Started
from tests.support.apps import create_app
from tests.support.call_writer import written

START_SECONDS = 30.0


@dataclass(frozen=True)
class Reply:
    """What the model says to one request: a text, or the call of a tool."""

    text: str = ""
    tool: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)

    def spelled(self, call_format: CallFormat) -> str:
        """Returns the reply as a model of this format writes it."""
        call = written(call_format, [(self.tool, self.arguments)]) if self.tool else ""
        return "\n".join(filter(None, (self.text, call)))


@dataclass
class Sent:
    """A request as a client sent it, and the body of its answer."""

    path: str
    headers: list[tuple[str, str]]
    body: str
    answer: str = ""


@dataclass
class Exchange:
    """One request as the engine served it."""

    prompt: NDArray[np.int32]
    is_idle_work: bool = False
    """What the server evaluates ahead of the next turn."""
    cached_tokens: int = 0
    reply: list[int] = field(default_factory=list)

    said: Reply | None = None

    def said_all(self, reply: Reply) -> bool:
        """Whether the model has said this."""
        return self.said == reply

    def known(self) -> NDArray[np.int32]:
        """Returns all tokens that have a state when it is over."""
        return np.concatenate([self.prompt, np.array(self.reply, dtype=np.int32)])


class Binder(Protocol):
    """Makes a grammar that a reply is bound to."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles a choice of texts."""


class ScriptedEngine:
    """An engine whose answers are bound to a script. Stands for an `Engine`; event loop only.

    If `reply` is set, it makes each reply from the prompt. Else a request that offers tools gets the reply with the
    number of tool results in its prompt; all others, such as an agent's request for a title, get `aside`.
    """

    def __init__(
        self, engine: Engine, binder: Binder, decode: Callable[[Sequence[int]], str], call_format: CallFormat
    ) -> None:
        self._engine = engine
        self._call_format = call_format
        self._binder = binder
        self.decode = decode
        self.replies: Sequence[Reply] = ()
        self.reply: Callable[[str], Reply] | None = None
        self.aside = "A small edit"
        self.exchanges: list[Exchange] = []
        self.refusals: list[str] = []
        """Requests that were answered with an error: method, path and status."""
        self.sent: list[Sent] = []
        self.seen = set[bytes]()
        """The digests of all images that prompts showed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def begin(self, replies: Sequence[Reply]) -> None:
        """Starts a new script; what was asked before counts no more."""
        self.replies = replies
        self.exchanges = []
        self.refusals = []
        self.sent = []
        self.seen = set()

    def submit(self, request: GenerationRequest) -> Any:
        """Queues a request with its reply chosen."""
        exchange = Exchange(request.tokens, request.is_idle_work)
        if request.is_idle_work:
            generation = self._engine.submit(request)
            self.exchanges.append(exchange)  # open by now, for who waits until it is not
            return generation
        self.exchanges.append(exchange)
        self.seen |= {one.picture.digest for one in request.pictures.placed}
        exchange.said = self._reply_to(self.decode(request.tokens.tolist()))
        choices = json.dumps([exchange.said.spelled(self._call_format)])
        compiled = self._binder.compile(Grammar(GrammarKind.CHOICE, choices))
        bound = replace(request, grammar=OutputGrammar(compiled), thinking=None)
        return _Observed(self._engine.submit(bound), exchange)

    def _reply_to(self, prompt: str) -> Reply:
        if self.reply is not None:
            return self.reply(prompt)
        if "<tools>" not in prompt or not self.replies:
            return Reply(self.aside)
        num_results = prompt.count(f"{TOOL_RESULT}\n")
        return self.replies[min(num_results, len(self.replies) - 1)]

    def answered(self) -> list[Exchange]:
        """Returns what clients asked."""
        return [exchange for exchange in self.exchanges if not exchange.is_idle_work]

    def reused_share(self) -> float:
        """Returns the prompt tokens restored, of those that any earlier request had evaluated."""
        restored = sum(exchange.cached_tokens for exchange in self.answered())
        return restored / max(restored + self.num_lost(), 1)

    def num_lost(self, start: int = 0) -> int:
        """Returns the prompt tokens from the exchange `start` on that were evaluated though they were known.

        The last token of a prompt is always evaluated.
        """
        return sum(
            max(min(self._num_known(index), len(exchange.prompt) - 1) - exchange.cached_tokens, 0)
            for index, exchange in enumerate(self.exchanges)
            if index >= start and not exchange.is_idle_work
        )

    def num_again(self) -> int:
        """Returns about how many evaluated tokens of prompts are of lines that earlier requests or replies had.

        Others are new text. What is told twice, as by reading a file again, counts too.
        """
        return sum(self.again(self.answered()))

    def again(self, exchanges: Sequence[Exchange]) -> Iterator[int]:
        """Yields the same for each exchange of a conversation."""
        seen = set[str]()
        for exchange in exchanges:
            fresh = exchange.prompt[exchange.cached_tokens :].tolist()
            lines = self.decode(fresh).splitlines()
            again = sum(len(line) + 1 for line in lines if line in seen)
            yield round(len(fresh) * again / max(sum(len(line) + 1 for line in lines), 1))
            seen.update(line for line in self.decode(exchange.known().tolist()).splitlines() if len(line) > 20)

    def _num_known(self, index: int) -> int:
        prompt = self.exchanges[index].prompt
        return max((_common(prompt, earlier.known()) for earlier in self.exchanges[:index]), default=0)


class _Observed:
    """A generation that notes in its exchange what passes through."""

    def __init__(self, generation: Generation, exchange: Exchange) -> None:
        self._generation = generation
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._generation:
            if isinstance(event, Started):
                self._exchange.cached_tokens = event.hit_tokens
            elif isinstance(event, Delta):
                self._exchange.reply += event.token_ids
            elif isinstance(event, Finished) and event.started is not None:
                self._exchange.cached_tokens = event.started.hit_tokens
            yield event


class _Watched:
    """An ASGI application that notes in the engine what was sent, and what was answered with an error."""

    def __init__(self, app: Any, engine: ScriptedEngine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = f"{scope['path']}?{scope['query_string'].decode()}".rstrip("?")
        sent = Sent(path, [(name.decode(), value.decode()) for name, value in scope["headers"]], "")
        if scope["method"] == "POST":
            self._engine.sent.append(sent)

        async def read() -> Any:
            message = await receive()
            sent.body += message.get("body", b"").decode(errors="replace")
            return message

        async def watched(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._engine.refusals.append(f"{scope['method']} {scope['path']}: {message['status']}")
            sent.answer += message.get("body", b"").decode(errors="replace")
            await send(message)

        await self._app(scope, read, watched)


def _common(tokens: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(tokens), len(other))
    different = np.flatnonzero(tokens[:length] != other[:length])
    return int(different[0]) if len(different) else length


@contextmanager
def scripted_server(
    model: Path, call_format: CallFormat = HERMES, binder: Binder | None = None
) -> Iterator[tuple[str, ScriptedEngine]]:
    """Serves `model`, whose calls have this format; gives its base address and the engine to hand a script to.

    By default a reply is any tokens that spell it.
    """
    config = ServerConfig(models=(str(model),), cache_memory_bytes=2 * 10**9, name="clients")
    service = open_service(config)
    service.engine.start()
    tokenizer = tokenizer_of(model)
    binder = binder or service.model.grammars
    assert binder is not None

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode([one for one in ids if one >= 0], skip_special_tokens=False))

    engine = ScriptedEngine(service.engine, binder, decode, call_format)
    try:
        with _running(_Watched(create_app(cast(Engine, engine), service.model, config), engine)) as url:
            yield url, engine
    finally:
        service.engine.stop()


@contextmanager
def demo_server() -> Iterator[str]:
    """Serves the built-in model, which speaks for itself; gives the base address."""
    config = ServerConfig(cache_memory_bytes=10**9, name="clients")
    service = open_service(config)
    service.engine.start()
    try:
        with _running(create_app(service.engine, service.model, config)) as url:
            yield url
    finally:
        service.engine.stop()


def tokenizer_of(model: Path) -> Any:
    """Returns the tokenizer in a model's folder."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json"))


@contextmanager
def _running(app: Any) -> Iterator[str]:
    server = uvicorn.Server(HttpConfig(app, Limits(), host="127.0.0.1", port=0, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, name="uvicorn", daemon=True)
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the server did not start")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)
