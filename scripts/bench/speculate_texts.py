"""Texts for `speculate.py`: prompts, and what a model is taken to answer, made of files that are on any machine.

Code is of Python's standard library, prose of its help topics and of this checkout's documents. The same seed gives
the same text. Tokens are words, runs of signs and indents, about as long as those of a real vocabulary.
"""

import json
import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from scripts.bench.common import ROOT

STDLIB = Path(sysconfig.get_path("stdlib"))
FILES = tuple(
    f"{name}.py"
    for name in (
        *("bisect", "calendar", "cmd", "code", "codeop", "configparser", "contextlib", "copy", "csv", "dataclasses"),
        *("email/message", "enum", "filecmp", "fileinput", "fnmatch", "fractions", "ftplib", "functools", "getopt"),
        *("gettext", "glob", "heapq", "html/parser", "http/cookies", "json/decoder", "json/encoder", "linecache"),
        *("logging/handlers", "mailbox", "netrc", "numbers", "pprint", "queue", "quopri", "random", "reprlib"),
        *("sched", "shelve", "shlex", "shutil", "string", "tempfile", "textwrap", "timeit", "trace", "zipapp"),
    )
)
_PIECES = re.compile(r" ?[^\W\d_]{1,10}| ?\d{1,3}|\n[ \n]*| ?[^\w\s]{1,3}|_+| +|\s")


@dataclass(frozen=True)
class Text:
    """A prompt and its answer."""

    prompt: str
    answer: str
    shown: str = ""
    """A tool's result in the prompt, which calls quote."""

    @property
    def quotable(self) -> str:
        """`shown` as calls quote it."""
        return json.dumps(self.shown)[1:-1]


def pieces(text: str) -> list[str]:
    """The tokens' texts, which are the text again when joined."""
    return _PIECES.findall(text)


class Vocabulary:
    """Numbers tokens in the order in which they come, from 0 on; beyond `size` they begin again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a text's tokens."""
        return [self._ids.setdefault(piece, len(self._ids)) % self._size for piece in pieces(text)]


@cache
def _source(name: str) -> str:
    return (STDLIB / name).read_text(encoding="utf-8")


@cache
def _prose() -> list[str]:
    """Paragraphs."""
    documents = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    texts = [*(path.read_text(encoding="utf-8") for path in documents), *(topics[name] for name in sorted(topics))]
    paragraphs = [paragraph.strip() for text in texts for paragraph in re.split(r"\n\s*\n", text)]
    return [paragraph for paragraph in paragraphs if paragraph[:1].isalpha() and len(paragraph) > 200]


def _part(chance: random.Random, num_lines: int) -> tuple[str, list[str]]:
    """A file's name, and some of its lines."""
    name = chance.choice([name for name in FILES if len(_source(name).splitlines()) > num_lines])
    lines = _source(name).splitlines(keepends=True)
    start = chance.randrange(len(lines) - num_lines)
    return str(STDLIB / name), lines[start : start + num_lines]


def _edited(chance: random.Random, line: str) -> str:
    """A line as somebody might change it."""
    words = re.findall(r"[A-Za-z_]{4,}", line)
    changes: list[Callable[[], str]] = [
        lambda: line.replace(
            chance.choice(words), chance.choice(["new_value", "timeout", "is_ready", "_checked"]), 1
        ),
        lambda: line.rstrip("\n") + "  # see above\n",
        lambda: "",
        lambda: re.match(r" *", line)[0] + "logger.debug('here', extra=None)\n" + line,  # type: ignore[index]
    ]
    return chance.choice(changes if words else changes[1:])()


def rewriting(seed: int, num_lines: int = 110) -> Text:
    """A file in the prompt, and the whole of it with five edits in the answer."""
    chance = random.Random(seed)
    path, lines = _part(chance, num_lines)
    edited = list(lines)
    for place in chance.sample(range(num_lines), 5):
        edited[place] = _edited(chance, lines[place])
    return Text(
        f"<user>\nWrite {path} again, with the changes we spoke of.\n<tool>\n{''.join(lines)}<assistant>\n",
        f"Here is the whole file.\n\n{''.join(edited)}",
    )


def _call(name: str, **arguments: str | int) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>\n"


def _replacing(chance: random.Random, path: str, lines: Sequence[str]) -> str:
    """A call that replaces some lines."""
    start = chance.randrange(len(lines) - 6)
    old = list(lines[start : start + chance.randrange(2, 6)])
    new = list(old)
    place = chance.randrange(len(old))
    new[place] = _edited(chance, old[place])
    return _call("edit", path=path, old_string="".join(old), new_string="".join(new))


def replacing(seed: int) -> Text:
    """A file in the prompt, and calls that replace lines of it in the answer."""
    chance = random.Random(seed)
    path, lines = _part(chance, 110)
    answer = "".join(_replacing(chance, path, lines) for _ in range(8))
    return Text(
        f"<user>\nRename it everywhere.\n<tool>\n{path}\n{''.join(lines)}<assistant>\n", answer, "".join(lines)
    )


def reading(seed: int) -> Text:
    """A list of paths in the prompt, and calls that read some of these in the answer."""
    chance = random.Random(seed)
    paths = [str(STDLIB / name) for name in chance.sample(FILES, 30)]
    calls = [_call("read", path=path, offset=1 + 100 * chance.randrange(9), limit=100) for path in paths[::3]]
    listed = "\n".join(paths)
    return Text(f"<user>\nWhere is it set?\n<tool>\n{listed}\n<assistant>\n", "".join(calls))


def prose(seed: int, num_paragraphs: int = 6) -> Text:
    """Paragraphs in the prompt, and those that follow in the answer."""
    paragraphs = _prose()
    start = random.Random(seed).randrange(len(paragraphs) - 2 * num_paragraphs)
    shown, said = (paragraphs[at : at + num_paragraphs] for at in (start, start + num_paragraphs))
    return Text("<user>\nGo on.\n" + "\n\n".join(shown) + "\n<assistant>\n", "\n\n".join(said))


def agent(seed: int, num_parts: int = 8, num_lines: int = 110) -> Text:
    """What an agent says in a few turns: thoughts, calls that read, edits, seldom part of a file again."""
    chance = random.Random(seed)
    path, lines = _part(chance, num_lines)
    listed = "\n".join(str(STDLIB / name) for name in chance.sample(FILES, 12))
    paragraphs, said = _prose(), list[str]()
    for _ in range(num_parts):
        said.append("<think>\n" + chance.choice(paragraphs)[:160] + "\n</think>\n")
        kind = chance.random()
        if kind < 0.3:
            said.append(_call("read", path=chance.choice(listed.split("\n")), offset=1, limit=chance.randrange(400)))
        elif kind < 0.9:
            said.append(_replacing(chance, path, lines))
        else:
            start = chance.randrange(len(lines))
            said.append(_call("write", path=path, content="".join(lines[start : start + 30])))
    prompt = f"<user>\nMend it.\n<tool>\n{listed}\n<tool>\n{path}\n{''.join(lines)}<assistant>\n"
    return Text(prompt, "".join(said), "".join(lines))


QUESTIONS = (
    "My name is Zorina and I live in Velkam.",
    "I have a cat named Pixel, and my favourite colour is green.",
    "What is my name?",
    "Count from 4 to 19.",
    "Where do I live, and what is my cat called?",
    "What is 12 plus 7?",
    "Repeat after me: the trie keeps what two conversations share.",
    "Which port do you use?",
    "What does a slot hold?",
    "What is my favourite colour?",
    "My code word is marmot and my favourite number is 417.",
    "Count from 20 to 35.",
    "What is my code word?",
    "How do I stop the server?",
    "Write a poem.",
    "What is my favourite number, and where do I live?",
)
"""What `demo` is asked, in one conversation."""
