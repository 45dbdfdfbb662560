"""`mlx-serve doctor`: which text keeps prompts from being reused, for a running server or recorded requests."""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from urllib.parse import quote, urlencode

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from models.errors import told_as
from models.texts import grouped, shared_length, size_text
from server.app.config import ConfigError, ServerConfig, StartError
from server.app.log_events import percent_text, printable, seconds_text
from server.cli.ask import AskedServer, asking, known_urls
from server.cli.options import Json, model_names, print_json
from server.diagnosis.causes import Cause
from server.diagnosis.prompt import RepeatedCall
from server.doctor.findings import Checkup, Finding, checkup_of, findings_of, savings_of

PROGRAM = "mlx-serve"
NO_SESSIONS = """\
No conversations yet. A server that asks for no key shows all of them to its own machine, \
else each key its own: give the key that the client sends with --api-key."""
REPEATED_CURE = """\
Within one answer, repetition_detection in the request or --loop-guard at the server ends the loop. \
Over several turns let the client end it, or say in the result of the tool that the call was made before."""
SHORTEST_SECONDS = 60.0
"""Traffic of at least so long is worth a word on how long it took."""
PIPE_WIDTH = 200
LEAD_CHARACTERS = 20
"""Shown before the changed words."""
Examined: TypeAlias = tuple[list[Checkup], list[dict[str, Any]], list[RenderableType]]
"""Conversations, refused requests, and notes below."""
REFUSED = ("path", "session_id", "status", "code", "message", "count")
"""Fields of a refusal that the report has."""


@asking()
def doctor(
    server: AskedServer,
    file: str | None = None,
    cache_salt: str | None = None,
    model: Annotated[str | None, typer.Option(autocompletion=model_names)] = None,
    heal: list[str] | None = None,
    as_json: Json = False,
) -> None:
    """Prints what was lost, and why. Raises ConfigError, StartError and ModelError."""
    if other := find_other_program(sys.argv[0]):
        typer.echo(f"Another mlx-serve stands first on PATH: {other}; this is {sys.argv[0]}.", err=True)
    if file is None and model is not None:
        raise ConfigError("--model goes with --file only: a server knows its own model")
    if heal and model is None:
        raise ConfigError("--heal goes with --file and --model only: a server heals as it was started")
    if file is not None and server.is_named:
        raise ConfigError("give the address of a server or --file, not both")
    if file is None:
        checkups, refused, notes = _examine_server(server, cache_salt)
    else:
        checkups, refused, notes = _examine_file(Path(file), model, heal or ())
    if as_json:
        print_json(_body(checkups, refused))
        return
    if file is None and not server.is_named and len(known_urls()) > 1:
        typer.echo(f"Asked {server.url}; `mlx-serve ps` lists the other servers.", err=True)
    parts = [_report(checkups)] if checkups else [] if refused else [NO_SESSIONS]
    parts += [""] if checkups and refused else []
    parts += [_refused(refused)] if refused else []
    _print(*parts, *notes)


def find_other_program(started: str) -> str | None:
    """The program that a shell would start in place of `started`."""
    first = shutil.which(PROGRAM) or started
    return first if Path(started).name == PROGRAM and Path(first).resolve() != Path(started).resolve() else None


def _examine_server(server: AskedServer, cache_salt: str | None) -> Examined:
    """`cache_salt` and the key limit what the server shows."""
    query, checkups = {"cache_salt": cache_salt} if cache_salt else {}, list[Checkup]()
    try:
        listed = server.get("/v1/sessions", query)
        for session in listed["data"]:
            # Without key and salt the server needs the session's namespace.
            is_foreign = session["namespace"] and not (server.api_key or query)
            own = {"namespace": session["namespace"]} if is_foreign else query
            session = server.find("GET", f"/v1/sessions/{quote(session['id'], safe='')}?{urlencode(own)}")
            # A session may have been forgotten since the list was made.
            checkups += [] if session is None else [checkup_of(session)]
        refused = [{name: refusal[name] for name in REFUSED} for refusal in listed["refused"]]
        memory = server.get("/v1/stats", query)["memory"]
        notes = list(_memory_notes(memory["pressure"], memory["idle_limit_bytes"], memory.get("all_models_bytes")))
    except (KeyError, TypeError, ValueError) as error:
        raise StartError(f"this version cannot read the sessions of {server.url}") from error
    return checkups, refused, notes


def _memory_notes(pressure: str, kept_bytes: int | None, all_models_bytes: int | None) -> Iterator[RenderableType]:
    if kept_bytes is not None:
        kept = f"Idle state is cut to {size_text(kept_bytes)} until the machine has enough memory."
        yield from ("", printable(f"Memory of the machine: {pressure}. {kept}"))
    if all_models_bytes is not None:
        needed = f"--cache-memory {-(-all_models_bytes // 10**6)}MB"
        yield from (
            "",
            f"Models are loaded one at a time, for want of memory for state: start the server with {needed}.",
        )


def _examine_file(path: Path, model: str | None, heals: Sequence[str]) -> Examined:
    from server.doctor.recorded import checkups_of, read_requests  # need NumPy, which takes its time

    requests = read_requests(path)
    if model is None:
        checkups = checkups_of(requests)
        return checkups, [], [Text(_unknown(checkups), "dim")]
    from server.app.service import open_renderer
    from server.doctor.model_reader import ModelReader  # these two import what a server imports

    with told_as(ConfigError, "--heal", ValueError):
        reader = ModelReader(*open_renderer(model), ServerConfig(heals=tuple(heals)))
    return checkups_of(requests, reader), reader.refused, []


_OF_THE_TEMPLATE = (Cause.TEMPLATE_ARGUMENTS, Cause.THOUGHTS, Cause.CALL_IDS)


def _unknown(checkups: Sequence[Checkup]) -> str:
    causes = {loss.miss.cause for checkup in checkups for loss in checkup.losses}
    unsure = [cause.value for cause in _OF_THE_TEMPLATE if cause in causes]
    decides = f" Only the model's template decides whether {' and '.join(unsure)} cost anything." if unsure else ""
    return f"Tokens are estimated as characters / 4; --model counts them as the model does.{decides}"


def _body(checkups: Sequence[Checkup], refused: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    conversations = [
        {
            "id": checkup.name,
            "turns": checkup.num_turns,
            "kept": checkup.kept,
            "healed_tokens": checkup.healed_tokens,
            "rounded_tokens": checkup.rounded_tokens,
            "repeated_call": checkup.repeated_call and asdict(checkup.repeated_call),
            "findings": list(map(asdict, findings_of(checkup.losses))),
        }
        for checkup in checkups
    ]
    return {"conversations": conversations, "savings": asdict(savings_of(checkups)), "refused": refused}


def _print(*parts: RenderableType) -> None:
    """A pipe gets whole lines, without padding."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    with console.capture() as captured:
        console.print(Group(*parts))
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _report(checkups: Sequence[Checkup]) -> RenderableType:
    order = sorted(checkups, key=lambda checkup: (not checkup.is_ailing, -checkup.tokens))
    return Group(*(part for checkup in order for part in _session(checkup)), "", _summary(checkups))


def _session(checkup: Checkup) -> Iterator[RenderableType]:
    heading = Text.assemble((_one_line(checkup.name), "bold"), f": {_plural(checkup.num_turns, 'turn')}")
    if checkup.kept is not None:
        heading.append(f", {percent_text(round(1000 * checkup.kept), 1000)} of the previous prompt reused on average")
    if checkup.rounded_tokens:
        heading.append(f"; {grouped(checkup.rounded_tokens)} tokens restored from 8 bits (--cache-bits)")
    if checkup.healed_tokens:
        heading.append(f"; {grouped(checkup.healed_tokens)} tokens saved by showing prompts as before")
    if not checkup.is_ailing:
        heading.append("; nothing to mend")
    yield heading
    for finding in findings_of(checkup.losses):
        yield Padding(_finding(finding), (0, 0, 1, 2), expand=False)
    if checkup.repeated_call is not None:
        yield Padding(_repeated(checkup.repeated_call), (0, 0, 1, 2), expand=False)


def _refused(refused: Sequence[Mapping[str, Any]]) -> RenderableType:
    rows = list[tuple[str, RenderableType]]()
    for refusal in refused:
        whose = f" ({refusal['session_id']})" if refusal["session_id"] else ""
        text = _one_line(f"{refusal['path']}{whose}: {refusal['status']} {refusal['message']}")
        rows.append((f"{grouped(refusal['count'])} ×", text))
    num_requests = sum(refusal["count"] for refusal in refused)
    return _titled(Text(f"{_plural(num_requests, 'request')} refused", "bold yellow"), rows, justify="right")


def _finding(finding: Finding) -> RenderableType:
    where = finding.where
    place = f" in {'' if where.startswith('message ') else 'the '}{where}" if where else ""
    title = Text.assemble((finding.cause.value, "bold yellow"), f"{place}, in {_plural(finding.turns, 'turn')}")
    excerpts = _excerpts(finding.before, finding.after)
    return _titled(title, [*excerpts, ("cost", _cost(finding)), ("mend", finding.cure)], style="dim")


def _repeated(repeated: RepeatedCall) -> RenderableType:
    title = Text.assemble(
        ("repeated call", "bold yellow"), f", {grouped(repeated.times)} times with no other call between"
    )
    call = Text(_one_line(repeated.call), no_wrap=True, overflow="ellipsis")
    return _titled(title, [("call", call), ("mend", REPEATED_CURE)], style="dim")


def _titled(title: Text, rows: Iterable[tuple[str, RenderableType]], **labels: Any) -> RenderableType:
    """Rows of two columns; `labels` says how the first one looks."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, **labels)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Group(title, Padding(table, (0, 0, 0, 2), expand=False))


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
    word = next(match for match in re.finditer(r"\S+|\s+|\Z", text) if match.end() > start or not match[0])
    begin = max(0, word.start() - LEAD_CHARACTERS)
    # No half word: the next one begins after a space, if there is one.
    begin += text[begin : word.start()].find(" ") + 1 if begin and not text[begin - 1].isspace() else 0
    lead = text[begin : word.start()]
    excerpt = Text("…" if begin else "", no_wrap=True, overflow="ellipsis")
    return excerpt.append(_one_line(lead)).append(_one_line(word[0]), "bold").append(_one_line(text[word.end() :]))


def _cost(finding: Finding) -> str:
    if not finding.tokens:
        return "none yet: an earlier change in the same prompt costs all that follows it; mend both"
    per_turn = grouped(round(finding.tokens / finding.turns))
    time = "" if finding.seconds is None else f" and {seconds_text(finding.seconds / finding.turns)}"
    return f"{_plural(finding.tokens, 'token')} evaluated again: {per_turn}{time} per turn"


def _summary(checkups: Sequence[Checkup]) -> str:
    sessions, num_ailing = _plural(len(checkups), "session"), sum(checkup.is_ailing for checkup in checkups)
    if not num_ailing:
        return f"{sessions}; nothing to mend."
    savings = savings_of(checkups)
    time = "" if savings.seconds is None else f" ({seconds_text(savings.seconds)})"
    text = f"{sessions}, {grouped(num_ailing)} with something to mend: {_plural(savings.tokens, 'token')}{time}"
    if not savings.seconds_per_turn:
        return f"{text} evaluated again."
    took = savings.within_seconds or 0.0
    within = "" if took < SHORTEST_SECONDS else f"; {_plural(savings.turns, 'turn')} within {seconds_text(took)}"
    return f"{text} evaluated again.\nMended, that saves {seconds_text(savings.seconds_per_turn)} per turn{within}."


def _one_line(text: str) -> str:
    return printable(text.replace("\n", "⏎"))


def _plural(number: int, word: str) -> str:
    return f"{grouped(number)} {word}" if number == 1 else f"{grouped(number)} {word}s"
