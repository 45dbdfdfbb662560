"""Machines that hold one model together: how their processes start, find one another, and follow rank 0.

`mlx.launch` starts one command on every machine and tells each its rank; `--ranks N` starts processes of this machine
in the same way. Each rank joins MLX's group, whose sums go over the network, and connects to rank 0, whose turns
come there (`server.engine.ranks`). Rank 0 serves; the others listen to no port and answer nobody.
"""

import contextlib
import faulthandler
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from queue import Empty, SimpleQueue

import mlx.core as mx

from models import weights
from models.errors import ModelError, told_as
from models.loader import read_config
from models.ranks import ONE_RANK, Ranks, check_heads
from server.app.config import ConfigError, ServerConfig, StartError
from server.app.keys import read_private
from server.app.log import configure_logging
from server.app.service import open_service, source_of
from server.cli.keys import interruptible
from server.cli.watchdog import end_soon
from server.engine.ranks import BEAT_SECONDS, FollowingRank, LeadingRank

logger = logging.getLogger(__name__)

JOIN_SECONDS, END_SECONDS = 60.0, 5.0
RANK_VARIABLE, HOSTS_VARIABLE = "MLX_RANK", "MLX_HOSTFILE"
KEY_VARIABLE = "MLX_SERVE_RANK_KEY_FILE"
"""Where `--ranks` has its processes find the key: the variable of `--rank-key-file`."""


@dataclass(frozen=True)
class Team:
    """The machines, as one of them sees the others."""

    ranks: Ranks = ONE_RANK
    leader: LeadingRank | None = None
    """Rank 0's, of several."""
    follower: FollowingRank | None = None

    @classmethod
    def of(cls, ranks: Ranks, connections: Sequence[Connection]) -> "Team":
        """From now on each machine sees whether the others live."""
        if ranks.rank:
            return cls(ranks, follower=FollowingRank(connections[0], end_soon, partial(end_soon, None)))
        return cls(ranks, LeadingRank(connections, end_soon))

    def follow(self, config: ServerConfig) -> None:
        """Loads this rank's part of the model and follows rank 0 until that ends."""
        assert self.follower is not None
        try:
            service = open_service(config, ranks=self.ranks)
            assert service.model.grammars is not None
            service.engine.follow(self.follower, service.model.grammars.compile)
        except (StartError, ModelError):
            raise
        except Exception as error:
            if not self.follower.is_over(BEAT_SECONDS):  # else the error is of that
                logger.exception("machine %d has failed", self.ranks.rank)
                end_soon(str(error))
            threading.Event().wait()

    def end(self) -> None:
        """The other machines end too, and miss this one from now on."""
        side = self.leader or self.follower
        if side is not None:
            side.end()


@contextlib.contextmanager
def joined(config: ServerConfig, environment: Mapping[str, str]) -> Iterator[tuple[ServerConfig, Team]]:
    """Joins the other machines, if there are any. Raises ConfigError and StartError."""
    is_launched = RANK_VARIABLE in environment
    if config.rank_key_file is not None and not is_launched:
        raise ConfigError("--rank-key-file is for machines that mlx.launch starts; --ranks makes a key of its own")
    if config.ranks == 1 and not is_launched:
        yield config, Team()
        return
    _check(config)
    configure_logging(config.log_level, config.log_format)
    with contextlib.ExitStack() as stack:
        with tempfile.TemporaryDirectory(prefix="mlx-serve-ranks-") as folder:
            if not is_launched:
                config = _started(config, Path(folder), stack)
            team = _joined(_key(config))
        stack.callback(team.end)
        _compare(config, team.ranks)
        yield config, team


def _joined(key: bytes) -> Team:
    """Meets the other machines. In C, MLX waits for them without end, and lets no other thread run."""
    faulthandler.dump_traceback_later(JOIN_SECONDS, exit=True, file=sys.__stderr__ or 2)
    try:
        with told_as(StartError, "the machines do not find one another", RuntimeError, EOFError, AuthenticationError):
            with interruptible():
                ranks = Ranks(mx.distributed.init(strict=True))
            if ranks.rank:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which ends the others
            return Team.of(ranks, _connected(ranks, key))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _check(config: ServerConfig) -> None:
    refused = {
        "several models": len(config.models) > 1,
        "--adapter": bool(config.adapters),
        "--speculate draft=MODEL": config.draft_model is not None,
        "--cache-disk": config.cache_disk_bytes is not None,
        "--cache-bits": bool(config.cache_bits),
        "--handover": config.handover is not None,
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise ConfigError(f"a model that is divided among machines goes without {what}")
    source = source_of(config.models[0])
    check_heads(read_config(source.path)[0], source.id, config.ranks)


def _started(config: ServerConfig, folder: Path, stack: contextlib.ExitStack) -> ServerConfig:
    """Starts further processes as `mlx.launch` would; returns the settings of this one, which is rank 0."""
    hosts, key = folder / "hosts.json", folder / "key"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(config.ranks)]))
    key.touch(mode=0o600)
    key.write_text(secrets.token_urlsafe())
    told = {HOSTS_VARIABLE: str(hosts), KEY_VARIABLE: str(key)}
    for rank in range(1, config.ranks):
        own = {**os.environ, **told, RANK_VARIABLE: str(rank)}
        command = [sys.executable, "-m", "mlx_serve", *sys.argv[1:]]
        process = subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, start_new_session=True)
        stack.callback(_reap, process)
        logger.info("machine %d is process %d", rank, process.pid)
    os.environ.update({**told, RANK_VARIABLE: "0"})
    return replace(config, rank_key_file=str(key))


def _reap(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _key(config: ServerConfig) -> bytes:
    if config.rank_key_file is None:
        raise ConfigError("a model that is divided among machines needs --rank-key-file FILE, the same on each")
    path = Path(config.rank_key_file).expanduser()
    text, fault = read_private(path, f"--rank-key-file {path}")
    if fault or not text.strip():
        raise ConfigError(f"--rank-key-file {path} {fault or 'is empty'}")
    return text.strip().encode()


def _connected(ranks: Ranks, key: bytes) -> list[Connection]:
    """Control connections, which show at once that a machine is lost; MLX's group does not."""
    if ranks.rank:
        host, port = ranks.share(("", 0))
        connection = Client((host, port), authkey=key)
        connection.send_bytes(str(ranks.rank).encode())
        return [connection]
    connections, arrived = dict[int, Connection](), SimpleQueue[tuple[int, Connection]]()
    with Listener((_own_address(), 0)) as listener:
        threading.Thread(target=_accept, args=(listener, key, arrived.put), daemon=True).start()
        ranks.share(listener.address)
        while len(connections) < ranks.size - 1:
            try:
                rank, connection = arrived.get(timeout=JOIN_SECONDS / 2)
            except Empty:
                raise StartError("a machine has not come: is its --rank-key-file the same?") from None
            connections[rank] = connection
    return [connections[rank] for rank in sorted(connections)]


def _accept(listener: Listener, key: bytes, take: Callable[[tuple[int, Connection]], object]) -> None:
    """Hands over who has the key, with its rank. Whoever is silent keeps only a thread."""

    def welcome(connection: Connection) -> None:
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            take((int(connection.recv_bytes(16)), connection))
        except (AuthenticationError, OSError, EOFError, ValueError):
            logger.warning("somebody without the key of --rank-key-file wanted to join the machines")
            connection.close()

    with contextlib.suppress(OSError):  # the listener is closed
        while True:
            threading.Thread(target=welcome, args=(listener.accept(),), daemon=True).start()


def _own_address() -> str:
    """Where other machines reach this one, rank 0: as `mlx.launch` has it."""
    try:
        hosts = json.loads(Path(os.environ[HOSTS_VARIABLE]).read_text())
        return str(hosts[0][0]).rpartition(":")[0]
    except (KeyError, OSError, ValueError, LookupError):
        return socket.gethostbyname(socket.gethostname())


def _compare(config: ServerConfig, ranks: Ranks) -> None:
    """Raises StartError where the machines would not evaluate the same."""
    with told_as(StartError, "the model is not on every machine", StartError):
        try:
            files = weights.fingerprint(source_of(config.models[0]).path)
        except Exception as error:  # told to all, which would wait for this machine
            files = f"cannot be read: {error}"
        own = {name: version(name) for name in ("mlx", "mlx-lm", "mlx-serve")}
        own |= {"the model's files": files, "kind of device": str(mx.default_device())}
        settings = config.slots, config.context_tokens, config.chunk_tokens, config.share_heads, config.speculate
        own["settings"] = repr(settings)
        first, *others = ranks.gather(own)
        for rank, other in enumerate(others, 1):
            for what in own:
                if other[what] != first[what]:
                    raise StartError(f"{what}: machine {rank} has {other[what]}, machine 0 {first[what]}")
