"""What `mlx-serve doctor` prints. Raises DoctorError."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from models.texts import grouped, shared_length, size_text
from server.app.config import DEFAULT_URL, DoctorError
from server.app.log_events import percent_text, printable, seconds_text
from server.doctor.findings import Checkup, Finding, checkup_of, findings_of, savings_of
from server.engine.diagnosis import Cause

if TYPE_CHECKING:
    from server.doctor.recorded import Reader

TIMEOUT_SECONDS = 10.0


class Sessions:
    """Sessions that a key and a salt may see."""

    def __init__(self, url: str, api_key: str | None = None, cache_salt: str | None = None) -> None:
        """`url` may have `http://` and `/v1`, or not."""
        self.url = _base_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._query = f"?{urlencode({'cache_salt': cache_salt})}" if cache_salt else ""
        # A proxy for the web is of no use on the way to one's own machine.
        self._opener = build_opener(ProxyHandler({}))

    def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """All sessions with their turns, and the refusals."""
        listed = self._get("/v1/sessions")
        if listed is None or not isinstance(listed.get("data"), list):
            raise self._is_another()
        # A session may have been forgotten since the list was made.
        found = (self._read_one(str(session["id"]), session.get("namespace")) for session in listed["data"])
        return [session for session in found if session is not None], list(listed.get("refused", ()))

    def memory_note(self) -> str | None:
        """What the server says of memory, if that is short."""
        told = (self._get("/v1/stats") or {}).get("memory")
        kept = told.get("idle_limit_bytes") if isinstance(told, dict) else None
        if not isinstance(told, dict) or not isinstance(kept, int):
            return None
        kept_text = size_text(kept)
        return f"Memory of the machine: {told.get('pressure')}. Idle state is cut to {kept_text} until it has enough."

    def _read_one(self, session_id: str, namespace: str | None) -> dict[str, Any] | None:
        """Without key and salt, which limit what is seen, the server needs the session's namespace."""
        is_named = namespace and not self._headers and not self._query
        query = f"?{urlencode({'namespace': namespace})}" if is_named else ""
        return self._get(f"/v1/sessions/{quote(session_id, safe='')}{query}")

    def _get(self, path: str) -> dict[str, Any] | None:
        request = Request(self.url + path + self._query, headers=self._headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                body = json.load(answer)
        except HTTPError as error:
            self._check_status(error)
            return None
        except URLError as error:
            raise DoctorError(
                f"no server answers at {self.url}: {_reason(error)}; mlx-serve serve starts one"
            ) from error
        except OSError as error:
            raise DoctorError(f"the server at {self.url} broke off: {_reason(error)}") from error
        except Exception as error:  # another program may send anything, even in place of the status line
            raise self._is_another() from error
        if not isinstance(body, dict):
            raise self._is_another()
        return body

    def _check_status(self, error: HTTPError) -> None:
        with error:
            if error.code == 401:
                raise DoctorError(
                    f"the server at {self.url} asks for a key; give it with --api-key or MLX_SERVE_API_KEY"
                ) from error
            if error.code != 404:
                raise DoctorError(f"the server at {self.url} answers with status {error.code}") from error

    def _is_another(self) -> DoctorError:
        return DoctorError(f"what answers at {self.url} is not mlx-serve, or one without /v1/sessions")


def _base_url(url: str) -> str:
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise DoctorError(f"{url!r} is no address of a server; write it like {DEFAULT_URL}")
    return text.rstrip("/").removesuffix("/v1")


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__


NO_SESSIONS = """\
No conversations yet. A server that asks for no key shows all of them to its own machine, \
else each key its own: give the key that the client sends with --api-key."""
SHORTEST_SECONDS = 60.0
"""Of traffic that is worth a word on how long it took."""
PIPE_WIDTH = 200
LEAD_CHARACTERS = 20
"""Shown before the changed words."""
REFUSED: Mapping[str, Callable[[Any], object]] = {
    "path": str,
    "session_id": lambda value: None if value is None else str(value),
    "status": int,
    "code": str,
    "message": str,
    "count": int,
}


def examine_server(url: str, api_key: str | None, cache_salt: str | None, *, as_json: bool = False) -> None:
    """Prints a server's losses."""
    sessions = Sessions(url, api_key, cache_salt)
    try:
        read, told = sessions.read()
        checkups = [checkup_of(session) for session in read]
        refused = [{name: kind(refusal[name]) for name, kind in REFUSED.items()} for refusal in told]
    except (KeyError, TypeError, ValueError) as error:
        raise DoctorError(
            f"the sessions of {sessions.url} are told in a way that this version cannot read"
        ) from error
    if as_json:
        _print_json(checkups, refused)
        return
    note = sessions.memory_note()
    parts = [_report(checkups)] if checkups else [] if refused else [NO_SESSIONS]
    parts += [""] if checkups and refused else []
    parts += [_refused(refused)] if refused else []
    parts += ["", printable(note)] if note else []
    _print(*parts)


def examine_file(path: Path, reader: "Reader | None" = None, *, as_json: bool = False) -> None:
    """Prints what recorded requests would lose."""
    if path.is_dir() or not os.path.exists(path):  # noqa: PTH110 - pathlib raises where a folder may not be read
        raise DoctorError(f"there is no file {path}; --file names one with a recorded request on each line")
    from server.doctor.recorded import checkups_of, read_requests  # need NumPy, which takes its time

    checkups = checkups_of(read_requests(path), reader)
    if as_json:
        _print_json(checkups, [] if reader is None else reader.refused)
        return
    parts: list[RenderableType] = [_report(checkups)] if checkups else []
    parts += ["", _refused(reader.refused)] if reader is not None and reader.refused else []
    _print(*parts, *([Text(_unknown(checkups), "dim")] if reader is None else []))


_OF_THE_TEMPLATE = (Cause.TEMPLATE_ARGUMENTS, Cause.THOUGHTS, Cause.CALL_IDS)


def _unknown(checkups: Sequence[Checkup]) -> str:
    found = {loss.cause for one in checkups for loss in one.losses}
    unsure = [cause.value for cause in _OF_THE_TEMPLATE if cause in found]
    decides = f" Only the model's template decides whether {' and '.join(unsure)} cost anything." if unsure else ""
    return f"Tokens are estimated as characters / 4; --model counts them as the model does.{decides}"


def _print_json(checkups: Sequence[Checkup], refused: Sequence[Mapping[str, Any]] = ()) -> None:
    conversations = [
        {
            "id": one.name,
            "turns": one.num_turns,
            "kept": one.kept,
            "findings": list(map(_finding_body, findings_of(one.losses))),
        }
        for one in checkups
    ]
    body = {"conversations": conversations, "savings": asdict(savings_of(checkups)), "refused": refused}
    print(json.dumps(body, ensure_ascii=False, indent=2))  # noqa: T201 - data for another program


def _finding_body(finding: Finding) -> dict[str, Any]:
    return {
        "cause": finding.cause.value,
        "where": finding.example.where,
        "turns": finding.num_turns,
        "tokens": finding.tokens,
        "seconds": finding.seconds,
        "before": finding.example.before,
        "after": finding.example.after,
        "cure": finding.cure,
    }


def _print(*parts: RenderableType) -> None:
    """A pipe gets whole lines, without padding."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    with console.capture() as captured:
        console.print(Group(*parts))
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _report(checkups: Sequence[Checkup]) -> RenderableType:
    ailing = sorted((one for one in checkups if one.mendable), key=lambda one: -one.tokens)
    healthy = [one for one in checkups if not one.mendable]
    return Group(
        *(part for checkup in [*ailing, *healthy] for part in _session(checkup)), "", _summary(checkups, len(ailing))
    )


def _session(checkup: Checkup) -> Iterator[RenderableType]:
    heading = Text.assemble((_one_line(checkup.name), "bold"), f": {_plural(checkup.num_turns, 'turn')}")
    if checkup.kept is not None:
        heading.append(f", {percent_text(round(1000 * checkup.kept), 1000)} of the previous prompt reused on average")
    if not checkup.mendable:
        heading.append("; nothing to mend")
    yield heading
    for finding in findings_of(checkup.losses):
        yield Padding(_finding(finding), (0, 0, 1, 2), expand=False)


def _refused(refused: Sequence[Mapping[str, Any]]) -> RenderableType:
    rows = list[tuple[str, RenderableType]]()
    for one in refused:
        whose = f" ({one['session_id']})" if one["session_id"] else ""
        told = _one_line(f"{one['path']}{whose}: {one['status']} {one['message']}")
        rows.append((f"{grouped(one['count'])} ×", told))
    num_requests = sum(one["count"] for one in refused)
    return _titled(Text(f"{_plural(num_requests, 'request')} refused", "bold yellow"), rows, justify="right")


def _finding(finding: Finding) -> RenderableType:
    where = _in_place(finding.example.where)
    title = Text.assemble((finding.cause.value, "bold yellow"), f"{where}, in {_plural(finding.num_turns, 'turn')}")
    excerpts = _excerpts(finding.example.before, finding.example.after)
    return _titled(title, [*excerpts, ("cost", _cost(finding)), ("mend", finding.cure)], style="dim")


def _titled(title: Text, rows: Iterable[tuple[str, RenderableType]], **labels: Any) -> RenderableType:
    """Rows of two columns; `labels` says how the first one looks."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, **labels)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Group(title, Padding(table, (0, 0, 0, 2), expand=False))


def _in_place(where: str) -> str:
    return f" in {'' if where.startswith('message ') else 'the '}{where}" if where else ""


def _excerpts(before: str, after: str) -> Iterator[tuple[str, Text]]:
    """Yields both texts around their first difference."""
    if before.isidentifier() and after.isidentifier():
        yield "now", Text(f"{before} → {after}", "bold")  # roles and names of models, of which no part says more
        return
    start = shared_length(before, after)
    for label, text in (("before", before), ("after", after)):
        if text:
            yield label, _excerpt(text, start)


def _excerpt(text: str, start: int) -> Text:
    word = next(found for found in re.finditer(r"\S+|\s+|\Z", text) if found.end() > start or not found[0])
    begin = max(0, word.start() - LEAD_CHARACTERS)
    # No half word: the next one begins behind a space, if there is one.
    begin += text[begin : word.start()].find(" ") + 1 if begin and not text[begin - 1].isspace() else 0
    lead = text[begin : word.start()]
    excerpt = Text("…" if begin else "", no_wrap=True, overflow="ellipsis")
    return excerpt.append(_one_line(lead)).append(_one_line(word[0]), "bold").append(_one_line(text[word.end() :]))


def _cost(finding: Finding) -> str:
    if finding.is_hidden:
        return "none yet, as the change before it costs all that follows; mend both"
    per_turn = finding.tokens / finding.num_turns
    seconds = finding.seconds
    time = "" if seconds is None else f" and {seconds_text(seconds / finding.num_turns)}"
    return f"{_plural(finding.tokens, 'token')} evaluated again: {grouped(round(per_turn))}{time} per turn"


def _summary(checkups: Sequence[Checkup], num_ailing: int) -> str:
    sessions = _plural(len(checkups), "session")
    if not num_ailing:
        return f"{sessions}; nothing to mend."
    savings = savings_of(checkups)
    time = "" if savings.seconds is None else f" ({seconds_text(savings.seconds)})"
    told = f"{sessions}, {grouped(num_ailing)} with something to mend: {_plural(savings.tokens, 'token')}{time}"
    if not savings.seconds_per_turn:
        return f"{told} evaluated again."
    took = savings.within_seconds or 0.0
    within = "" if took < SHORTEST_SECONDS else f"; {_plural(savings.turns, 'turn')} within {seconds_text(took)}"
    return f"{told} evaluated again.\nMended, that saves {seconds_text(savings.seconds_per_turn)} per turn{within}."


def _one_line(text: str) -> str:
    return printable(text.replace("\n", "⏎"))


def _plural(number: int, word: str) -> str:
    return f"{grouped(number)} {word}" if number == 1 else f"{grouped(number)} {word}s"
