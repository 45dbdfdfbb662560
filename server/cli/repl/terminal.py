"""Reads lines at a terminal, with editing, history, and pasted lines as one message.

`readline` cannot do the last everywhere: the libedit of Python on macOS knows no bracketed paste.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output

logger = logging.getLogger(__name__)

MAX_BYTES = 2**20
"""A longer history is cut to half."""
_ENTRY = b"\n# "


def history_file(environment: Mapping[str, str]) -> Path:
    """A path that need not exist."""
    folder = environment.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(folder).expanduser() / "mlx-serve" / "history"


def open_history(path: Path | None) -> History:
    """Without a usable file nothing is kept."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if path.stat().st_size > MAX_BYTES:
            kept = path.read_bytes()[-MAX_BYTES // 2 :]
            path.write_bytes(kept[max(kept.find(_ENTRY), 0) :])
    except OSError as error:
        logger.debug("what is typed is not kept in %s: %s", path, error)
        return InMemoryHistory()
    return _PatientHistory(str(path))


class _PatientHistory(FileHistory):
    """Ignores a full disk."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def line_reader(history: Path | None) -> Callable[[str], str]:
    """Reads a line, or pasted lines; raises EOFError and KeyboardInterrupt."""
    # Standard output may be a file; the prompt then goes to standard error.
    output = create_output(always_prefer_tty=True)
    if isinstance(output, Vt100_Output):
        # The library would complain about a terminal that does not report its cursor.
        output.enable_cpr = False
    session: PromptSession[str] = PromptSession(
        history=open_history(history), output=output, enable_suspend=True, reserve_space_for_menu=0
    )
    return lambda prompt: session.prompt(prompt, prompt_continuation="... ".rjust(len(prompt)))
