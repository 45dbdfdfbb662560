"""Reads lines from a person at a terminal, with editing, history, and pasted lines as one message.

`readline` cannot do the last everywhere: the libedit that Python comes with on macOS knows no bracketed paste.
"""

from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from server.cli.repl.history import open_history


class Keyboard:
    """The terminal's keys."""

    def __init__(self, history: Path | None = None) -> None:
        """What is typed is kept for the arrow keys: in the file `history`, or while the program runs."""
        # Standard output may be a file; the prompt then goes to standard error.
        output = create_output(always_prefer_tty=True)
        if isinstance(output, Vt100_Output):
            # A terminal that does not tell where its cursor is would be complained about.
            output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            history=open_history(history), output=output, enable_suspend=True, reserve_space_for_menu=0
        )

    def read(self, prompt: str) -> str:
        """Returns a line, or the lines that were pasted into it; raises EOFError and KeyboardInterrupt."""
        margin = "... ".rjust(len(prompt))
        return self._session.prompt(prompt, prompt_continuation=margin)
