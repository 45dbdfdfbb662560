"""Writes the process's log to standard error: for a terminal, for a file, or as JSON lines.

In a file each event is one line. Text from a client is escaped, so that no name can forge a line or reach the
terminal.
"""

import json
import logging
import os
import sys
import time
from typing import TextIO

from rich.console import Console

from server.app.log_events import EntryPart, LogEntry, PrefillProgress, Tone, lay_out, one_line, printable

NOISY_LOGGERS = "asyncio", "filelock", "httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub", "sse_starlette"

PROGRESS_SECONDS = 2.0
PROGRESS_IN_FILES = 5
"""A file gets one progress entry of so many."""
DEFAULT_COLUMNS = 80

_ERASE_LINE = "\r\x1b[K"
_RESET = "\x1b[0m"


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
    handler: logging.StreamHandler[TextIO] = logging.StreamHandler(stream)
    if log_format == "text" and console.is_terminal and not console.is_dumb_terminal:
        handler = _TerminalHandler(stream)
        handler.setFormatter(_TerminalFormatter(stream, is_coloured=not console.no_color))
        return handler
    handler.addFilter(
        lambda event: not isinstance(event.msg, PrefillProgress) or event.msg.number % PROGRESS_IN_FILES == 0
    )
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _FileFormatter())
    return handler


class _FileFormatter(logging.Formatter):
    """One line per event; a stack trace follows on lines of its own."""

    converter = staticmethod(time.gmtime)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        origin = "" if isinstance(record.msg, LogEntry) else f"{record.name}: "
        stamp = self.formatTime(record, "%Y-%m-%dT%H:%M:%SZ")
        return f"{stamp} {record.levelname:<7} {origin}{printable(record.message)}"


class _JsonFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        stamp = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z"
        fields = {"time": stamp, "level": record.levelname.lower()}
        if isinstance(record.msg, LogEntry):
            return json.dumps({**fields, **record.msg.figures()})
        said = {"event": "message", "module": record.name, "message": record.getMessage()}
        trace = {"trace": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**fields, **said, **trace})


class _TerminalFormatter(logging.Formatter):
    def __init__(self, stream: TextIO, *, is_coloured: bool) -> None:
        super().__init__()
        self._stream = stream
        self._is_coloured = is_coloured

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        time_of_day, columns = self.formatTime(record, "%H:%M:%S"), num_columns(self._stream)
        if isinstance(record.msg, PrefillProgress):
            # Shorter than the terminal: erasing a full line would leave its rest.
            words = "  ".join([time_of_day, *(part.text for part in _parts(record))])
            return self._paint(one_line(words, columns - 1), Tone.QUIET)
        return lay_out(time_of_day, _parts(record), columns, self._paint)

    def _paint(self, text: str, tone: Tone) -> str:
        return f"{tone}{text}{_RESET}" if tone and self._is_coloured else text


class _TerminalHandler(logging.StreamHandler[TextIO]):
    """A line of progress is replaced by the next entry."""

    _has_progress = False
    _progress_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        is_progress = isinstance(record.msg, PrefillProgress)
        if is_progress and record.created - self._progress_at < PROGRESS_SECONDS:
            return
        self.terminator = "" if is_progress else "\n"
        super().emit(record)
        self._has_progress = is_progress
        self._progress_at = record.created if is_progress else self._progress_at

    def format(self, record: logging.LogRecord) -> str:
        erases = self._has_progress or isinstance(record.msg, PrefillProgress)
        return (_ERASE_LINE if erases else "") + super().format(record)


def num_columns(terminal: TextIO) -> int:
    """A terminal's width."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or DEFAULT_COLUMNS
    except (OSError, ValueError):
        return DEFAULT_COLUMNS


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
