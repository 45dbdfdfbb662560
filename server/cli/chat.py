"""`mlx-serve run`: a conversation in the terminal with a model in this process, or one that a server has loaded.

Ctrl-C stops the answer, not the program; what was said until then stays in the conversation. Twice at the prompt it
ends the program. With a question, or when standard input is no terminal, there is one answer, and the program ends.
"""

import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from server.cli.repl.commands import QUOTES, Commands
from server.cli.repl.conversation import Dialogue
from server.cli.repl.early_keys import keys_unseen
from server.cli.repl.files import NO_IMAGES, find_image, is_image
from server.cli.repl.screen import Screen, standard_screen
from server.cli.repl.speech import AnswerFailed, Manner, ModelChoice, Said

PROMPT = ">>> "
CONTINUATION = "... "
INTERRUPTED = 130
"""Exit status after Ctrl-C."""

_LEAVE = ("bye", "exit", "quit")


@dataclass(frozen=True)
class Opening:
    """How a person began: the words on the command line."""

    system: str = ""
    question: str = ""
    history: Path | None = None
    """Where what is typed is kept, if anywhere."""


def chat(models: ModelChoice, opening: Opening, about: str = "") -> int:
    """Talks until the person leaves, or answers once, and returns the exit status.

    `about` says where the model is, if not here; it is shown before the first prompt.
    """
    console = Console()
    screen = standard_screen(is_coloured=console.is_terminal and not console.no_color)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # What is no UTF-8 is a model's problem, not a reason to end.
        sys.stdin.reconfigure(errors="replace")
    try:
        dialogue = Dialogue(opening.system)
        if opening.question or not sys.stdin.isatty():
            return _answer_once(Chat(models, screen, dialogue), opening.question)
        from server.cli.repl.keyboard import Keyboard

        screen.note(f"{models.current.name}{about} · /help for help, Ctrl-D to leave")
        Chat(models, screen, dialogue, read_line=Keyboard(opening.history).read).run()
    except BrokenPipeError:
        # Whoever read the answer has enough of it; what is still buffered must go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


@dataclass
class Chat:
    """One person's conversations, one after another. Used on one thread, which it blocks."""

    models: ModelChoice
    screen: Screen
    dialogue: Dialogue = field(default_factory=Dialogue)
    read_line: Callable[[str], str] = input
    """Shows a prompt and returns one line, or the lines that were pasted; raises EOFError at the end."""
    was_interrupted: bool = False
    """Whether the last answer was stopped by the person."""

    def __post_init__(self) -> None:
        self._commands = Commands(self.dialogue, self.models, self.answer)

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
            return
        said = self._commands.try_run(text)
        if said is None:
            self.answer(text)
        elif said:
            self.screen.note(said)

    def answer(self, text: str) -> bool:
        """Sends one message and shows the answer as it comes; False if there is none."""
        image = find_image(text)
        if image is not None:
            self.screen.complain(NO_IMAGES.format(image))
            return False
        self.dialogue.last_message, self.dialogue.is_answered, self.was_interrupted = text, False, False
        self.dialogue.turns.append({"role": "user", "content": text})
        reply = self._hear_reply()
        if not reply:
            self.dialogue.turns.pop()
            return False
        self.dialogue.turns.append({"role": "assistant", "content": reply})
        self.dialogue.is_answered = True
        return True

    def _hear_reply(self) -> str:
        """Shows what is answered and returns it, as far as it came."""
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
        return "".join(reply)

    async def _stream(self, reply: list[str]) -> None:
        dialogue = self.dialogue
        dialogue.costs = None
        answer = self.models.current.answer(dialogue.prompt(), dialogue.number, dialogue.parameters)
        async with contextlib.aclosing(answer) as parts:
            async for part in parts:
                if isinstance(part, Said):
                    self._hear(part, reply)
                else:
                    dialogue.costs = part

    def _hear(self, said: Said, reply: list[str]) -> None:
        if said.manner is Manner.ANSWER:
            reply.append(said.text)
        self.screen.show(said)

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


def _answer_once(talk: Chat, question: str) -> int:
    """Answers the question, with what comes through a pipe below it."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    text = "\n\n".join(part for part in (question.strip(), piped) if part)
    if not text:
        sys.stderr.write("mlx-serve: there is no question: standard input is empty\n")
        return 1
    if is_image(piped):
        talk.screen.complain(NO_IMAGES.format("the image from the pipe"))
        return 1
    is_answered = talk.answer(text)
    if talk.was_interrupted:
        return INTERRUPTED
    return 0 if is_answered else 1
