"""Writes the process's log to standard error: for a terminal, for a file, or as JSON lines.

In a file each event is one line. Text from a client is escaped, so that no name can forge a line or reach the
terminal.
"""

import json
import logging
import os
import sys
import time
import traceback
from typing import TextIO

from rich.console import Console

from server.app.log_events import EntryPart, LogEntry, PrefillProgress, Tone, lay_out, one_line, printable

NOISY_LOGGERS = (
    *("asyncio", "filelock", "httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub"),
    "sse_starlette",
)

PROGRESS_SECONDS = 2.0
PROGRESS_IN_FILES = 5
"""A file gets one progress entry of so many."""
DEFAULT_COLUMNS = 80

_ERASE_LINE = "\r\x1b[K"
_RESET = "\x1b[0m"
_COLOURS = {Tone.QUIET: "\x1b[2m", Tone.WARNING: "\x1b[33m", Tone.ERROR: "\x1b[31m"}


def configure_logging(level: str, log_format: str = "text") -> None:
    """Logs to standard error, as `text` or `json`. Once per process."""
    root = logging.getLogger()
    root.handlers[:] = [make_handler(sys.stderr, log_format)]
    root.setLevel(level.upper())
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def make_handler(stream: TextIO, log_format: str) -> logging.Handler:
    """The handler that suits the stream."""
    console = Console(file=stream)
    if log_format == "text" and console.is_terminal and not console.is_dumb_terminal:
        return _TerminalHandler(stream, is_coloured=not console.no_color)
    handler = logging.StreamHandler(stream)
    handler.addFilter(_is_for_files)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _FileFormatter())
    return handler


def _is_for_files(record: logging.LogRecord) -> bool:
    return not isinstance(record.msg, PrefillProgress) or record.msg.number % PROGRESS_IN_FILES == 0


def _trace(record: logging.LogRecord) -> str:
    if record.exc_info is None or record.exc_info[0] is None:
        return ""
    return "".join(traceback.format_exception(*record.exc_info)).rstrip()


class _FileFormatter(logging.Formatter):
    """One line per event; a stack trace follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        origin = "" if isinstance(record.msg, LogEntry) else f"{record.name}: "
        line = f"{stamp} {record.levelname:<7} {origin}{printable(record.getMessage())}"
        trace = _trace(record)
        return f"{line}\n{trace}" if trace else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        if isinstance(record.msg, LogEntry):
            return json.dumps({**fields, **record.msg.figures()})
        trace = _trace(record)
        said = {"event": "message", "module": record.name, "message": record.getMessage()}
        return json.dumps({**fields, **said, **({"trace": trace} if trace else {})})


class _TerminalHandler(logging.StreamHandler[TextIO]):
    def __init__(self, stream: TextIO, *, is_coloured: bool) -> None:
        super().__init__(stream)
        self._is_coloured = is_coloured
        self._has_progress = False
        self._progress_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            is_progress = isinstance(record.msg, PrefillProgress)
            if is_progress and record.created - self._progress_at < PROGRESS_SECONDS:
                return
            text = self._progress_line(record) if is_progress else self.format(record) + "\n"
            self.stream.write((_ERASE_LINE if self._has_progress or is_progress else "") + text)
            self._has_progress = is_progress
            self._progress_at = record.created if is_progress else self._progress_at
            self.flush()
        except Exception:  # as every handler of the standard library does
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        lines = lay_out(_time_of_day(record), _parts(record), num_columns(self.stream), self._paint)
        trace = _trace(record)
        return f"{lines}\n{trace}" if trace else lines

    def _progress_line(self, record: logging.LogRecord) -> str:
        """Shorter than the terminal: erasing a full line would leave its rest."""
        words = "  ".join([_time_of_day(record), *(part.text for part in _parts(record))])
        return self._paint(one_line(words, num_columns(self.stream) - 1), Tone.QUIET)

    def _paint(self, text: str, tone: Tone) -> str:
        colour = _COLOURS.get(tone, "")
        return f"{colour}{text}{_RESET}" if colour and self._is_coloured else text


def num_columns(terminal: TextIO) -> int:
    """A terminal's width."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or DEFAULT_COLUMNS
    except (OSError, ValueError):
        return DEFAULT_COLUMNS


def _time_of_day(record: logging.LogRecord) -> str:
    return time.strftime("%H:%M:%S", time.localtime(record.created))


def _parts(record: logging.LogRecord) -> list[EntryPart]:
    if isinstance(record.msg, LogEntry):
        return [EntryPart(printable(part.text), part.tone) for part in record.msg.parts()]
    message = printable(record.getMessage())
    if record.levelno >= logging.WARNING:
        tone = Tone.ERROR if record.levelno >= logging.ERROR else Tone.WARNING
        return [EntryPart(f"{record.levelname.lower()}: {message}", tone)]
    return [
        EntryPart(message) if record.levelno >= logging.INFO else EntryPart(f"{record.name}: {message}", Tone.QUIET)
    ]
