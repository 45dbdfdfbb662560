"""`mlx-serve serve`: one process from the command line to its exit status.

The order matters. The address is bound before the model is loaded, so that a taken port costs no waiting; it
listens only when everything behind it is ready. On the first SIGTERM or Ctrl-C running answers have `drain_seconds`
to finish, and what still runs then is told so; new requests are answered with status 503 meanwhile. Then it listens
no longer. A second signal ends the process at once.
"""

import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import shlex
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from rich.console import Console
from rich.markup import escape
from starlette.applications import Starlette

from server.app import create_app, start_draining
from server.cli.models import size_text
from server.config import ServerConfig
from server.connections import HttpConfig, Limits, find_max_connections, quieten_accept_errors
from server.engine.engine import Engine
from server.errors import StartError
from server.log import configure_logging
from server.service import Service, open_service

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5
"""Time for the last bytes to reach their clients once every answer has ended."""
KERNEL_BACKLOG = 2048
"""Connections that may wait to be accepted."""


def serve(config: ServerConfig) -> int:
    """Serves until asked to stop and returns the exit status. Raises StartError and ModelError."""
    configure_logging(config.log_level, config.log_format)
    signal.signal(signal.SIGTERM, _exit_before_start)
    console = Console(highlight=False, soft_wrap=True)
    with contextlib.closing(bind(config.host, config.port)) as listener:
        service = _open(config, console)
        # What has been loaded stays: looking through it for garbage would stop all threads for a tenth of a second.
        gc.collect()
        gc.freeze()
        max_connections = find_max_connections()
        service.engine.start()
        try:
            return asyncio.run(_serve(service, config, listener, console, max_connections))
        finally:
            # It ends in a moment anyway, and a signal now would only change the exit status.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            service.engine.stop()


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the address but not listening yet; raises StartError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise StartError(f"{host!r} is no address to listen on: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> StartError:
    if error.errno == errno.EADDRINUSE:
        return StartError(f"port {port} of {host} is in use; choose another with --port, or 0 for any free one")
    if error.errno in (errno.EACCES, errno.EPERM):
        return StartError(f"port {port} needs more rights than this user has; choose one above 1023 with --port")
    return StartError(f"cannot listen on {host}, port {port}: {error.strerror}")


def _open(config: ServerConfig, console: Console) -> Service:
    with console.status(f"Loading {config.models[0]} …") if console.is_terminal else contextlib.nullcontext():
        return open_service(config)


async def _serve(
    service: Service, config: ServerConfig, listener: socket.socket, console: Console, max_connections: int
) -> int:
    app = create_app(service.engine, service.model, config)
    limits = Limits(config.client_seconds, max_connections)
    server = _Server(app, limits, lambda: show_banner(console, service, config, listener))
    stopper = _Stopper(server, service.engine, app, config.drain_seconds)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopper.signalled)
    try:
        await server.serve(sockets=[listener])
    except OSError as error:
        raise _cannot_listen(config.host, config.port, error) from error
    await stopper.finish()
    return 0


class _Server(uvicorn.Server):
    """uvicorn, except that signals are ours and that somebody is told when it listens."""

    def __init__(self, app: Starlette, limits: Limits, on_listening: Callable[[], None]) -> None:
        super().__init__(
            HttpConfig(app, limits, lifespan="off", timeout_graceful_shutdown=CLOSE_SECONDS),
        )
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: uvicorn would send them to itself again at the end and so change the exit status."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening."""
        await super().startup(sockets)
        for listener in sockets or ():
            # asyncio takes one number for how many it accepts at once and how many the kernel lets wait.
            listener.listen(KERNEL_BACKLOG)
        assert isinstance(self.config, HttpConfig)
        quieten_accept_errors(asyncio.get_running_loop(), self.config.reports)
        self._on_listening()


class _Stopper:
    """Ends the server: gently at the first signal, at once at the second. Event loop only."""

    def __init__(self, server: _Server, engine: Engine, app: Starlette, drain_seconds: float) -> None:
        self._server = server
        self._engine = engine
        self._app = app
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None

    def signalled(self) -> None:
        """Handles one SIGTERM or SIGINT."""
        if self._draining is not None:
            logger.warning("stopped at once: answers that were running are cut off")
            logging.shutdown()
            # The worker may be inside a step, and an interpreter that ends around it would abort noisily.
            os._exit(130)
        start_draining(self._app)
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def finish(self) -> None:
        """Returns when everything that was under way has ended."""
        if self._draining is not None:
            await self._draining

    async def _drain(self) -> None:
        num_running = self._engine.stats().num_open
        if num_running:
            logger.info("stopping: %d running, up to %g s to finish", num_running, self._drain_seconds)
        if not await self._engine.drain(self._drain_seconds):
            logger.warning("stopping: what still runs ends now")
        await asyncio.to_thread(self._engine.stop)
        self._server.should_exit = True


def _exit_before_start(_signal: int, _frame: object) -> None:
    os._exit(0)


def show_banner(console: Console, service: Service, config: ServerConfig, listener: socket.socket) -> None:
    """Prints what is served, within which limits, where, and how to ask it."""
    host, port = listener.getsockname()[:2]
    url = f"http://{_url_host(host)}:{port}"
    for label, text in _facts(service, config, url):
        console.print(f"[bold]{label:<9}[/bold] {escape(text)}")
    example = example_call(url, service.model.id, config.api_key is not None)
    console.print(f"\nTry it:\n{example}\n\nCtrl-C stops the server.\n", markup=False)


def _facts(service: Service, config: ServerConfig, url: str) -> Iterator[tuple[str, str]]:
    model = service.model
    yield "model", f"{model.id}, {count_text(service.num_parameters)} parameters, {size_text(service.weights_bytes)}"
    limit = "" if model.context_tokens < service.model_context_tokens else " (the model's limit)"
    yield "context", f"{model.context_tokens} tokens{limit}"
    source = "chosen with --cache-memory" if config.cache_memory_bytes else "set another with --cache-memory"
    yield "memory", f"{size_text(service.budget_bytes)} for the state of past tokens ({source})"
    if config.cache_disk_bytes is not None:
        per_day = config.cache_disk_write_bytes_per_day
        limit = f", at most {size_text(per_day)} written a day" if per_day is not None else ""
        is_kept = service.engine.stats().cache.keeps_on_disk
        size = size_text(config.cache_disk_bytes)
        kept, dropped = (
            f"{size} in {config.cache_dir}{limit}",
            f"nothing, for the reason above, in {config.cache_dir}",
        )
        yield "disk", kept if is_kept else dropped
    yield "slots", f"{config.slots} conversations at once, {config.max_waiting} more may wait"
    yield "address", f"{url}/v1"


def _url_host(host: str) -> str:
    """Returns a host that a client on this machine can use."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def example_call(url: str, model: str, needs_key: bool) -> str:
    """Returns a command for the shell that asks the server something."""
    key = "-H 'Authorization: Bearer YOUR_KEY' " if needs_key else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]}, ensure_ascii=False)
    return f"curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}"


def count_text(number: int) -> str:
    """Returns a count as people read it, such as `1.7 million`."""
    for word, unit in (("billion", 10**9), ("million", 10**6)):
        if number >= unit:
            return f"{number / unit:.1f} {word}"
    return f"{number}"
