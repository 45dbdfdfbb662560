"""The HAProxy configuration in front of several servers, for `mlx-serve gateway-config`. Pure.

A conversation stays with the server that holds its state: a stick table looks up its name with its client's key. The
name is the session, found where `server.api.session_id` finds it; without one it is the first message behind the
system prompt. New conversations go to the server with the fewest requests.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from server.api.session_id import SESSION_HEADERS, SESSION_METADATA
from server.app.config import ConfigError

DEFAULT_LISTEN = "127.0.0.1:8000"
DEFAULT_ADMIN_SOCKET = "/run/haproxy/admin.sock"
DEFAULT_BUFFER_BYTES = 1 << 20
MIN_BUFFER_BYTES = 16_384

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.*_-]+):([0-9]{1,5})")
_UNSAFE_IN_PATH = re.compile(r"[\s\"'#$\\]")


@dataclass(frozen=True)
class Gateway:
    """Parameters of one gateway; each address is `HOST:PORT`."""

    replicas: Sequence[str]
    listen: str = DEFAULT_LISTEN
    admin_socket: str = DEFAULT_ADMIN_SOCKET
    """Address where HAProxy takes commands: to add a replica, or to drain one."""
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    """Bytes of a body held, to look for the session in it and to send it again where a replica fails."""
    certificate: str | None = None
    """The PEM file of certificate and key; without one the gateway speaks plain HTTP."""

    def check(self) -> None:
        """Raises ConfigError for values that HAProxy would misunderstand."""
        if not self.replicas:
            raise ConfigError("--replica must name at least one server, as HOST:PORT")
        if len(set(self.replicas)) != len(self.replicas):
            raise ConfigError("--replica names a server twice")
        for flag, address in [("--listen", self.listen), *(("--replica", replica) for replica in self.replicas)]:
            _check_address(flag, address)
        for flag, path in (("--admin-socket", self.admin_socket), ("--certificate", self.certificate or "-")):
            if not path.isprintable() or not path or _UNSAFE_IN_PATH.search(path):
                raise ConfigError(f"{flag} is {path!r}; it must be a path without spaces, quotes, '#', '$' and '\\'")
        if self.buffer_bytes < MIN_BUFFER_BYTES:
            raise ConfigError(f"--buffer is {self.buffer_bytes}; it must be at least {MIN_BUFFER_BYTES}")


def gateway_config(gateway: Gateway) -> str:
    """Returns the text of `haproxy.cfg`; raises ConfigError."""
    gateway.check()
    certificate = f" ssl crt {gateway.certificate}" if gateway.certificate else ""
    return _TEMPLATE.format(
        socket=gateway.admin_socket,
        buffer_bytes=gateway.buffer_bytes,
        listen=gateway.listen + certificate,
        session="\n".join(f"    {line}" for line in (*_stored_lines(), *_session_lines())),
        servers="\n".join(f"    server {name_of(replica)} {replica}" for replica in gateway.replicas),
    )


def name_of(replica: str) -> str:
    """Returns HAProxy's name of the server at an address, independent of the other replicas."""
    return replica.replace("[", "").replace("]", "")


def _check_address(flag: str, address: str) -> None:
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ConfigError(f"{flag} is {address!r}; it must be HOST:PORT, such as 10.0.0.5:8080 or [::1]:8080")


def _session_lines() -> Iterator[str]:
    """Yields the rules that set `txn.session`; the first rule that finds a text wins."""
    path = """'path,regsub("^/(v1/)?sessions/",""),regsub("/(un)?pin$","")'"""
    yield f"http-request set-var(txn.session) {path} if of_session"
    for name in SESSION_HEADERS:
        yield _unless_named(f"req.hdr({name})")
    for name in ("session_id", "prompt_cache_key"):
        yield _unless_named(_body(name))
    # Agents put the session into the name of the user; any other name would keep all that a user does in one place.
    yield f"http-request set-var(txn.user) {_body('metadata.user_id')} if !named"
    yield "http-request set-var(txn.session) var(txn.user) if !named { var(txn.user) -m sub session }"
    for name in SESSION_METADATA:
        yield _unless_named(_body(f"metadata.{name}"))
    for name in ("conversation", "conversation.id"):
        yield _unless_named(_body(name))
    yield _unless_named("var(txn.stored)")
    yield from _first_message_lines()


def _stored_lines() -> Iterator[str]:
    """Yields the rules that set `txn.stored`: the id of stored content that a request continues or asks for.

    Such an id is the id of the request that stored it, behind a prefix of its own.
    """
    path = """'path,regsub("^(/v1)?/(responses|conversations)/[a-z]+_",""),field(1,"/")'"""
    yield f"http-request set-var(txn.stored) {path} if of_stored"
    for name in ("previous_response_id", "conversation", "conversation.id"):
        expression = f"""'req.body,json_query("$.{name}"),regsub("^[a-z]+_","")'"""
        yield f"http-request set-var(txn.stored) {expression} if !is_stored"


def _first_message_lines() -> Iterator[str]:
    """Yields the rules for a request without a session: the first text that is no system prompt."""
    yield f"http-request set-var(txn.role) {_body('messages[0].role')} if !named"
    yield "acl has_system var(txn.role) -m str system developer"
    for index, condition in ((1, " has_system"), (0, " !has_system")):
        yield _unless_named(_body(f"messages[{index}].content"), condition)
    yield _unless_named(f"{_body('input[0].content')}")
    for name in ("input", "prompt"):
        yield _unless_named(f"{_body(name)},bytes(0,512)")


def _body(path: str) -> str:
    return f"req.body,json_query('$.{path}')"


def _unless_named(expression: str, condition: str = "") -> str:
    return f"http-request set-var(txn.session) {expression} if !named{condition}"


_TEMPLATE = """\
# Made by `mlx-serve gateway-config`; needs HAProxy 2.4 or later. Check it with `haproxy -c -f FILE`.
global
    maxconn 4096
    # A body is read up to here before its server is chosen.
    tune.bufsize {buffer_bytes}
    stats socket {socket} mode 600 level admin expose-fd listeners

defaults
    mode http
    timeout connect 2s
    timeout http-request 60s
    timeout http-keep-alive 60s
    # An answer that is not streamed is silent until it is complete.
    timeout client 1h
    timeout server 1h
    timeout queue 60s
    timeout check 5s
    option http-buffer-request
    # A client that leaves cancels its request.
    option abortonclose
    # Else clients elsewhere would look like a person at the replica's own machine.
    option forwardfor
    # A server that has gone, or is stopping, has the request sent to another.
    option redispatch 1
    retries 2
    retry-on conn-failure empty-response 503

frontend gateway
    bind {listen}
    default_backend replicas

backend replicas
    balance leastconn
    option httpchk GET /health
    default-server check inter 1s fall 2 rise 1

    acl named var(txn.session) -m len 1:
    acl of_session path_reg ^(/v1)?/sessions/.
    acl is_stored var(txn.stored) -m len 1:
    acl of_stored path_reg ^(/v1)?/(responses|conversations)/[a-z]+_
{session}

    # Who has another key is somebody else, whatever the session is called.
    http-request set-var(txn.auth) req.hdr(x-api-key)
    http-request set-var(txn.auth) req.hdr(authorization)
    stick-table type binary len 20 size 200k expire 24h
    # Only the server that keeps what a request goes on from can answer it, wherever its session is.
    stick match 'var(txn.stored),concat(" ",txn.auth),sha1' table stored if is_stored
    stick on 'var(txn.session),concat(" ",txn.auth),sha1' if named
    http-request set-var(txn.path) path
    acl is_kept var(txn.path) -m end /responses /conversations
    stick store-response 'res.hdr(x-request-id),regsub("^req_",""),concat(" ",txn.auth),sha1' table stored if is_kept

{servers}

# A table of its own: HAProxy writes one entry for a request into each.
backend stored
    stick-table type binary len 20 size 200k expire 24h
"""
