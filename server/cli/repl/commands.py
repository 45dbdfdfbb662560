"""The slash commands of a chat, and their files."""

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from models.errors import ModelError, reason
from server.cli.repl import conversation
from server.cli.repl.conversation import ChatError, Dialogue, ModelChoice

MAX_BYTES = 256 * 2**20
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff", ".heic")
NO_IMAGES = "models here take text only, so {} cannot be shown to them; describe it in words"

_PATH = re.compile(r"""(?P<quote>['"])(?P<quoted>.+?)(?P=quote)|(?P<bare>(?:\\.|\S)+)""")
_SIGNATURES = ("\ufffdPNG\r\n", "\ufffdPNG\n", "GIF87a", "GIF89a", "\ufffd\ufffd\ufffd\ufffd\x00\x10JFIF")


def save_text(path: Path, text: str) -> None:
    """Writes for the owner alone, completely or not at all. Raises ChatError.

    Of existing files only a saved conversation is replaced.
    """
    if path.exists() and not (path.is_file() and conversation.is_conversation(read_text(path))):
        raise ChatError(f"{path} is there already and is no saved conversation; choose another name")
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            new.touch(0o600)
            with new.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
    except (OSError, UnicodeEncodeError) as error:
        raise ChatError(f"{path} cannot be written: {reason(error)}") from error


def read_text(path: Path) -> str:
    """Raises ChatError."""
    try:
        if not path.is_file() and path.exists():
            raise ChatError(f"{path} is no file")
        if path.stat().st_size > MAX_BYTES:
            raise ChatError(f"{path} is too long for a conversation")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ChatError(f"{path} cannot be read: {reason(error)}") from error


def find_image(text: str) -> str | None:
    """The first image's path in a message, as of a dropped file; a bare name is none."""
    for match in _PATH.finditer(text):
        path = match["quoted"] or re.sub(r"\\(.)", r"\1", match["bare"])
        path = path.removeprefix("file://")
        if path.startswith(("/", "./", "../", "~/")) and path.lower().endswith(IMAGE_SUFFIXES) and _is_file(path):
            return path
    return None


def is_image(text: str) -> bool:
    """Whether a pipe's text is an image."""
    return text.startswith(_SIGNATURES)


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):
        return False


QUOTES = '"""'

_COMMAND = re.compile(r"/([a-z]+|\?)(?:[^\S\n]+(.*))?", re.DOTALL)


class Commands:
    """Each command returns text to show."""

    def __init__(self, dialogue: Dialogue, models: ModelChoice, ask: Callable[[str], object]) -> None:
        self._dialogue = dialogue
        self._models = models
        self._ask = ask

    def try_run(self, text: str) -> str | None:
        """Returns None for a message, as pasted lines always are."""
        match = _COMMAND.fullmatch(text)
        if match is None:
            return None
        command = _BY_NAME.get(match[1])
        if command is None:
            return None if "\n" in text else f"There is no command /{match[1]}; /? lists them"
        try:
            return command(self, (match[2] or "").strip())
        except (ChatError, ModelError) as error:
            return str(error)

    def _help(self, _: str) -> str:
        return HELP

    def _start_anew(self, _: str) -> str:
        self._dialogue.start_anew()
        return "A new conversation."

    def _retry(self, _: str) -> str:
        if not self._dialogue.last_message:
            return "There is no message to ask again."
        if self._dialogue.is_answered:
            del self._dialogue.turns[-2:]
        self._ask(self._dialogue.last_message)
        return ""

    def _set_system(self, text: str) -> str:
        if not text:
            return self._dialogue.system or "There is no system message."
        self._dialogue.system = text
        return "The system message is set."

    def _set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        said = self._dialogue.parameters
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
        about = f"model    {self._models.name}\nsystem   {self._dialogue.system or 'none'}"
        said = conversation.describe(self._dialogue.parameters)
        return f"{about}\nmessages {len(self._dialogue.turns)}\n{said}"

    def _change_model(self, name: str) -> str:
        current = self._models.name
        if not name:
            others = [other for other in self._models.names() if other != current]
            return "\n".join([f"{current}, which you are talking to", *others])
        self._models.change(name)
        return f"{self._models.name} goes on with the conversation."

    def _save(self, name: str) -> str:
        path = _path(name, "/save")
        save_text(path, self._dialogue.dump(self._models.name))
        return f"Saved in {path}."

    def _load(self, name: str) -> str:
        path = _path(name, "/load")
        text = read_text(path)
        try:
            model = self._dialogue.load(text)
        except ChatError as error:
            raise ChatError(f"{path} cannot be loaded: {error}") from error
        other = f" It was with {model}: /model {model}" if model != self._models.name else ""
        return f"{len(self._dialogue.turns)} messages.{other}"

    def _describe_last_answer(self, _: str) -> str:
        if self._dialogue.timings is not None:
            return conversation.describe_timings(self._dialogue.timings)
        return "The last answer was not measured." if self._dialogue.last_message else "Nothing was answered yet."


def _path(name: str, command: str) -> Path:
    if not name:
        raise ChatError(f"{command} needs the name of a file")
    return Path(name).expanduser().absolute()


TABLE: Sequence[tuple[str, str, Callable[[Commands, str], str]]] = (
    ("/help, /?", "this text", Commands._help),
    ("/new, /clear", "forget the conversation and start another", Commands._start_anew),
    ("/retry", "ask the last message again", Commands._retry),
    ("/system TEXT", "set the system message; without TEXT: show it", Commands._set_system),
    ("/set NAME VALUE", "set a parameter, such as temperature 0.2; 'default' unsets it", Commands._set),
    ("/set", "show what is set", Commands._set),
    ("/show", "the model, the system message and what is set", Commands._show),
    ("/model NAME", "go on with another model; without NAME: list them", Commands._change_model),
    ("/save FILE", "write the conversation to a file", Commands._save),
    ("/load FILE", "go on with a conversation that was saved", Commands._load),
    ("/stats", "tokens reused, tokens evaluated and speed of the last answer", Commands._describe_last_answer),
)
"""What a person types, its help, and what is done."""
_BY_NAME = {name: act for typed, _, act in TABLE for name in re.findall(r"/(\w+|\?)", typed)}

_rows = "\n".join(f"{typed:<16} {told}" for typed, told, _ in TABLE)
HELP = f"""\
{_rows}
/bye             leave, as do /exit, /quit and Ctrl-D

Pasted lines are one message. {QUOTES} begins and ends a message of several
lines; a backslash at the end of a line continues it. Ctrl-R searches what
was typed before. Ctrl-C stops an answer; twice at the prompt it leaves."""
