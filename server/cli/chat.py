"""`mlx-serve run`: a conversation with a model in this process, or in a server.

Ctrl-C stops the answer, and the text so far stays; twice at the prompt it ends the program. With a question, or where
standard input is no terminal, there is one answer.
"""

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

import httpx2
import typer
from rich.console import Console

from models.errors import ModelError, told_as
from models.output.pieces import Reasoning, Text
from models.prompt.shapes import Message
from models.vision.image_files import is_image, read_header
from server.app.config import ServerConfig
from server.app.log import configure_logging, num_columns
from server.cli.ask import FIND_SECONDS, KeyNeeded, Served, bearer, find_served, known_urls, models_at
from server.cli.keys import INTERRUPTED, keys_unseen, loading
from server.cli.repl import conversation
from server.cli.repl.conversation import AnswerPart, ChatError, Dialogue, ImagePart, MessageContent, TextPart
from server.cli.repl.terminal import Screen, line_reader
from server.engine.request import EngineError, Timings

if TYPE_CHECKING:
    from server.cli.repl.local import LocalModels

Models: TypeAlias = "LocalModels | JoinedModels"
"""What there is to talk to, one model at a time: here, or in a server."""

PROMPT = ">>> "
CONTINUATION = "... "
QUOTES = '"""'
_LEAVE = ("bye", "exit", "quit")
_COMMAND = re.compile(r"/([a-z]+|\?)(?:[^\S\n]+(.*))?", re.DOTALL)


def chat_somewhere(config: ServerConfig, opening: "Opening", api_key: str | None, *, is_local: bool) -> int:
    """Talks with a server's loaded model; else, or if `is_local`, loads it here. Returns the exit status."""
    served = None
    try:
        served = None if is_local else find_served(config.models[0], known_urls(), api_key)
    except KeyNeeded as error:
        typer.echo(f"T{str(error)[1:]} to join it.", err=True)
    if served is not None:
        return chat(JoinedModels(served), opening, f" · joined the server at {served.url}")
    from server.cli.pull import offer

    name = offer(config.models[0]) or config.models[0]
    with loading(name):
        from server.cli.repl.local import LocalModels
    configure_logging("warning")
    with contextlib.closing(LocalModels(replace(config, models=(name,)))) as models:
        return chat(models, opening)


@dataclass(frozen=True)
class Opening:
    """`history` is the file for typed lines."""

    system: str = ""
    question: str = ""
    history: Path | None = None


def chat(models: "Models", opening: Opening, about: str = "") -> int:
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
        screen.note(f"{models.name}{about} · /help for help, Ctrl-D to leave")
        Chat(models, screen, dialogue, read_line=line_reader(opening.history)).run()
    except BrokenPipeError:
        # The reader of the answer has closed the pipe; buffered text must go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


@dataclass
class Chat:
    """A person's conversations. Blocks its thread. A command returns what is shown then."""

    models: "Models"
    screen: Screen
    dialogue: Dialogue = field(default_factory=Dialogue)
    read_line: Callable[[str], str] = input
    """Shows a prompt; returns one line, or the pasted lines. Raises EOFError."""

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
        match = _COMMAND.fullmatch(text)
        command = match and _BY_NAME.get(match[1])
        if not text:
            self.screen.note("Nothing to send: type a message, or /? for help.", is_quiet=True)
        elif match and command:
            try:
                said = command(self, (match[2] or "").strip())
            except (ChatError, ModelError) as error:
                said = str(error)
            if said:
                self.screen.note(said)
        elif match and "\n" not in text:
            hint = conversation.nearest(f"/{match[1]}", [f"/{name}" for name in _BY_NAME], "/? lists them")
            self.screen.note(f"There is no command /{match[1]}; {hint}")
        else:
            self.ask(text)

    def ask(self, text: str, piped: bytes = b"") -> int:
        """Asks what was typed, with images in place of their paths; returns as `answer`."""
        try:
            content = with_images(text, piped)
            if not isinstance(content, str) and not self.models.sees:
                raise ChatError(NO_IMAGES.format(self.models.name))
        except (ChatError, ModelError) as error:
            self.screen.complain(str(error))
            return 1
        return self.answer(content)

    def answer(self, content: MessageContent) -> int:
        """Shows an arriving answer; returns an exit status, 1 if there is none."""
        self.dialogue.unanswered = content
        message, reply = {"role": "user", "content": content}, list[str]()
        was_interrupted = self._hear(message, reply)
        if reply:
            self.dialogue.turns += [message, {"role": "assistant", "content": "".join(reply)}]
            self.dialogue.unanswered = ""
        elif was_interrupted:  # a question that was not answered is still a part of the conversation
            self.dialogue.turns.append(message)
            self.dialogue.unanswered = ""
        return INTERRUPTED if was_interrupted else 0 if reply else 1

    def _hear(self, message: Message, reply: list[str]) -> bool:
        """Fills `reply`; returns whether Ctrl-C stopped the answer."""
        try:
            with keys_unseen():
                asyncio.run(self._stream(message, reply))
        except KeyboardInterrupt:
            self.screen.end(" …")
            return True
        except (ChatError, ModelError, EngineError) as error:
            if reply:
                self.screen.end(" …")
            self.screen.complain(str(error))
        else:
            self.screen.end()
        return False

    async def _stream(self, message: Message, reply: list[str]) -> None:
        dialogue = self.dialogue
        dialogue.timings = None
        answer = self.models.answer([*dialogue.prompt(), message], dialogue.number, dialogue.parameters)
        async with contextlib.aclosing(answer) as parts:
            async for part in parts:
                if isinstance(part, Timings):
                    dialogue.timings = part
                    continue
                reply += [part.text] if isinstance(part, Text) else []
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

    def _start_anew(self, _: str) -> str:
        self.dialogue.start_anew()
        return "A new conversation."

    def _retry(self, _: str) -> str:
        if message := self.dialogue.take_back():
            self.answer(message)
        return "" if message else "There is no message to ask again."

    def _set_system(self, text: str) -> str:
        if not text:
            return self.dialogue.system or "There is no system message."
        self.dialogue.system = text
        return "The system message is set."

    def _set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        said = self.dialogue.parameters
        if not name:
            return conversation.describe(said)
        if name == "system":
            raise ChatError("the system message is no parameter; /system TEXT sets it")
        conversation.check_name(name)
        if value.strip() == "default":
            said.pop(name, None)
        elif value.strip():
            said[name] = conversation.parse_parameter(name, value.strip())
        return conversation.describe({name: said[name]}) if name in said else f"{name} is as the model recommends."

    def _show(self, _: str) -> str:
        about = f"model    {self.models.name}\nsystem   {self.dialogue.system or 'none'}"
        said = conversation.describe(self.dialogue.parameters)
        return f"{about}\nmessages {len(self.dialogue.turns)}\n{said}"

    def _change_model(self, name: str) -> str:
        current = self.models.name
        if not name:
            others = [other for other in self.models.names() if other != current]
            return "\n".join([f"{current}, which you are talking to", *others])
        self.models.change(name)
        return f"{self.models.name} goes on with the conversation."

    def _save(self, name: str) -> str:
        path = _path(name, "/save")
        save_text(path, self.dialogue.dump(self.models.name))
        return f"Saved in {path}."

    def _load(self, name: str) -> str:
        path = _path(name, "/load")
        text = read_text(path)
        with told_as(ChatError, f"{path} cannot be loaded", ChatError, ModelError):
            model = self.dialogue.load(text)
        other = (
            f" The conversation was with {model}; to go on with that: /model {model}"
            if model != self.models.name
            else ""
        )
        return f"{len(self.dialogue.turns)} messages.{other}"

    def _describe_last_answer(self, _: str) -> str:
        if self.dialogue.timings is not None:
            return conversation.describe_timings(self.dialogue.timings)
        is_stopped = bool(self.dialogue.turns) and self.dialogue.turns[-1]["role"] == "user"
        return "The answer was stopped before its first word." if is_stopped else "There is no answer yet."


def _path(name: str, command: str) -> Path:
    if not name:
        raise ChatError(f"{command} needs the name of a file")
    return Path(name).expanduser().absolute()


TABLE: Sequence[tuple[str, str, Callable[[Chat, str], str]]] = (
    ("/help, /?", "this text", lambda *_: HELP),
    ("/new, /clear", "forget the conversation and start another", Chat._start_anew),
    ("/retry", "ask the last message again", Chat._retry),
    ("/system TEXT", "set the system message; without TEXT: show it", Chat._set_system),
    ("/set NAME VALUE", "set a parameter, such as temperature 0.2; 'default' unsets it", Chat._set),
    ("/set", "show what is set", Chat._set),
    ("/show", "the model, the system message and what is set", Chat._show),
    ("/model NAME", "go on with another model; without NAME: list them", Chat._change_model),
    ("/save FILE", "write the conversation to a file", Chat._save),
    ("/load FILE", "go on with a conversation that was saved", Chat._load),
    ("/stats", "tokens reused, tokens evaluated and speed of the last answer", Chat._describe_last_answer),
)
"""What a person types, its help, and what is done."""
_BY_NAME = {name: act for typed, _, act in TABLE for name in re.findall(r"/(\w+|\?)", typed)}

_rows = "\n".join(f"{typed:<16} {meaning}" for typed, meaning, _ in TABLE)
HELP: str = f"""\
{_rows}
/bye             leave, as do /exit, /quit and Ctrl-D

Pasted lines are one message. {QUOTES} begins and ends a message of several
lines; a backslash at the end of a line continues it. Ctrl-R searches what
was typed before. Ctrl-C stops an answer; twice at the prompt it leaves."""


def _answer_once(talk: Chat, question: str) -> int:
    piped = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
    if not question.strip() and not piped.strip():
        sys.stderr.write("mlx-serve: there is no question: standard input is empty\n")
        return 1
    return talk.ask(question.strip(), piped)


# ---------------------------------------------------------------------------------------------------------- files

MAX_BYTES = 256 * 2**20
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff", ".heic")
NO_IMAGES = "{} sees no images; describe in words what it cannot be shown"
_UNREAD_SUFFIXES = (".bmp", ".tiff", ".heic")
_ENDS = "?!.,;:)"
"""What may stand after a path."""

_PATH = re.compile(r"""(?P<quote>['"])(?P<quoted>.+?)(?P=quote)|(?P<bare>(?:\\.|\S)+)""")


def save_text(path: Path, text: str) -> None:
    """For the owner alone, completely or not at all. Only a saved conversation is replaced. Raises ChatError."""
    if path.exists() and conversation.read_record(read_text(path)) is None:
        raise ChatError(f"{path} is there already and is no saved conversation; choose another name")
    with told_as(ChatError, f"{path} cannot be written"), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder) / path.name
        new.touch(0o600)
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def read_text(path: Path) -> str:
    """Raises ChatError."""
    with told_as(ChatError, f"{path} cannot be read"):
        if not path.is_file() and path.exists():
            raise ChatError(f"{path} is no file")
        if path.stat().st_size > MAX_BYTES:
            raise ChatError(f"{path} is too long for a conversation")
        return path.read_text(encoding="utf-8", errors="replace")


def with_images(text: str, piped: bytes = b"") -> MessageContent:
    """A message with its images and what was piped; a text if there is no image.

    Raises InvalidImage for one that is damaged or of a kind that is not read.
    """
    parts, end = list[TextPart | ImagePart](), 0
    for start, stop, image in find_images(text):
        parts += [*_text_parts(text[end:start]), _image_part(image)]
        end = stop
    parts += _text_parts(text[end:])
    parts += [_image_part(piped)] if is_image(piped) else _text_parts(piped.decode(errors="replace"))
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "\n\n".join(texts) if len(texts) == len(parts) else parts


def _text_parts(text: str) -> list[TextPart]:
    return [{"type": "text", "text": text.strip()}] if text.strip() else []


def _image_part(data: bytes) -> ImagePart:
    read_header(data)
    return {"type": "image_url", "image_url": {"url": f"data:image;base64,{base64.b64encode(data).decode()}"}}


def find_images(text: str) -> Iterator[tuple[int, int, bytes]]:
    """Where a message names images that are there, as of dropped files, and their bytes; a bare name is none."""
    for match in _PATH.finditer(text):
        named = match["quoted"] or match["bare"].rstrip(_ENDS)
        stop = match.end() if match["quoted"] else match.start() + len(named)
        path = named if match["quoted"] else re.sub(r"\\(.)", r"\1", named)
        path = unquote(path.removeprefix("file://")) if path.startswith("file://") else path
        if path.startswith(("/", "./", "../", "~/")) and path.lower().endswith(IMAGE_SUFFIXES):
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                data = Path(path).expanduser().read_bytes()
                if is_image(data) or path.lower().endswith(_UNREAD_SUFFIXES):
                    yield match.start(), stop, data


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

    @property
    def sees(self) -> bool:
        """Whether the model sees images."""
        return self._served.sees

    async def answer(
        self, turns: Sequence[Message], number: int, parameters: Mapping[str, Any]
    ) -> AsyncGenerator[AnswerPart, None]:
        """As `LocalModels.answer`; the server notices a cancel by the closed connection."""
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
        if (server := find_served(name, [self._served.url], self._served.key)) is None:
            raise ChatError(f"the server at {self._served.url} has no model {name!r}; /model lists those it has")
        self._served = server


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
    if timings := chunk.get("timings"):
        counts = (int(timings["cache_n"]), int(timings["prompt_n"]), float(timings["prompt_ms"]))
        parts.append(Timings(*counts, int(timings["predicted_n"]), float(timings["predicted_ms"])))
    return parts


def _message_of(body: str | bytes) -> str:
    try:
        error: Any = json.loads(body)["error"]
        hint = "; /new starts another conversation" if error["code"] == "context_length_exceeded" else ""
        return f"{error['message']}{hint}"
    except (ValueError, KeyError, TypeError):
        return "the server gave no answer that can be read"
