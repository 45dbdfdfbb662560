"""From the name in a request to the one identity of a model: aliases, Ollama's tag, near names. Pure."""

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

LATEST = ":latest"
"""What Ollama's clients may add to a name that has no tag, whichever API they then use."""
MAX_NAME_LENGTH = 200
"""Characters of an unknown name that an error repeats."""
MAX_LISTED = 8
"""So many models are listed to who asked for none of them."""


@dataclass(frozen=True)
class Alias:
    """Another name for a model, or a pattern of names: `*` stands for any text, `?` for one character."""

    pattern: str
    model: str


def parse_alias(text: str) -> Alias:
    """Returns what `PATTERN=NAME` says; raises ValueError."""
    pattern, equals, model = (part.strip() for part in text.partition("="))
    if not (pattern and equals and model):
        raise ValueError(f"{text!r} is no alias; write it like gpt-4o=qwen3:8b, or 'gpt-*=qwen3:8b'")
    return Alias(pattern, model)


def spellings(name: str, aliases: Sequence[Alias]) -> Iterator[str]:
    """Yields what a name may stand for, in order: itself, itself without `:latest`, what its first alias names.

    An alias that is a name without `*` and `?` comes before the name's own meaning, patterns come after it.
    """
    plain = name.removesuffix(LATEST)
    exact = next((alias.model for alias in aliases if alias.pattern in (name, plain)), None)
    if exact is not None:
        yield exact
        return
    yield name
    if plain != name:
        yield plain
    matched = next((alias.model for alias in aliases if fnmatchcase(plain, alias.pattern)), None)
    if matched is not None:
        yield matched


def served_instead(name: str, served: Collection[str]) -> str:
    """Returns a clause on what may be asked for in place of an unknown name: names like it, else those there are."""
    near = difflib.get_close_matches(name.lower(), served, n=3) if len(served) > 1 else []
    if near:
        return f"did you mean {' or '.join(near)}?"
    listed = ", ".join(list(served)[:MAX_LISTED])
    rest = f" and {len(served) - MAX_LISTED} more" if len(served) > MAX_LISTED else ""
    return f"only {listed or 'none'}{rest} {'are' if len(served) > 1 else 'is'} served here"
