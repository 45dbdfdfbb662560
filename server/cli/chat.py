"""`mlx-serve run`: a conversation with a model in this process, or in a server.

Ctrl-C stops the answer, and the text so far stays; twice at the prompt it ends the program. With a question, or where
standard input is no terminal, there is one answer.
"""

import asyncio
import contextlib
import io
import json
import os
import sys
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import typer
from rich.console import Console

from models.names import settle
from models.output.pieces import Reasoning, Text
from models.prompt.shapes import Message
from server.app.config import ServerConfig
from server.app.log import configure_logging, num_columns
from server.cli.ask import FIND_SECONDS, KeyNeeded, bearer, find_served, known_urls, models_at
from server.cli.keys import INTERRUPTED, keys_unseen, loading
from server.cli.recipes import Served
from server.cli.repl import conversation
from server.cli.repl.commands import NO_IMAGES, QUOTES, Commands, find_image, is_image
from server.cli.repl.conversation import AnswerPart, ChatError, Dialogue, ModelChoice, WordWrap
from server.engine.request import Timings

_DIM = "\x1b[2m"
_RESET = "\x1b[0m"


class Screen:
    """Wraps answers and dims reasoning; without `columns` plain answers only."""

    def __init__(
        self, write: Callable[[str], object], columns: Callable[[], int] | None = None, *, is_coloured: bool = False
    ) -> None:
        self._write = write
        self._columns = columns
        self._is_coloured = is_coloured
        self._wrap = WordWrap()
        self._is_reasoning = False

    def note(self, text: str, *, is_quiet: bool = False) -> None:
        """Shows the program's own lines."""
        if self._columns is not None:
            wrap, columns = WordWrap(), self._columns()
            text = wrap.feed(text, columns) + wrap.finish(columns)
        self._write(f"{_DIM}{text}{_RESET}\n" if is_quiet and self._is_coloured else f"{text}\n")

    def complain(self, text: str) -> None:
        """Shows an error on standard error."""
        if self._columns is None:
            sys.stderr.write(f"mlx-serve: {text}\n")
        else:
            self.note(f"mlx-serve: {text}")

    def show(self, said: Text | Reasoning) -> None:
        """Shows the next part of an answer."""
        is_reasoning = isinstance(said, Reasoning)
        if self._columns is None:
            if not is_reasoning:
                self._write(said.text)
            return
        if is_reasoning is not self._is_reasoning:
            self._turn_to(is_reasoning, self._columns())
        self._write(self._wrap.feed(said.text, self._columns()))

    def end(self, mark: str = "") -> None:
        """Ends an answer's line, with `mark` behind the last word."""
        rest = self._wrap.finish(self._columns()) if self._columns is not None else ""
        reset = _RESET if self._is_reasoning and self._is_coloured else ""
        self._write(f"{rest}{mark}{reset}\n")
        self._wrap, self._is_reasoning = WordWrap(), False

    def _turn_to(self, is_reasoning: bool, columns: int) -> None:
        rest = self._wrap.finish(columns)
        gap = "" if self._wrap.is_at_start else "\n\n"
        colour = (_DIM if is_reasoning else _RESET) if self._is_coloured else ""
        self._write(f"{rest}{gap}{colour}")
        self._wrap, self._is_reasoning = WordWrap(), is_reasoning


PROMPT = ">>> "
CONTINUATION = "... "
_LEAVE = ("bye", "exit", "quit")


def chat_somewhere(config: ServerConfig, opening: "Opening", api_key: str | None, *, is_local: bool) -> int:
    """Talks with a server's loaded model; else, or if `is_local`, loads it here.

    Returns the exit status; raises ModelError.
    """
    served = None
    try:
        served = None if is_local else find_served(config.models[0], known_urls(), api_key)
    except KeyNeeded as error:
        typer.echo(f"T{str(error)[1:]} to join it.", err=True)
    if served is not None:
        return chat(JoinedModels(served), opening, f" · joined the server at {served.url}")
    from server.cli.pull import offer

    name = offer(config.models[0]) or settle(config.models[0])
    with loading(name):
        from server.cli.repl.local import LocalModels
    configure_logging("warning")
    with contextlib.closing(LocalModels(replace(config, models=(name, *config.models[1:])))) as models:
        return chat(models, opening)


@dataclass(frozen=True)
class Opening:
    """`history` is the file for typed lines."""

    system: str = ""
    question: str = ""
    history: Path | None = None


def chat(models: ModelChoice, opening: Opening, about: str = "") -> int:
    """Talks, or answers once; returns the exit status. `about` says where the model is."""
    console = Console()
    columns = partial(num_columns, sys.stdout) if sys.stdout.isatty() else None
    is_coloured = console.is_terminal and not console.no_color
    screen = Screen(partial(typer.echo, nl=False, color=True), columns, is_coloured=is_coloured)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Invalid UTF-8 comes from the model and must not end the chat.
        sys.stdin.reconfigure(errors="replace")
    try:
        dialogue = Dialogue(opening.system)
        if opening.question or not sys.stdin.isatty():
            return _answer_once(Chat(models, screen, dialogue), opening.question)
        from server.cli.repl.terminal import line_reader

        screen.note(f"{models.name}{about} · /help for help, Ctrl-D to leave")
        Chat(models, screen, dialogue, read_line=line_reader(opening.history)).run()
    except BrokenPipeError:
        # The reader of the answer has closed the pipe; buffered text must go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


@dataclass
class Chat:
    """A person's conversations. Blocks its thread."""

    models: ModelChoice
    screen: Screen
    dialogue: Dialogue = field(default_factory=Dialogue)
    read_line: Callable[[str], str] = input
    """Shows a prompt; returns one line, or the pasted lines. Raises EOFError."""
    was_interrupted: bool = False

    def __post_init__(self) -> None:
        self._commands = Commands(self.dialogue, self.models, self.answer)

    def run(self) -> None:
        """Runs until the person leaves."""
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
        """Shows an arriving answer; False if there is none."""
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
        reply: list[str] = []
        try:
            with keys_unseen():
                asyncio.run(self._stream(reply))
        except KeyboardInterrupt:
            self.was_interrupted = True
            self.screen.end(" …")
        except ChatError as error:
            if reply:
                self.screen.end(" …")
            self.screen.complain(str(error))
        else:
            self.screen.end()
        return "".join(reply)

    async def _stream(self, reply: list[str]) -> None:
        dialogue = self.dialogue
        dialogue.timings = None
        answer = self.models.answer(dialogue.prompt(), dialogue.number, dialogue.parameters)
        async with contextlib.aclosing(answer) as parts:
            async for part in parts:
                if isinstance(part, Timings):
                    dialogue.timings = part
                    continue
                if isinstance(part, Text):
                    reply.append(part.text)
                self.screen.show(part)

    def _read_message(self) -> str:
        line = text = self.read_line(PROMPT)
        if line.lstrip().startswith(QUOTES):
            text = line.lstrip().removeprefix(QUOTES)
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + self.read_line(CONTINUATION)
            return text.rstrip().removesuffix(QUOTES)
        # A backslash at the end of pasted lines is part of them.
        while line.endswith("\\") and "\n" not in line:
            line = self.read_line(CONTINUATION)
            text = f"{text[:-1]}\n{line}"
        return text


def _answer_once(talk: Chat, question: str) -> int:
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


# ------------------------------------------------------------------------------------------- models of a server

_KINDS: Mapping[str, type[Reasoning | Text]] = {"reasoning_content": Reasoning, "content": Text}


class JoinedModels:
    """The models of one server. Conversations of several programs never mix."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._session = f"run-{uuid.uuid4().hex[:6]}"

    @property
    def name(self) -> str:
        return self._served.model

    async def answer(
        self, turns: Sequence[Message], number: int, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[AnswerPart, None]:
        """As `ModelChoice.answer`; the server notices a cancel by the closed connection."""
        arguments = conversation.template_arguments(parameters)
        body = {
            "model": self._served.model,
            "messages": list(turns),
            "session_id": f"{self._session}-{number}",
            "stream": True,
            **{name: value for name, value in parameters.items() if name != conversation.THINK},
            **({"chat_template_kwargs": arguments} if arguments else {}),
        }
        # The server sends heartbeats every few seconds, at an interval of its choice.
        timeout = httpx2.Timeout(None, connect=FIND_SECONDS)
        try:
            async with (
                httpx2.AsyncClient(timeout=timeout, trust_env=False, headers=bearer(self._served.key)) as client,
                client.stream("POST", f"{self._served.url}/v1/chat/completions", json=body) as answer,
            ):
                if answer.status_code != httpx2.codes.OK:
                    raise ChatError(_message_of(await answer.aread()))
                async for line in answer.aiter_lines():
                    for part in _parts_of(line):
                        yield part
        except httpx2.HTTPError as error:
            raise ChatError(f"the server at {self._served.url} does not answer any more") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ChatError(f"what the server at {self._served.url} sends cannot be read") from error

    def names(self) -> Sequence[str]:
        """The models that the server has or can load."""
        return [served.model for served in models_at(self._served.url, self._served.key)]

    def change(self, name: str) -> None:
        """Changes to another model of the server. Raises ChatError."""
        found = find_served(name, [self._served.url], self._served.key)
        if found is None:
            raise ChatError(f"the server at {self._served.url} has no model {name!r}; /model lists those it has")
        self._served = found


def _parts_of(line: str) -> list[AnswerPart]:
    """Raises ChatError for the server's error."""
    if not line.startswith("data: {"):
        return []
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        raise ChatError(_message_of(line.removeprefix("data: ")))
    deltas = [choice["delta"] for choice in chunk.get("choices", ())]
    parts: list[AnswerPart] = [
        kind(delta[field]) for delta in deltas for field, kind in _KINDS.items() if delta.get(field)
    ]
    if told := chunk.get("timings"):
        counts = (int(told["cache_n"]), int(told["prompt_n"]), float(told["prompt_ms"]))
        parts.append(Timings(*counts, int(told["predicted_n"]), float(told["predicted_ms"])))
    return parts


def _message_of(body: str | bytes) -> str:
    try:
        error: Any = json.loads(body)["error"]
        hint = "; /new starts another conversation" if error["code"] == "context_length_exceeded" else ""
        return f"{error['message']}{hint}"
    except (ValueError, KeyError, TypeError):
        return "the server gave no answer that can be read"
