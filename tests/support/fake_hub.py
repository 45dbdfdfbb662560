"""A tiny model hub on loopback, as much of one as the real client talks to, and with faults on request."""

import contextlib
import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESUME_SECONDS = 300.0
"""A paused download goes on by then, so that a test which fails does not hang."""


class FakeHub:
    """Repositories by name, each a dict of file contents; what was asked is in `requests`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.unavailable: set[str] = set()
        self.cut_after_bytes: int | None = None
        """Close the connection after this many bytes of weights."""
        self.pause_after_bytes: int | None = None
        """Send nothing more after this many bytes of weights, until `resume` is set."""
        self.resume = threading.Event()
        self.honours_ranges = True
        self.busy_answers = 0
        """So many requests for weights are answered with status 503 first."""
        self.status: int | None = None
        """Answer everything with this status."""
        self.weights_are_at: str | None = None
        """Redirect requests for weights to this address."""
        self.tokens: list[str | None] = []
        """Authorization header of each request."""
        self.requests: list[tuple[str, str, str | None]] = []
        """Method, path and Range header of each request."""

    def ranges_of(self, name: str) -> list[str | None]:
        """Returns the Range headers with which `name` was fetched."""
        return [header for method, path, header in self.requests if method == "GET" and path.endswith(f"/{name}")]


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    """Yields a hub that listens on a free port of 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        hub = self.server.hub  # type: ignore[attr-defined]
        assert isinstance(hub, FakeHub)
        return hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Keeps the test output clean."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.tokens.append(self.headers.get("Authorization"))
        if self.hub.status is not None:
            return self._refuse(self.hub.status, "")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._answer_api("/".join(parts[2:4]), parts[4:])
        elif parts[2:3] == ["resolve"]:
            self._answer_file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._refuse(404, "EntryNotFound")
        return None

    def _answer_api(self, repository: str, rest: list[str]) -> None:
        files = self.hub.repositories.get(repository)
        if files is None:
            return self._refuse(404, "RepoNotFound")
        if repository in self.hub.unavailable:
            return self._refuse(503, "")
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if rest[:1] == ["tree"]:
            return self._send_json([_tree_entry(name, data) for name, data in files.items()])
        siblings = [_sibling(name, data) for name, data in files.items()]
        answer: dict[str, Any] = {"id": repository, "sha": COMMIT, "siblings": siblings}
        with contextlib.suppress(KeyError, ValueError):  # the hub tells so much of a configuration that it can read
            answer["config"] = {"model_type": json.loads(files["config.json"])["model_type"]}
        return self._send_json(answer)

    def _answer_file(self, repository: str, name: str) -> None:
        if repository in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        data = self.hub.repositories[repository][name]
        if self.hub.busy_answers and self.command == "GET" and name.endswith(".safetensors"):
            self.hub.busy_answers -= 1
            return self._refuse(503, "")
        if self.hub.weights_are_at and self.command == "GET" and name.endswith(".safetensors"):
            return self._redirect(self.hub.weights_are_at + self.path)
        asked = self.headers.get("Range") if self.hub.honours_ranges else None
        start = int((asked or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("ETag", f'"{_etag(name, data)}"')
        self.end_headers()
        if self.command == "GET":
            self._send_body(name, data[start:])
        return None

    def _send_body(self, name: str, data: bytes) -> None:
        is_weights = name.endswith(".safetensors")
        pause, cut = (self.hub.pause_after_bytes, self.hub.cut_after_bytes) if is_weights else (None, None)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data[:pause][:cut])
            if pause is not None:
                self.hub.resume.wait(RESUME_SECONDS)
                self.wfile.write(data[pause:cut])
        if cut is not None and cut < len(data):
            self.close_connection = True

    def _redirect(self, url: str) -> None:
        self.send_response(302)
        self.send_header("Location", url)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@functools.lru_cache(maxsize=16)
def _digest(kind: str, data: bytes) -> str:
    return hashlib.new(kind, data).hexdigest()


def _etag(name: str, data: bytes) -> str:
    return _digest("sha256" if name.endswith(".safetensors") else "sha1", data)


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    lfs = {"sha256": _etag(name, data), "size": len(data), "pointerSize": 100}
    entry = {"rfilename": name, "size": len(data), "blobId": _etag(name, data)}
    return {**entry, "lfs": lfs} if name.endswith(".safetensors") else entry


def _tree_entry(name: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(data), "oid": _digest("sha1", data)}
    lfs = {"oid": _etag(name, data), "size": len(data), "pointerSize": 100}
    return {**entry, "lfs": lfs} if name.endswith(".safetensors") else entry
