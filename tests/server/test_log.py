"""The log as people and programs read it: on a terminal of any width, in a file, as JSON."""

import io
import json
import logging
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from dataclasses import fields, replace
from fcntl import ioctl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from server.app.log import make_handler
from server.app.log_events import (
    EntryPart,
    LogEntry,
    MissFigures,
    PrefillProgress,
    RequestEnded,
    RequestRefused,
    TextsEmbedded,
    lay_out,
    percent_text,
    printable,
    seconds_text,
    short_id,
)

ENDED = RequestEnded(
    request_id="chatcmpl-3f9a1c00000000000000000000000000",
    session_id="chat-1",
    model="tiny",
    turn=5,
    prompt_tokens=12340,
    cached_tokens=12093,
    evaluated_tokens=247,
    predicted_tokens=100,
    first_token_ms=312.0,
    total_ms=2700.0,
    tokens_per_second=41.2,
    finish="stop",
    error=None,
    kept=1.0,
    tier="live",
    miss=None,
)
MISSED = replace(
    ENDED, cached_tokens=20, miss=MissFigures("system_changed", "date or time", 0, "system", 20, 12020, 3.9)
)
PROGRESS = PrefillProgress("chatcmpl-3f9a1c", None, 8192, 120_000, 340.0, 0)
REFUSED = RequestRefused("req_3f9a1c000", "POST", "/v1/messages", 404, "unknown_path", "there is none")
DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def texts(entry: LogEntry) -> list[str]:
    return [part.text for part in entry.parts()]


def test_a_request_is_told_in_words() -> None:
    assert texts(ENDED) == [
        "chat-1",
        "turn 5",
        "12 340 tokens, 98 % reused",
        "0.3 s to first token, 41 tokens/s",
    ]
    assert texts(replace(ENDED, drafted_tokens=90, accepted_tokens=75))[-1] == (
        "0.3 s to first token, 41 tokens/s, 4.0 a step"
    )


def test_what_broke_is_told_with_its_cost() -> None:
    assert texts(MISSED)[-1] == "date or time in message 0 (system): 12 020 tokens evaluated again, 3.9 s"


@pytest.mark.parametrize("width", range(20, 90))
def test_no_line_ends_within_a_number_or_before_its_unit(width: int) -> None:
    """Where the words after it would be read by themselves: `0.3` on one line and `s` on the next."""
    shown = lay_out("10:22:04", MISSED.parts(), width, lambda text, tone: text)
    assert not re.search(r"\n\s*(?:340|020|s\b|%|min\b)", shown), shown


def test_a_first_turn_that_finds_nothing_is_no_miss() -> None:
    assert texts(replace(ENDED, miss=MissFigures("cold", "first request", None, None, 0, 0, 0.0))) == texts(ENDED)


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 10, "0 %"), (1, 1000, "under 1 %"), (999, 1000, "99 %"), (10, 10, "100 %"), (0, 0, "0 %")],
)
def test_all_and_nothing_are_said_of_all_and_nothing_only(part: int, whole: int, text: str) -> None:
    assert percent_text(part, whole) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.001, "0.01 s"),
        (0.31, "0.3 s"),
        (9.96, "10 s"),
        (99.4, "99 s"),
        (200, "3 min 20 s"),
        (599.7, "10 min 0 s"),
        (3599.8, "1 h 0 min"),
        (86_399, "24 h 0 min"),
        (200_000, "2.3 days"),
    ],
)
def test_times_have_the_digits_that_matter(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_a_long_prompt_says_first_how_long_it_takes_still() -> None:
    assert texts(PROGRESS) == ["prefill 7 %, 5 min 29 s to go", "3f9a1c", "8 192 of 120 000 tokens, 340 tokens/s"]
    assert texts(replace(PROGRESS, tokens_per_second=0.0))[0] == "prefill 7 %"


@pytest.mark.parametrize("name", ["chatcmpl-3f9a1c0000", "req_3f9a1c0000", "3f9a1c0000"])
def test_a_short_id_is_what_differs(name: str) -> None:
    assert short_id(name) == "3f9a1c"


# ------------------------------------------------------------------------------------------------------- layout


@given(
    st.lists(st.text(st.sampled_from("ab 猫é"), min_size=1).filter(str.strip), min_size=1, max_size=6),
    st.integers(1, 60),
)
def test_no_line_is_wider_than_the_terminal_but_for_a_long_word(words: list[str], width: int) -> None:
    laid = lay_out("10:22:04", [EntryPart(text) for text in words], width, lambda text, _: text)
    first, *rest = laid.split("\n")
    assert first.startswith("10:22:04  ")
    assert all(line.startswith(" " * 10) for line in rest)
    for line in (first, *rest):
        assert cell_len(line) <= width or len(line[10:].split()) <= 1
    assert "".join(laid.removeprefix("10:22:04").split()) == "".join("".join(words).split())


# ------------------------------------------------------------------------------------------------------ streams


class Screen:
    """A terminal of some width, and what was written to it."""

    def __init__(self, columns: int) -> None:
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(slave, "w", encoding="utf-8")

    def text(self) -> str:
        self.stream.write("\0")
        self.stream.flush()
        shown = b""
        while not shown.endswith(b"\0"):
            shown += os.read(self._master, 65536)
        return shown[:-1].decode().replace("\r\n", "\n")

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    screen = Screen(50)
    yield screen
    screen.close()


def record(message: object, level: int = logging.INFO, created: float = 1000.0) -> logging.LogRecord:
    made = logging.LogRecord("server.x", level, __file__, 1, message, None, None)
    made.created, made.msecs = created, 0.0
    return made


def test_a_terminal_gets_lines_of_its_width_and_yellow(screen: Screen) -> None:
    make_handler(screen.stream, "text").emit(record(MISSED))
    shown = screen.text()
    assert "\x1b[33mdate or time" in shown
    plain = re.sub(r"\x1b\[\d*m", "", shown)
    assert re.match(r"\d\d:\d\d:\d\d  chat-1  turn 5\n {10}12 340 tokens, under 1 % reused\n", plain)
    assert all(len(line) <= 50 for line in plain.split("\n"))


def test_no_color_is_respected(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    make_handler(screen.stream, "text").emit(record(MISSED))
    assert "\x1b" not in screen.text()


def test_progress_is_one_line_that_the_next_entry_replaces(screen: Screen) -> None:
    handler = make_handler(screen.stream, "text")
    for second in (0.0, 1.0, 2.5):
        handler.emit(record(replace(PROGRESS, evaluated_tokens=int(8192 * (second + 1))), created=1000 + second))
    handler.emit(record(ENDED, created=1003))
    shown = screen.text()
    assert shown.count("prefill") == 2, "the second came too soon"
    assert shown.count("\n") == len(texts(ENDED)) - 1
    assert shown.count("\r\x1b[K") == 3
    assert all(cell_len(re.sub(r"\x1b\[\d*[mK]|\r", "", line)) < 50 for line in shown.split("\r\x1b[K")[1:3])


def test_what_clients_send_cannot_move_the_cursor(screen: Screen) -> None:
    evil = "\x1b[2J\n10:22\u202e\u2028\x9b"
    handler = make_handler(screen.stream, "text")
    for message in (replace(ENDED, session_id=evil), replace(REFUSED, path="/" + evil), f"name {evil}"):
        handler.emit(record(message))
    assert not set(screen.text()) & {"\u202e", "\u2028", "\x9b"}


def test_a_file_gets_one_line_with_date_level_and_the_whole_name() -> None:
    stream = io.StringIO()
    handler = make_handler(stream, "text")
    handler.emit(record(replace(MISSED, session_id="a\nb")))
    handler.emit(record("it\nbroke", logging.WARNING))
    first, second = stream.getvalue().splitlines()
    assert first.startswith("1970-01-01T00:16:40Z INFO    a\\nb  turn 5  12 340 tokens")
    assert first.endswith(ENDED.request_id)
    assert second == "1970-01-01T00:16:40Z WARNING server.x: it\\nbroke"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_file_gets_few_lines_of_progress(log_format: str) -> None:
    stream = io.StringIO()
    handler = make_handler(stream, log_format)
    for number in range(11):
        handler.handle(record(replace(PROGRESS, number=number)))
    assert stream.getvalue().count("\n") == 3


def test_json_is_one_object_per_line_with_all_figures() -> None:
    stream = io.StringIO()
    handler = make_handler(stream, "json")
    for message in (MISSED, REFUSED, "plain\ntext"):
        handler.emit(record(message))
    missed, refused, plain = map(json.loads, stream.getvalue().splitlines())
    head = {"time": "1970-01-01T00:16:40.000Z", "level": "info"}
    assert missed["miss"]["lost_tokens"] == 12020
    assert missed == {**head, **MISSED.figures()}
    assert refused == {**head, **REFUSED.figures()}
    assert plain == {**head, "event": "message", "module": "server.x", "message": "plain\ntext"}


def test_a_failure_has_its_trace_in_both_forms() -> None:
    for log_format in ("text", "json"):
        stream = io.StringIO()
        try:
            raise ZeroDivisionError("here")
        except ZeroDivisionError as error:
            failed = record("it failed", logging.ERROR)
            failed.exc_info = (type(error), error, error.__traceback__)
        make_handler(stream, log_format).emit(failed)
        assert "ZeroDivisionError: here" in stream.getvalue()


@given(st.text())
def test_what_is_printable_stays_and_all_else_is_escaped(text: str) -> None:
    escaped = printable(text)
    assert escaped.isprintable()
    assert escaped == text or not text.isprintable()


@pytest.mark.parametrize("kind", [RequestEnded, PrefillProgress, RequestRefused, TextsEmbedded])
def test_the_docs_have_every_field(
    kind: type[RequestEnded | PrefillProgress | RequestRefused | TextsEmbedded],
) -> None:
    [row] = re.findall(rf"^\| `{kind.event}` \|.*$", DOCS, re.MULTILINE)
    assert {field.name for field in fields(kind)} <= set(re.findall(r"`(\w+)`", row))
    [miss] = re.findall(r"^`miss` is null or holds .*$", DOCS, re.MULTILINE)
    assert {field.name for field in fields(MissFigures)} | {"miss"} == set(re.findall(r"`(\w+)`", miss))
