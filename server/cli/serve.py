"""`mlx-serve serve`: one process, its sockets and its report at the start.

The address is bound before the model is loaded, so that a taken port costs no waiting; the server listens once all
behind the socket is ready.
"""

import asyncio
import contextlib
import errno
import gc
import ipaddress
import json
import logging
import os
import platform
import resource
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import uvicorn
from rich.console import Console
from rich.markup import escape
from starlette.applications import Starlette

from cache.budget import DiskInUse
from cache.disk import model_folders
from models import weights
from models.errors import told_as
from models.fast_blas import ADVICE
from models.names import model_id
from models.precision import Precision
from models.texts import grouped, size_text
from server.api.app import create_pool_app, start_draining
from server.api.connections import HttpConfig, Limits, find_max_connections
from server.api.observe import check_otlp
from server.api.responses.store import store_of
from server.app import memory_budget
from server.app.config import MAX_FILES, ConfigError, ServerConfig, StartError, parse_heal
from server.app.keys import read_keys
from server.app.log import configure_logging
from server.app.memory_budget import Claim, OwnClaim, read_machine
from server.app.service import Service, open_service, source_of
from server.app.upkeep import Upkeep, exclude_from_backups
from server.cli.bench import kernels_text
from server.cli.handover import Handover
from server.cli.keys import interruptible
from server.cli.ranks import Team
from server.cli.watchdog import Hangs, Watchdog
from server.pool.catalog import Catalog
from server.pool.memory import PoolSettings, cache_memory_for_all
from server.pool.names import parse_alias, parse_keep_alive
from server.pool.pool import ModelPool

logger = logging.getLogger(__name__)

SLOW_SECONDS = 0.5
STORE_SECONDS = 5.0
HANDOVER_PART = 0.5
"""The part of the time to stop in which conversations move first; and of the rest, in which running answers end."""


@dataclass(frozen=True)
class Surroundings:
    """Facts about the machine, found at the start."""

    others: Sequence[Claim]
    fast_blas: str | None
    urls: Sequence[str]
    """The address for this machine first."""
    claim: OwnClaim | None = None
    """None where the folder of claims cannot be used."""

    def tell(self, model: str, memory_bytes: int, **budget: int) -> None:
        """Tells other servers what this one takes."""
        if self.claim is not None:
            self.claim.tell(Claim(os.getpid(), model, memory_bytes, self.urls[0], **budget))


def facts(service: Service, config: ServerConfig, around: Surroundings) -> Iterator[tuple[str, str]]:
    """Labels and texts; an empty label continues the line before."""
    model = service.asked_for
    yield "model", f"{model.id}, {count_text(model.facts.num_parameters)} parameters"
    size, on_disk = size_text(service.memory.weights_bytes), size_text(service.model.facts.stored_bytes)
    is_as_stored, precision = service.loaded.precision is Precision.STORED, service.loaded.precision.value
    size += " on this machine" if len(service.machines) > 1 else ""
    yield "weights", size if is_as_stored else f"{size}, as {precision}: fastest on this CPU ({on_disk} on disk)"
    yield from _machine_facts(service)
    if service.opened.variants:
        yield "adapters", ", ".join(service.opened.variants)
    if service.seconds_per_token is not None and sys.platform == "linux":
        yield "blas", around.fast_blas or f"MLX's own, slow with long prompts; {ADVICE}"
    if service.wiring.is_possible:
        yield "wired", f"{size_text(service.wiring.wired_bytes)}, which macOS does not page out (--no-wire-weights)"
    yield "cache", _cache_text(service, config)
    if form := service.engine.stats().cache.stored_form:
        yield "stored", form
    if needed_bytes := cache_memory_for_all(len(config.models), config.cache_memory_bytes):
        yield "", f"not for all models at once: --cache-memory {-(-needed_bytes // 10**6)}MB is"
    yield "rest", _rest_text(service)
    for other in around.others:
        # A claim names the model and its memory once the model is loaded.
        claim = f"{size_text(other.memory_bytes)} are claimed by {other.model}"
        yield "beside", f"{claim if other.model else 'a server is starting'}, process {other.pid}"
    limit = "" if model.context_tokens < service.loaded.context_tokens else " (the model's limit)"
    yield "context", f"{grouped(model.context_tokens)} tokens{limit}"
    if "vision" in model.capabilities:
        yield "images", "seen"
    yield from _disk_facts(service, config)
    yield "slots", f"{config.slots} conversations at once, {config.max_waiting} more may wait"
    stats = service.engine.stats()
    yield "rows", stats.rows_form
    yield "drafts", "off (--speculate)" if config.speculate == "off" else stats.drafts_form
    if platform.system() == "Darwin":
        yield "kernels", kernels_text()
    yield from _address_facts(config, around.urls)


def _address_facts(config: ServerConfig, urls: Sequence[str]) -> Iterator[tuple[str, str]]:
    if config.insecure_no_key and not config.needs_key:
        yield "key", "none: anyone who reaches the address can use this server"
    yield "address", f"{urls[0]}/v1"
    for url in urls[1:]:
        yield "", f"{url}/v1 from other machines"
    if config.console:
        yield "console", f"{urls[0]}/"


def _machine_facts(service: Service) -> Iterator[tuple[str, str]]:
    machines = service.machines if len(service.machines) > 1 else ()
    for rank, (name, weights_bytes, rest_bytes) in enumerate(machines):
        yield (
            "machine",
            f"{rank}, {name}: {size_text(weights_bytes)} of weights, {size_text(rest_bytes)} left beside the state",
        )


def slowness(service: Service) -> str | None:
    """Warns where this processor is too slow for the model."""
    seconds, is_short = service.seconds_per_token, service.loaded.precision is Precision.FLOAT32_SCALES
    if seconds is None or seconds < SLOW_SECONDS:
        return None
    hint = "with memory for float32 weights it would be faster; " if is_short else ""
    cure = "a smaller model is faster, as is a Mac with Apple silicon"
    return f"Expect about {seconds:.1f} s per token on this processor: {hint}{cure}."


def _cache_text(service: Service, config: ServerConfig) -> str:
    budget_bytes, most_bytes = service.memory.budget_bytes, service.memory.most_bytes
    cache = service.engine.stats().cache
    per_token, live = cache.stored_bytes_per_token, cache.bytes_per_token
    tokens = f", about {round_count(budget_bytes / per_token)} tokens" if per_token else ""
    tokens += f" stored or {round_count(budget_bytes / live)} that run" if per_token < live else ""
    later = f"; up to {size_text(most_bytes)} as others make way" if most_bytes > budget_bytes else ""
    later += " on each machine" if service.engine.is_divided else ""
    is_asked = config.cache_memory_bytes is not None and not service.engine.is_divided
    source = "" if is_asked else f"{later} (--cache-memory)"
    return f"{size_text(budget_bytes)}{tokens}{source}"


def _disk_facts(service: Service, config: ServerConfig) -> Iterator[tuple[str, str]]:
    limit_bytes = config.cache_disk_bytes
    if limit_bytes is None:
        return
    per_day = config.cache_disk_write_bytes_per_day
    daily = f", at most {size_text(per_day)} written a day" if per_day is not None else ""
    yield "disk", f"{size_text(limit_bytes)} in {config.cache_dir}{daily}"
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(Path(config.cache_dir).expanduser()).free
        room_bytes = free_bytes + service.engine.stats().cache.disk_bytes
        if room_bytes < limit_bytes:
            yield "", f"of which the disk has room for {size_text(room_bytes)}"


def _rest_text(service: Service) -> str:
    memory = service.memory
    if memory.rest_bytes < 0:
        return f"none: over the machine's {size_text(memory.machine_bytes)} in all; lower --cache-memory"
    return f"{size_text(memory.rest_bytes)} of {size_text(memory.machine_bytes)} for everything else on this machine"


def example_call(url: str, model: str, needs_key: bool) -> str:
    """A shell command."""
    key = "-H 'Authorization: Bearer YOUR_KEY' " if needs_key else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]}, ensure_ascii=False)
    headers = f"{key}-H 'Content-Type: application/json'"
    return f"curl {url}/v1/chat/completions \\\n  {headers} \\\n  -d {shlex.quote(body)}"


def count_text(number: int) -> str:
    """A count such as `1.7 million`."""
    if number >= 10**9:
        return f"{number / 10**9:.1f} billion"
    return f"{number / 10**6:.1f} million" if number >= 10**6 else f"{number}"


def round_count(number: float) -> str:
    """Two significant digits: `137 000`, `1.4 million`."""
    if number >= 10**6:
        return count_text(int(number))
    unit = 1000 if number >= 10_000 else 100 if number >= 1000 else 1
    return grouped(int(number / unit) * unit)


_ELSEWHERE = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}
"""Addresses of documentation (RFC 5737, RFC 3849): choosing a route to them sends nothing."""


def is_for_this_machine(address: str) -> bool:
    """Whether a numeric address is loopback."""
    return ipaddress.ip_address(address).is_loopback


def urls(address: str, port: int) -> list[str]:
    """A bound socket's addresses, this machine's first."""
    if not ipaddress.ip_address(address).is_unspecified:
        return [_url(address, port)]
    return [_url(host, port) for host in ("127.0.0.1", *_own_addresses(is_ipv6=":" in address))]


def _own_addresses(*, is_ipv6: bool) -> list[str]:
    addresses: list[str] = []
    families = [family for family in _ELSEWHERE if is_ipv6 or family is socket.AF_INET]
    for family in families:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way_out:
            way_out.connect(_ELSEWHERE[family])
            addresses.append(str(way_out.getsockname()[0]))
    with contextlib.suppress(OSError):
        named = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        addresses += [str(entry[4][0]) for entry in named if entry[0] in families]
    kinds = ((address, ipaddress.ip_address(address)) for address in dict.fromkeys(addresses))
    return [name for name, ip in kinds if not (ip.is_loopback or ip.is_unspecified or ip.is_link_local)]


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


CLOSE_SECONDS = 5
SWITCH_SECONDS = 0.001
"""After this time a planning thread gives Python's lock to a waiting engine or event loop."""
CONNECT_SECONDS = 0.25
KERNEL_BACKLOG = 2048
"""Connections that may wait to be accepted."""


def serve(config: ServerConfig, runtime: Path, fast_blas: str | None, team: Team) -> int:
    """Returns the exit status. Raises ConfigError, StartError, ModelError and FolderError."""
    configure_logging(config.log_level, config.log_format)
    hangs = Hangs(config.stuck_after_seconds, exits=config.exit_when_stuck)
    watchdog = Watchdog(hangs, lambda: os._exit(0))
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    with contextlib.ExitStack() as stack:
        listeners = list(map(stack.enter_context, bind(config.host, config.port)))
        for listener in listeners:
            _check_exposure(config, listener.getsockname()[0])
        address, port = listeners[0].getsockname()[:2]
        keys = read_keys(config)
        _check_cache_dir(config)
        if config.otlp is not None:
            check_otlp()
        raise_file_limit()
        max_connections = find_max_connections()
        claim, others = _claim(runtime, stack)
        around = Surroundings(others, fast_blas, urls(address, port), claim)
        service = _start(config, console, around, team)
        config = service.opener.config
        pool = _make_pool(service, config, around)
        try:
            app, limits = create_pool_app(pool, config, keys=keys), Limits(config.client_seconds, max_connections)
            http_config = HttpConfig(app, limits, lifespan="off", timeout_graceful_shutdown=CLOSE_SECONDS)
            report = partial(_show_banner, console, service, config, around)
            handover = None
            if config.handover is not None:
                handover = Handover(pool, config, lambda: app.state.api.kept(store_of).count())
            server = _Server(http_config, pool, config.drain_seconds, report, handover)
            hangs.engines = lambda: pool.watched
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in `handling`
                watchdog.take(signal.SIGINT)
            asyncio.run(_serve(server, config, listeners, watchdog, _make_upkeep(server, config, claim)))
        finally:
            # The process ends in a moment anyway; a signal now would only change the exit status.
            watchdog.on_signal = lambda: None
            watchdog.end()
            pool.stop()
        return server.status


def _check_exposure(config: ServerConfig, address: str) -> None:
    if not config.needs_key and not config.insecure_no_key and not is_for_this_machine(address):
        raise ConfigError(
            f"other machines can reach {config.host}, and without a key anyone there could use this server: give "
            "--api-key-file FILE, or --insecure-no-key if that is meant"
        )


def raise_file_limit() -> None:
    """Lets the process open more files: the soft limit is 256 in a terminal of macOS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_cache_dir(config: ServerConfig) -> None:
    """Raises StartError where a folder cannot be used, and DiskInUse where another server has it open."""
    if config.cache_disk_bytes is None:
        return
    folder = Path(config.cache_dir).expanduser()
    with told_as(StartError, f"the cache folder {folder} cannot be used"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    exclude_from_backups(folder)
    source = source_of(config.models[0])
    own_folder = model_folders.place(folder, source.id, weights.fingerprint(source.path))
    if model_folders.is_in_use(own_folder):
        raise DiskInUse(own_folder)


def _claim(runtime: Path, stack: contextlib.ExitStack) -> tuple[OwnClaim | None, list[Claim]]:
    try:
        own, others = memory_budget.take(runtime, Claim(os.getpid(), "", 0, ""))
    except OSError as error:
        logger.warning("other servers on this machine are not seen: %s", error)
        return None, []
    stack.callback(own.close)
    return own, others


def _start(config: ServerConfig, console: Console, around: Surroundings, team: Team) -> Service:
    with interruptible(), _progress(console, model_id(config.models[0])) as tell:
        service = open_service(config, around.others, tell, team.ranks, team.leader)
        around.tell(_in_use([service.model.id], config), service.memory.weights_bytes + service.memory.budget_bytes)
        if warning := slowness(service):
            console.print(warning, markup=False)
        tell("trying it out")
        # Loaded objects stay: searching them for garbage would stop all threads for a tenth of a second.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_SECONDS)
        service.start()
    return service


def _in_use(models: Iterable[str], config: ServerConfig) -> str:
    """The models whose files must stay, as a claim names them."""
    return ", ".join([*models, *filter(None, [config.draft_model])])


def _make_pool(service: Service, config: ServerConfig, around: Surroundings) -> ModelPool:
    first, opener = service.opened.source, service.opener
    others = [source_of(name) for name in config.models[1:]]
    taken = {name for source in (first, *others) for name in (source.id, source.name)} & set(service.opened.variants)
    if taken:
        raise StartError(f"{min(taken)} is the name of a model and of an adapter; give the adapter another one")
    sources = [first, *(replace(first.plain, adapter=name) for name in service.opened.variants), *others]
    settings = PoolSettings(
        opener.memory,
        max_models=config.max_models,
        keep_alive_seconds=None if config.keep_alive is None else parse_keep_alive(config.keep_alive),
        aliases=tuple(map(parse_alias, config.aliases)),
        default_id=first.name,
        wire=lambda num_bytes, is_quiet: service.wiring.update(num_bytes, is_quiet=is_quiet),
    )
    # Of a divided model no other can take the place: it is loaded on no other machine.
    catalog = Catalog(sources, has_others=config.max_models != 1 and not service.engine.is_divided)
    if config.heals:
        _check_heals(config, [source.name for source in catalog.all()])
    pool = ModelPool(catalog, [service.opened], opener, settings)
    budgets, limit = pool.budgets, 0

    def follow_budgets() -> None:
        nonlocal limit
        last, limit = limit, memory_budget.choose_pool_bytes(budgets.taken_bytes - budgets.weights_bytes)
        if limit != last:  # MLX answers once the step under way ends, and all threads wait meanwhile
            mx.set_cache_limit(limit)
        needs = {"weights_bytes": budgets.weights_bytes, "needed_bytes": budgets.needed_bytes}
        is_fixed = config.cache_memory_bytes is not None
        around.tell(_in_use(pool.engines, config), budgets.taken_bytes, **({} if is_fixed else needs))

    budgets.on_change = follow_budgets
    return pool


def _check_heals(config: ServerConfig, served: Sequence[str]) -> None:
    """Warns of a heal that no served model is meant by."""
    for heal in config.heals:
        pattern, _ = parse_heal(heal)
        if not any(fnmatchcase(name, pattern) for name in served):
            logger.warning("--heal %s heals nothing: no model here is called %s", heal, pattern)


@contextlib.contextmanager
def _progress(console: Console, model: str) -> Iterator[Callable[[str], object]]:
    """Yields what shows a step in place of the last; on a terminal only."""
    if not (console.is_terminal and sys.stderr.isatty()):
        yield lambda step: logger.debug("%s: %s", model, step)
        return
    # The only one, by `configure_logging`.
    handler: logging.StreamHandler[Any] = cast("Any", logging.getLogger().handlers[0])
    with console.status(f"Loading {escape(model)} …") as status:
        # A process that ended now would leave the terminal without a cursor.
        console.show_cursor(True)
        # While the line is shown, standard error appears above it.
        stream = handler.setStream(sys.stderr)
        try:
            yield lambda step: status.update(f"Loading {escape(model)}: {escape(step)} …")
        finally:
            handler.setStream(stream or sys.__stderr__)


def bind(host: str, port: int) -> list[socket.socket]:
    """A socket that does not listen yet; for `localhost` one for each address. Raises StartError."""
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise StartError(f"{host!r} is no address to listen on: {error}") from error
    addresses = list(dict.fromkeys((entry[0], str(entry[4][0])) for entry in entries))
    if all(is_for_this_machine(address) for _, address in addresses):
        # Clients try either first.
        addresses.sort(key=lambda address: address[0] is not socket.AF_INET)
    else:
        del addresses[1:]
    with contextlib.ExitStack() as stack:
        bound: list[socket.socket] = []
        for family, address in addresses:
            try:
                listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                _bind(listener, address, bound[0].getsockname()[1] if bound else port)
                bound.append(listener)
            except OSError as error:
                if not bound or error.errno == errno.EADDRINUSE:
                    raise _cannot_listen(host, port, error) from error
        stack.pop_all()
    return bound


def _bind(listener: socket.socket, address: str, port: int) -> None:
    """Raises OSError. On macOS an address can be had beside a program that listens on all of them: so it is asked."""
    with socket.socket(listener.family, socket.SOCK_STREAM) as caller:
        caller.settimeout(CONNECT_SECONDS)
        asked = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
        if port and caller.connect_ex((asked, port)) == 0 and caller.getsockname() != caller.getpeername():
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))


def _cannot_listen(host: str, port: int, error: OSError) -> StartError:
    if error.errno == errno.EADDRINUSE:
        return StartError(f"port {port} of {host} is in use; choose another with --port, or 0 for any free one")
    if error.errno in (errno.EACCES, errno.EPERM):
        return StartError(f"port {port} needs more rights than this user has; choose one above 1023 with --port")
    return StartError(f"cannot listen on {host}, port {port}: {error.strerror}")


class _Server(uvicorn.Server):
    """Ends gently at the first signal, at once at the second. Event loop only."""

    config: HttpConfig

    def __init__(
        self,
        config: HttpConfig,
        pool: ModelPool,
        drain_seconds: float,
        report: Callable[[], None],
        handover: Handover | None = None,
    ) -> None:
        """`report` is called once requests can come."""
        super().__init__(config)
        self._handover = handover
        self.app, self.pool = cast(Starlette, config.app), pool
        self._drain_seconds, self._report = drain_seconds, report
        self.draining: asyncio.Task[None] | None = None
        self.status = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: uvicorn would send itself signals again at the end and change the exit status."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # asyncio takes one number for how many it accepts at once and how many the kernel lets wait.
            listener.listen(KERNEL_BACKLOG)
        asyncio.get_running_loop().set_exception_handler(self.config.handle_error)
        self._report()

    def fail(self) -> None:
        """Ends the server with an error, so that launchd or systemd starts it again."""
        if self.draining is None:
            logger.critical("the engine of a model has ended by itself, so the server ends, to be started again")
            self.status = 1
            signal.raise_signal(signal.SIGTERM)

    def signalled(self) -> None:
        num_running = self.pool.num_running
        if self.draining is not None:
            logger.warning("stopped at once%s", ": answers that were running are cut off" if num_running else "")
            logging.shutdown()
            # The worker may be inside a step, and an interpreter that ends around it would abort noisily.
            os._exit(130)
        if self._handover is None:
            start_draining(self.app)
        self.draining = asyncio.get_running_loop().create_task(self._drain(num_running))

    async def _drain(self, num_running: int) -> None:
        """With a handover, clients are turned away once the other server has what they would ask it to go on with."""
        deadline = time.monotonic() + self._drain_seconds
        if self._handover is not None:
            await self._handover.send(HANDOVER_PART * self._drain_seconds)
            start_draining(self.app)
        if num_running:
            logger.info("stopping: %d running, up to %g s to finish", num_running, deadline - time.monotonic())
        left_seconds = deadline - time.monotonic()
        if not await self.pool.drain(left_seconds * (1 if self._handover is None else HANDOVER_PART)):
            logger.warning("stopping: what still runs ends now")
        if self._handover is not None:
            await self._handover.send(deadline - time.monotonic())
            await self._handover.tell()
        await asyncio.to_thread(self.pool.stop)
        self.should_exit = True


def _make_upkeep(server: _Server, config: ServerConfig, claim: OwnClaim | None) -> Upkeep:
    machine = read_machine(mx.device_info())
    pressure = None if machine.is_card else partial(memory_budget.read_pressure, platform.system())
    share = None
    if claim is not None and config.cache_memory_bytes is None:
        share = partial(claim.find_share, memory_budget.usable_bytes(machine))
    return Upkeep(server.pool, server.fail, pressure, share)


async def _serve(
    server: _Server, config: ServerConfig, listeners: list[socket.socket], watchdog: Watchdog, upkeep: Upkeep
) -> None:
    server.pool.watch()
    loop, state = asyncio.get_running_loop(), server.app.state.api

    def post(act: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(act)

    watchdog.hangs.post, watchdog.on_signal = post, partial(post, server.signalled)
    if config.api_keys_file is not None:
        watchdog.take(signal.SIGHUP, partial(post, partial(_reload_keys, server.app, config)))
    rounds = loop.create_task(upkeep.run())
    try:
        await server.serve(sockets=listeners)
    except OSError as error:
        raise _cannot_listen(config.host, config.port, error) from error
    finally:
        rounds.cancel()
    if server.draining is not None:
        await server.draining
    watchdog.end()
    if state.background:
        # Responses in the background are stored with their text so far.
        await asyncio.wait(state.background, timeout=STORE_SECONDS)
    await asyncio.to_thread(state.close)
    if state.tracing is not None:
        await asyncio.to_thread(state.tracing.close)


def _reload_keys(app: Starlette, config: ServerConfig) -> None:
    try:
        keys = read_keys(config)
    except ConfigError as error:
        logger.error("the keys stay as they were: %s", error)
        return
    app.state.api.keys = keys
    logger.info("the file of keys was read again; it has %d", len(keys.keys))


def _show_banner(console: Console, service: Service, config: ServerConfig, around: Surroundings) -> None:
    for label, text in facts(service, config, around):
        console.print(f"[bold]{label:<9}[/bold] {escape(text)}")
    example = example_call(around.urls[0], service.asked_for.id, config.needs_key)
    page = f"Open {around.urls[0]}/ in a browser to watch it. " if config.console else ""
    console.print(f"\nTry it:\n{example}\n\n{page}Ctrl-C stops the server.\n", markup=False)
