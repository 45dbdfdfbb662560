"""Calls that clients send back changed, in the model's own words.

Clients send a call's arguments back with other orders of keys, other forms of numbers, or the defaults that the
tool's schema names; a prompt that shows them so parts from the state of the answer. A call is shown as the model
wrote it if it has the id and the name of a call of the namespace, and arguments equal by value: where any value
differs, the call stays as sent. A call without an id is known by name and arguments alone.

Calls are remembered in memory up to `MAX_BYTES`, and with `--cache-disk` in a file, but for those of requests whose
state is not written to disk. For any thread.
"""

import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple, TypeAlias

from models.output.call_values import properties_of, referred
from models.prompt.shapes import Message, Tools
from server.diagnosis.causes import Heal, HealKind

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 32 << 20
"""Most bytes of all calls in memory. The file is shortened to as much once it has twice as much."""
CALL_BYTES: Final = 400
"""What remembering a call takes, besides its arguments."""
FILE_NAME: Final = "calls.jsonl"
_AMBIGUOUS: Final = ""
"""Stands for two ways in which the model wrote equal calls."""


def canonical(value: Any, schema: Any = None, root: Any = None) -> Any:
    """The same for values that differ in order of keys, form of numbers, or members equal to their `default`."""
    root = schema if root is None else root
    if isinstance(schema, Mapping) and "$ref" in schema:
        schema = referred(schema["$ref"], root)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [canonical(one, items, root) for one in value]
    if not isinstance(value, Mapping):
        return value
    schemas = properties_of(schema)
    members = ((name, member, schemas.get(name)) for name, member in sorted(value.items()))
    return {name: canonical(member, one, root) for name, member, one in members if not _is_default(member, one)}


def _is_default(member: Any, schema: Any) -> bool:
    is_named = isinstance(schema, Mapping) and "default" in schema
    return is_named and json.dumps(canonical(member)) == json.dumps(canonical(schema["default"]))


class OwnCall(NamedTuple):
    """A call as the model wrote it."""

    namespace: str
    session: str | None
    key: str
    words: str
    """The arguments' JSON text."""

    @property
    def num_bytes(self) -> int:
        return CALL_BYTES + len(self.words)


_Call: TypeAlias = Mapping[str, Any]
_Schemas: TypeAlias = Mapping[str, Any]


class OwnCalls:
    """The calls of answers, the least recently used forgotten."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file, if there is to be one; calls are read from it."""
        self._path = path
        self._calls = OrderedDict[str, OwnCall]()
        self._lock, self._writing = Lock(), Lock()
        self.num_bytes = self._num_written = 0
        with _told():
            for call in self._stored():
                self._put(call)
                self._num_written += call.num_bytes

    def remember(
        self, namespace: str, session: str | None, reply: Sequence[Message], tools: Tools, *, is_kept: bool
    ) -> list[OwnCall]:
        """Takes the calls of a reply as clients send it back; returns those to be written, if it `is_kept`."""
        schemas, calls = _schemas_of(tools), list[OwnCall]()
        for call in (call for message in reply for call in message.get("tool_calls") or ()):
            if isinstance(arguments := call["function"].get("arguments"), Mapping):
                (key,) = _keys(namespace, call, schemas, [call.get("id")])
                calls.append(OwnCall(namespace, session, key, json.dumps(arguments)))
        with self._lock:
            for one in calls:
                self._put(one)
        return calls if is_kept and self._path is not None else []

    def healed(self, namespace: str, messages: Sequence[Message], tools: Tools) -> tuple[list[Message], list[Heal]]:
        """The messages with calls in the model's own words, and which were changed."""
        result, changed = list(messages), list[Heal]()
        if not self._calls:
            return result, changed
        schemas = _schemas_of(tools)
        for index, message in enumerate(messages):
            calls = message.get("tool_calls") or ()
            own = [self._own(namespace, call, schemas) for call in calls]
            if any(one is not call for one, call in zip(own, calls, strict=True)):
                result[index] = {**message, "tool_calls": own}
                changed.append(Heal(HealKind.CALLS, index))
        return result, changed

    def _own(self, namespace: str, call: _Call, schemas: _Schemas) -> _Call:
        function = call["function"]
        if not isinstance(arguments := function.get("arguments"), Mapping):
            return call
        keys = _keys(namespace, call, schemas, dict.fromkeys((call.get("id"), None)))
        with self._lock:
            known = next((self._calls[key] for key in keys if key in self._calls), None)
            if known is not None:
                self._calls.move_to_end(known.key)
        if known is None or known.words in (_AMBIGUOUS, json.dumps(arguments)):
            return call
        return {**call, "function": {**function, "arguments": json.loads(known.words)}}

    def _put(self, call: OwnCall) -> None:
        before = self._calls.pop(call.key, None)
        if before is not None and before.words != call.words:
            call = call._replace(words=_AMBIGUOUS)
        self._calls[call.key] = call
        self.num_bytes += call.num_bytes - (before.num_bytes if before is not None else 0)
        while self.num_bytes > MAX_BYTES:
            self.num_bytes -= self._calls.popitem(last=False)[1].num_bytes

    # -- the file, a call on each line

    def write(self, calls: Sequence[OwnCall]) -> None:
        """Adds calls to the file. What cannot be written is forgotten at the next start."""
        with self._writing, _told():
            self._append(calls)
            if self._num_written > 2 * MAX_BYTES:
                self._rewrite(lambda _: True)

    def forget(self, namespace: str, session: str | None = None) -> None:
        """Drops a namespace's calls, or those of one of its sessions, from the file too."""

        def stays(call: OwnCall) -> bool:
            return call.namespace != namespace or session not in (None, call.session)

        with self._lock:
            self._calls = OrderedDict((key, call) for key, call in self._calls.items() if stays(call))
            self.num_bytes = sum(call.num_bytes for call in self._calls.values())
        if self._path is not None:
            with self._writing, _told():
                self._rewrite(stays)

    def _stored(self) -> Iterator[OwnCall]:
        if self._path is not None and self._path.exists():
            for line in self._path.read_text(encoding="ascii", errors="replace").splitlines():
                with suppress(ValueError, TypeError):  # a line of another version, or cut off by a full disk
                    yield OwnCall(*json.loads(line))

    def _append(self, calls: Iterable[OwnCall], path: Path | None = None) -> None:
        path = path or self._path
        assert path is not None, "only calls to be kept are written"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Calls hold what was said, so only their owner may read the file.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
            file.write(b"".join(json.dumps(call).encode() + b"\n" for call in calls))
        self._num_written += sum(call.num_bytes for call in calls)

    def _rewrite(self, stays: Callable[[OwnCall], bool]) -> None:
        """Keeps the newest of the calls that stay."""
        kept, left = list[OwnCall](), MAX_BYTES
        for call in filter(stays, reversed([*self._stored()])):
            left -= call.num_bytes
            if left >= 0:
                kept.append(call)
        assert self._path is not None, "there is a file"
        new, self._num_written = self._path.with_name(f"{FILE_NAME}.{os.getpid()}"), 0
        self._append(kept[::-1], new)
        new.replace(self._path)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("calls are remembered in memory only: %s", error)


def _schemas_of(tools: Tools) -> _Schemas:
    functions = (tool.get("function") or tool for tool in tools or ())
    return {function["name"]: function.get("parameters") for function in functions}


def _keys(namespace: str, call: _Call, schemas: _Schemas, ids: Iterable[str | None]) -> list[str]:
    """What a call and its like have in common, with each of the ids."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    text = json.dumps(canonical(arguments, schemas.get(name)))
    texts = (json.dumps([namespace, call_id, name, text]) for call_id in ids)
    return [hashlib.blake2b(one.encode(), digest_size=16).hexdigest() for one in texts]
