"""What a person types while nothing is read: it is not shown, and none of it is lost. Imports nothing slow."""

import contextlib
import sys
import termios
from collections.abc import Iterator

_LOCAL_MODES, _CONTROL_CHARACTERS = 3, 6
"""Places in what `termios.tcgetattr` returns."""


@contextlib.contextmanager
def keys_unseen() -> Iterator[None]:
    """Keeps what is typed, `^C` too, from showing up in the middle of an answer; it is read afterwards.

    The terminal hands keys over one by one meanwhile. With lines it would take Ctrl-D for the end of one and
    forget it as soon as somebody asks for keys.
    """
    try:
        terminal = sys.stdin.fileno()
        settings = termios.tcgetattr(terminal)
    except (OSError, ValueError, AttributeError, termios.error):
        # Standard input is no terminal.
        yield
        return
    quiet = [*settings[:_CONTROL_CHARACTERS], [*settings[_CONTROL_CHARACTERS]]]
    quiet[_LOCAL_MODES] &= ~(termios.ECHO | termios.ICANON)
    quiet[_CONTROL_CHARACTERS][termios.VMIN], quiet[_CONTROL_CHARACTERS][termios.VTIME] = 1, 0
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)
