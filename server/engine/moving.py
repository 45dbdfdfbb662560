"""Bundles out of a running engine, and into one. Knows no HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from cache import moving
from cache.disk.bundle import NO_TOKENS, BundleHead, BundleReader
from cache.moving import CacheCall, Intake, MovingText
from models.adapter import client_namespace
from server.engine.engine import Engine
from server.engine.messages import on_thread
from server.engine.worker import Worker

ALL = "all"
"""In place of a namespace: every one, each piece staying in its own. No namespace has this name."""


def is_of(namespace: str) -> Callable[[str], bool]:
    """Says of a namespace of states whether a client's, or `ALL`, has it."""
    return lambda name: namespace in (ALL, client_namespace(name)[0])


def into(namespace: str) -> Callable[[str], str]:
    """Names the namespace of states that one of a bundle enters: a client's, with the same adapter, or its own."""
    if namespace == ALL:
        return lambda name: name
    return lambda name: name.removesuffix(client_namespace(name)[0]) + namespace


def calling(engine: Engine) -> CacheCall:
    """Calls functions with an engine's cache, from any thread but the event loop's, where this is called."""
    loop = asyncio.get_running_loop()

    def call(function: Callable[..., Any], *given: object) -> Any:
        asked = engine.execute(lambda worker: function(worker.prefix_cache, *given))
        return asyncio.run_coroutine_threadsafe(asked, loop).result()

    return call


async def choose(
    engine: Engine, model: str, namespace: str, session_id: str | None = None
) -> tuple[BundleHead, Iterator[MovingText]]:
    """Chooses the conversations that may leave: all of a client's namespace, or of `ALL`, or one session.

    With `session_id`, `namespace` is one of states.

    Raises what `Engine.execute` raises.
    """

    def run(worker: Worker) -> tuple[BundleHead, Iterator[MovingText]]:
        worker.close_answered()
        cache = worker.prefix_cache
        if session_id is None:
            texts = moving.conversations(cache, is_of(namespace))
            nodes = [node for node in cache.memory.nodes() if is_of(namespace)(node.trie.namespace)]
        else:
            tokens = worker.state.last(namespace, session_id)
            text = MovingText(namespace, session_id, NO_TOKENS if tokens is None else tokens)
            texts, nodes = iter([text]), cache.memory.find_trie(namespace).match(text.tokens).node.path()
        left_out = sum(len(node.tokens) for node in nodes if node.is_volatile)
        return BundleHead(model, worker.state.fingerprint, left_out), texts

    return await engine.execute(run)


async def take_in(engine: Engine, intake: Intake, stream: AsyncIterator[bytes], max_bytes: int) -> None:
    """Keeps what arrives. Event loop only. Raises BundleError, and what the stream and `Engine.execute` raise."""
    fingerprint = await engine.execute(lambda worker: worker.state.fingerprint)
    loop = asyncio.get_running_loop()

    async def following() -> bytes:
        return await anext(stream, b"")

    blocks = iter(lambda: asyncio.run_coroutine_threadsafe(following(), loop).result(), b"")
    try:
        await on_thread("import", lambda: intake.take(BundleReader(blocks, max_bytes), fingerprint))
    finally:
        engine.execute_later(_record, intake)


def _record(worker: Worker, intake: Intake) -> None:
    for piece in intake.kept:
        if piece.session_id is not None:
            worker.state.record(piece.namespace, piece.session_id, piece.tokens)
