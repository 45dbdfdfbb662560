"""`mlx-serve run`: a conversation in the terminal with a model in this process, or one that a server has loaded.

Ctrl-C stops the answer, not the program; what was said until then stays in the conversation. Twice at the prompt it
ends the program. With a question, or when standard input is no terminal, there is one answer, and the program ends.
"""

import asyncio
import contextlib
import io
import os
import re
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console

from server.cli.repl.screen import Screen, standard_screen
from server.cli.repl.speech import AnswerCosts, Answerer, AnswerFailed, Manner, Said, Turn

PROMPT = ">>> "
CONTINUATION = "... "
QUOTES = '"""'
INTERRUPTED = 130
"""Exit status after Ctrl-C."""

HELP = f"""\
/help, /?        this text
/new, /clear     forget the conversation and start another
/retry           ask the last message again
/system TEXT     set the system message; without TEXT: show it
/stats           tokens reused, tokens evaluated and speed of the last answer
/bye             leave, as do /exit, /quit and Ctrl-D

Pasted lines are one message. {QUOTES} begins and ends a message of several
lines; a backslash at the end of a line continues it.
Ctrl-C stops an answer; twice at the prompt it leaves."""

_COMMAND = re.compile(r"/([a-z]+|\?)(?:[^\S\n]+(.*))?", re.DOTALL)
_LEAVE = ("bye", "exit", "quit")


@dataclass(frozen=True)
class Opening:
    """How a person began: the words on the command line."""

    system: str = ""
    question: str = ""


def chat(answerer: Answerer, opening: Opening, about: str = "") -> int:
    """Talks until the person leaves, or answers once, and returns the exit status.

    `about` says where the model is, if not here; it is shown before the first prompt.
    """
    console = Console()
    screen = standard_screen(is_coloured=console.is_terminal and not console.no_color)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # What is no UTF-8 is a model's problem, not a reason to end.
        sys.stdin.reconfigure(errors="replace")
    try:
        if opening.question or not sys.stdin.isatty():
            return _answer_once(Chat(answerer, screen, system=opening.system), opening.question)
        from server.cli.repl.keyboard import Keyboard

        screen.note(f"{answerer.name}{about} · /help for help, Ctrl-D to leave")
        Chat(answerer, screen, system=opening.system, read_line=Keyboard().read).run()
    except BrokenPipeError:
        # Whoever read the answer has enough of it; what is still buffered must go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


@dataclass
class Chat:
    """One person's conversations with one model, one after another. Used on one thread, which it blocks."""

    answerer: Answerer
    screen: Screen
    system: str = ""
    read_line: Callable[[str], str] = input
    """Shows a prompt and returns one line, or the lines that were pasted; raises EOFError at the end."""
    was_interrupted: bool = False
    """Whether the last answer was stopped by the person."""
    _turns: list[Turn] = field(default_factory=list)
    _costs: AnswerCosts | None = None
    _conversation: int = 1
    _last_message: str = ""
    _is_answered: bool = False
    """Whether the last message and its answer are the last two turns."""

    def run(self) -> None:
        """Reads messages and commands until the person leaves."""
        num_interrupts = 0
        while num_interrupts < 2:
            try:
                text = self._read_message().strip()
                num_interrupts = 0
                if text.startswith("/") and text[1:] in _LEAVE:
                    return
                self._respond(text)
            except EOFError:
                self.screen.note("")
                return
            except KeyboardInterrupt:
                num_interrupts += 1
                if num_interrupts < 2:
                    self.screen.note("Ctrl-C again, Ctrl-D or /bye to leave", is_quiet=True)

    def _respond(self, text: str) -> None:
        if not text:
            self.screen.note("Nothing to send: type a message, or /? for help.", is_quiet=True)
        elif not self._try_command(text):
            self.answer(text)

    def answer(self, text: str) -> bool:
        """Sends one message and shows the answer as it comes; False if there is none."""
        self._last_message, self._is_answered, self.was_interrupted = text, False, False
        self._turns.append({"role": "user", "content": text})
        reply: list[str] = []
        try:
            with keys_unseen():
                asyncio.run(self._stream(reply))
        except KeyboardInterrupt:
            self.was_interrupted = True
            self.screen.end(" …")
        except AnswerFailed as error:
            if reply:
                self.screen.end(" …")
            self.screen.complain(str(error))
        else:
            self.screen.end()
        if not reply:
            self._turns.pop()
            return False
        self._turns.append({"role": "assistant", "content": "".join(reply)})
        self._is_answered = True
        return True

    async def _stream(self, reply: list[str]) -> None:
        system: list[Turn] = [{"role": "system", "content": self.system}] if self.system else []
        self._costs = None
        async with contextlib.aclosing(self.answerer.answer([*system, *self._turns], self._conversation)) as parts:
            async for part in parts:
                if isinstance(part, Said):
                    self._hear(part, reply)
                else:
                    self._costs = part

    def _hear(self, said: Said, reply: list[str]) -> None:
        if said.manner is Manner.ANSWER:
            reply.append(said.text)
        self.screen.show(said)

    # ----------------------------------------------------------------------------------------------- commands

    def _try_command(self, text: str) -> bool:
        """Does what a command says; False for a message. Pasted lines are a message whatever they begin with."""
        match = _COMMAND.fullmatch(text)
        if match is None:
            return False
        commands: dict[str, Callable[[str], str]] = {
            "help": lambda _: HELP,
            "?": lambda _: HELP,
            "new": self._start_anew,
            "clear": self._start_anew,
            "retry": self._retry,
            "system": self._set_system,
            "stats": self._describe_last_answer,
        }
        command = commands.get(match[1])
        if command is None and "\n" in text:
            return False
        said = command(match[2] or "") if command else f"There is no command /{match[1]}; /? lists them"
        if said:
            self.screen.note(said)
        return True

    def _start_anew(self, _: str) -> str:
        self._turns.clear()
        self._costs, self._last_message = None, ""
        self._conversation += 1
        return "A new conversation."

    def _retry(self, _: str) -> str:
        if not self._last_message:
            return "There is no message to ask again."
        if self._is_answered:
            del self._turns[-2:]
        self.answer(self._last_message)
        return ""

    def _set_system(self, text: str) -> str:
        if not text:
            return self.system or "There is no system message."
        self.system = text
        return "The system message is set."

    def _describe_last_answer(self, _: str) -> str:
        if self._costs is not None:
            return self._costs.describe()
        return "The last answer was not measured." if self._last_message else "Nothing was answered yet."

    # -------------------------------------------------------------------------------------------------- input

    def _read_message(self) -> str:
        line = text = self.read_line(PROMPT)
        if line.lstrip().startswith(QUOTES):
            return self._read_quoted(line.lstrip().removeprefix(QUOTES))
        # A backslash at the end of pasted lines is part of them.
        while line.endswith("\\") and "\n" not in line:
            line = self.read_line(CONTINUATION)
            text = f"{text[:-1]}\n{line}"
        return text

    def _read_quoted(self, text: str) -> str:
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + self.read_line(CONTINUATION)
        return text.rstrip().removesuffix(QUOTES)


@contextlib.contextmanager
def keys_unseen() -> Iterator[None]:
    """Keeps what is typed, `^C` too, from showing up in the middle of an answer; it is read afterwards."""
    try:
        terminal = sys.stdin.fileno()
        settings = termios.tcgetattr(terminal)
    except (OSError, ValueError, termios.error):
        # Standard input is no terminal.
        yield
        return
    quiet = [*settings]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


def _answer_once(talk: Chat, question: str) -> int:
    """Answers the question, with what comes through a pipe below it."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    text = "\n\n".join(part for part in (question.strip(), piped) if part)
    if not text:
        sys.stderr.write("mlx-serve: there is no question: standard input is empty\n")
        return 1
    is_answered = talk.answer(text)
    if talk.was_interrupted:
        return INTERRUPTED
    return 0 if is_answered else 1
