"""Several servers behind HAProxy with `deploy/haproxy.cfg`: each conversation stays where its state is."""

import contextlib
import http.client
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from server.api.sessions import SESSION_HEADERS, SESSION_METADATA
from tests.support.server_process import Process

HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin:/usr/local/bin:/usr/bin")
WAIT_SECONDS = 300.0
NUM_CONVERSATIONS, NUM_TURNS = 8, 4
SYSTEM = {"role": "system", "content": "Answer in few words."}
FORMS = ("in the header", "in the body", "absent")

pytestmark = pytest.mark.alone("two servers of three processes each keep six cores busy")
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="haproxy is missing; apt-get install haproxy brings it")


ROOT = Path(__file__).parents[2]
FILE = (ROOT / "deploy" / "haproxy.cfg").read_text(encoding="utf-8")


def configured(replicas: Sequence[str], listen: str, admin_socket: str) -> str:
    """Returns the file with what a person changes in it: the servers, the address, the socket."""
    servers = "\n".join(f"    server {replica} {replica}" for replica in replicas)
    text = re.sub(r"(?:    server \S+ \S+\n)+", f"{servers}\n", FILE, count=1)
    text = re.sub(r"^    bind .*$", f"    bind {listen}", text, count=1, flags=re.MULTILINE)
    return text.replace("/run/haproxy/admin.sock", admin_socket)


def test_a_session_is_looked_for_where_the_servers_look_for_it() -> None:
    rules = [line.split(maxsplit=2)[2] for line in FILE.splitlines() if "set-var(txn.session)" in line]
    headers = [found[1] for rule in rules if (found := re.match(r"req\.hdr\((.+?)\)", rule))]
    assert headers == list(SESSION_HEADERS)
    in_bodies = [found[1] for rule in rules if (found := re.match(r"req\.body,json_query\('\$\.(.+?)'\)", rule))]
    metadata = [f"metadata.{name}" for name in SESSION_METADATA]
    assert in_bodies[:7] == ["session_id", "prompt_cache_key", *metadata, "conversation", "conversation.id"]
    # The rules behind them are those of docs/scale.md for a request without a session.
    parts = ("'$.conversation.id'", "txn.stored", "messages[1]", "messages[0]", "input[0]", "'$.input'", "'$.prompt'")
    order = [next(number for number, rule in enumerate(rules) if part in rule) for part in parts]
    assert order == list(range(order[0], len(rules)))
    assert all("if of_session" in rule or "if !named" in rule for rule in rules)


def test_the_docs_and_the_file_name_the_same_numbers() -> None:
    docs = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert "deploy/haproxy.cfg" in docs and "first 1 MiB" in docs and "tune.bufsize 1048576" in FILE
    assert "for 24 hours" in docs and FILE.count("expire 24h") == 2
    assert FILE.count("CHANGE:") == 2


@needs_haproxy
@pytest.mark.parametrize("replica", ["127.0.0.1:8081", "localhost:8081"])
def test_haproxy_takes_the_file(replica: str, tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(configured((replica, "127.0.0.1:9"), "127.0.0.1:8000", str(tmp_path / "admin")))
    for path in (file, ROOT / "deploy" / "haproxy.cfg"):
        checked = subprocess.run([str(HAPROXY), "-c", "-f", str(path)], capture_output=True, text=True)
        assert (checked.returncode, checked.stderr.count("WARNING")) == (0, 0), checked.stderr


@dataclass
class Conversation:
    """One client's, and where its answers came from."""

    name: str
    form: str
    messages: list[dict[str, str]] = field(default_factory=lambda: [SYSTEM])
    served_by: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0

    def turn(self, port: int) -> None:
        """Asks once more; fails for anything but an answer."""
        number = len(self.served_by)
        self.messages.append({"role": "user", "content": f"Question {number} of {self.name}: what is the capital?"})
        fields = {"session_id": self.name} if self.form == "in the body" else {}
        headers = {"X-Session-Id": self.name} if self.form == "in the header" else {}
        body = {"messages": self.messages, "max_tokens": 12, "ignore_eos": True, **fields}
        answer = post(port, body, headers)
        self.served_by.append(answer.server)
        usage = answer.body["usage"]
        self.num_tokens += usage["prompt_tokens"]
        self.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        self.messages.append(answer.body["choices"][0]["message"])


@dataclass(frozen=True)
class Answered:
    """A whole answer."""

    server: str
    body: dict[str, Any]


def post(port: int, body: dict[str, Any], headers: dict[str, str], path: str = "/v1/chat/completions") -> Answered:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, (answer.status, text)
        return Answered(answer.headers["X-Served-By"], json.loads(text))


def get(port: int, path: str, headers: dict[str, str]) -> str:
    """Returns which server found what a path names."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200, (answer.status, answer.read())
        return str(answer.headers["X-Served-By"])


def converse(port: int, name: str, form: str) -> list[Conversation]:
    """Has all conversations go on at once, turn by turn."""
    conversations = [Conversation(f"{name} {number}", form) for number in range(NUM_CONVERSATIONS)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(NUM_TURNS):
            list(threads.map(lambda conversation: conversation.turn(port), conversations))
    return conversations


def cached_share(conversations: Sequence[Conversation]) -> float:
    return sum(each.num_cached for each in conversations) / sum(each.num_tokens for each in conversations)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that no other process is given in the block, and that one which is told of it may listen on."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()  # a socket that does not listen keeps the port from all others there
        yield port


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Cluster:
    """Replicas of the built-in model by name, and HAProxy in front of the first two."""

    def __init__(self, folder: Path) -> None:
        self._holding, self._socket = contextlib.ExitStack(), str(folder / "admin.sock")
        self.port, *ports = [self._holding.enter_context(held_port()) for _ in range(4)]
        self.ports = dict(zip(("first", "second", "third"), ports, strict=True))
        self._replicas: dict[str, Process] = {}
        for name in ("first", "second"):
            self.start(name)
        file = folder / "haproxy.cfg"
        addresses = [self.address("first"), self.address("second")]
        file.write_text(configured(addresses, f"127.0.0.1:{self.port}", self._socket))
        self._proxy = subprocess.Popen([str(HAPROXY), "-db", "-f", str(file)], stderr=subprocess.DEVNULL)

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def start(self, name: str) -> None:
        """Starts a server, or starts it again at the same address."""
        self._replicas[name] = Process("demo", "--port", str(self.ports[name]), "--name", name)

    def wait_for(self, name: str, state: str = "UP") -> None:
        """Returns once HAProxy sees a server so."""
        wait_until(lambda: self._state_of(self.address(name)) == state)

    def stop(self, name: str) -> None:
        """Stops a server as its service manager would."""
        process = self._replicas.pop(name)
        process.signal(15)
        assert process.wait() == 0

    def kill(self, name: str) -> None:
        """Ends a server as a power cut would."""
        self._replicas.pop(name).close()

    def command(self, *lines: str) -> str:
        """Sends commands to HAProxy and returns what it says."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._socket)
            connection.sendall(("; ".join(lines) + "\n").encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def close(self) -> None:
        for replica in self._replicas.values():
            replica.close()
        self._proxy.kill()
        self._proxy.wait()
        self._holding.close()

    def _state_of(self, server: str) -> str | None:
        with contextlib.suppress(OSError):
            rows = [line.split(",") for line in self.command("show stat").splitlines()]
            return next((row[17] for row in rows if row[:2] == ["replicas", server]), None)
        return None


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("gateway"))
    try:
        for name in ("first", "second"):
            cluster.wait_for(name)
        yield cluster
    finally:
        cluster.close()


@needs_haproxy
def test_no_conversation_is_split_and_as_much_is_cached_as_by_one_server(cluster: Cluster) -> None:
    share_of_one = cached_share(converse(cluster.ports["first"], "alone", "in the header"))
    assert share_of_one > 0.5
    for form in FORMS:
        conversations = converse(cluster.port, form, form)
        assert all(len(set(each.served_by)) == 1 for each in conversations), [c.served_by for c in conversations]
        assert {each.served_by[0] for each in conversations} == {"first", "second"}
        assert cached_share(conversations) > share_of_one - 0.03


@needs_haproxy
def test_keys_part_what_has_the_same_name(cluster: Cluster) -> None:
    def served_by(key: str) -> str:
        body = {"messages": [SYSTEM, {"role": "user", "content": "One text for all."}], "max_tokens": 1}
        return post(cluster.port, body, {"Authorization": f"Bearer {key}"}).server

    served = {key: {served_by(key) for _ in range(3)} for key in "abcdef"}
    assert all(len(names) == 1 for names in served.values())
    assert len(set.union(*served.values())) == 2


@needs_haproxy
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_key": "k"},
        {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})}},
        {"metadata": {"chat_id": "c"}},
        {"conversation": {"id": "v"}},
    ],
)
def test_each_name_of_a_session_keeps_it_in_one_place(cluster: Cluster, fields: dict[str, Any]) -> None:
    bodies = [{"messages": [{"role": "user", "content": f"Text {n}"}], "max_tokens": 1, **fields} for n in range(4)]
    assert len({post(cluster.port, body, {}).server for body in bodies}) == 1


@needs_haproxy
@pytest.mark.parametrize("key", ["", "a key"])
def test_what_goes_on_from_a_stored_response_reaches_the_server_that_keeps_it(cluster: Cluster, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def respond(text: str, **fields: Any) -> Answered:
        return post(cluster.port, {"input": text, "max_output_tokens": 2, **fields}, headers, "/v1/responses")

    firsts = [respond(f"First of {number}, {key}") for number in range(4)]
    assert {first.server for first in firsts} == {"first", "second"}
    for first in firsts:
        # Neither the same words elsewhere nor the name of a session at the other server has it go there.
        others = [respond("Go on.", previous_response_id=first.body["id"], prompt_cache_key="k") for _ in range(2)]
        others.append(respond("And now?", previous_response_id=others[0].body["id"]))
        assert {other.server for other in others} == {first.server}
        assert get(cluster.port, f"/v1/responses/{first.body['id']}/input_items", headers) == first.server


@needs_haproxy
def test_a_stored_conversation_is_found_where_it_was_made(cluster: Cluster) -> None:
    made = [post(cluster.port, {}, {}, "/v1/conversations") for _ in range(4)]
    assert {one.server for one in made} == {"first", "second"}
    for one, is_object in zip(made, (True, False) * 2, strict=True):
        name = one.body["id"]
        body = {"input": "Hi", "max_output_tokens": 2, "conversation": {"id": name} if is_object else name}
        assert post(cluster.port, body, {}, "/v1/responses").server == one.server
        assert get(cluster.port, f"/v1/conversations/{name}/items", {}) == one.server


@needs_haproxy
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(cluster: Cluster, stream: bool) -> None:
    def num_open() -> int:
        return sum(_open_requests(cluster.ports[name]) for name in ("first", "second"))

    body = {"messages": [{"role": "user", "content": "Go on."}], "ignore_eos": True, "stream": stream}
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=WAIT_SECONDS)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        connection.getresponse().read(20)
    wait_until(lambda: num_open() == 1)
    # Whatever else holds the socket open.
    connection.sock.shutdown(socket.SHUT_RDWR)
    # Left alone it runs until the context of the model is full, which takes longer than this waits.
    wait_until(lambda: num_open() == 0)


def _open_requests(port: int) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)) as connection:
        connection.request("GET", "/health")
        (engine,) = json.loads(connection.getresponse().read())["engines"].values()
        return int(engine["open_requests"])


def wait_until_new_ones_reach(cluster: Cluster, servers: set[str], name: str) -> None:
    """Begins conversations, eight at a time, until those of one time are spread over all `servers` and no other.

    HAProxy asks a server once in a while how it is; where that takes long once, it sends it nothing for a moment.
    """
    times = itertools.count()

    def are_spread() -> bool:
        begun = converse(cluster.port, f"{name} {next(times)}", "absent")
        return {each.served_by[-1] for each in begun} == servers

    wait_until(are_spread)


@needs_haproxy
@pytest.mark.usual
def test_nobody_notices_that_servers_come_and_go(cluster: Cluster) -> None:
    conversations = [Conversation(f"through it all {number}", FORMS[number % 3]) for number in range(6)]

    def all_go_on() -> Counter[str]:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda conversation: conversation.turn(cluster.port), conversations))
        return Counter(each.served_by[-1] for each in conversations)

    assert set(all_go_on()) == {"first", "second"}
    with ThreadPoolExecutor(1) as stopping:
        stopped = stopping.submit(cluster.stop, "first")
        while not stopped.done():
            all_go_on()
        stopped.result()
    assert set(all_go_on()) == {"second"}

    cluster.start("first")
    cluster.wait_for("first")
    assert set(all_go_on()) == {"second"}
    wait_until_new_ones_reach(cluster, {"first", "second"}, "after the return")

    cluster.kill("second")
    assert set(all_go_on()) == {"first"}

    cluster.start("third")
    address = cluster.address("third")
    server = f"replicas/{address}"
    cluster.command(f"add server {server} {address} check inter 1s")
    cluster.command(f"enable health {server}", f"set server {server} state ready")
    cluster.wait_for("third")
    assert set(all_go_on()) == {"first"}
    wait_until_new_ones_reach(cluster, {"first", "third"}, "with a third")
