"""Grades the demo model on what strangers type: prompts written by hand, kept in `free_form.txt`, by exact rules.

The messages of a conversation are sent one after the other, each after the model's own answers; the last answer is
graded. An answer is broken if it does not end, is empty, or holds a word that neither the model's world nor the
conversation has.
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from scripts.demo import phrases
from scripts.demo.facts import FACTS
from scripts.demo.server_facts import TOPICS
from scripts.demo.skills import BEYOND, NOTHING_TOLD, TOO_FAR
from scripts.demo.talk import IDENTITY, Dialogue, Json
from scripts.demo.words import CITIES, JOBS, LISTS, NAMES, PET_KINDS, RELATIONS, THINGS

PROMPTS = Path(__file__).with_name("free_form.txt")
DECLINES = (
    phrases.CANT_DO,
    phrases.DONT_KNOW,
    phrases.NEED_TOOL,
    phrases.GIBBERISH_ANSWER,
    phrases.ONLY_ENGLISH,
)

Reply = Callable[[list[Json]], str]
"""Answers a conversation; "" for an answer that does not end."""


class Prompt(NamedTuple):
    """One conversation of the user's messages, and what its last answer must hold."""

    heading: str
    messages: tuple[str, ...]
    rule: str

    def accepts(self, answer: str) -> bool:
        """Whether an answer holds all that the rule asks for."""
        return all(_holds(answer, part.strip()) for part in self.rule.split("&"))


def _holds(answer: str, part: str) -> bool:
    if part.startswith("!"):
        return not _is_in(answer, part[1:].strip())
    return any(_is_in(answer, wanted.strip()) for wanted in re.split(r" / ", part))


def _is_in(answer: str, wanted: str) -> bool:
    if wanted == "@decline":
        return any(decline in answer for decline in DECLINES)
    # As whole words: "no" is not in "know", nor 4 in 14.
    return re.search(rf"(?<!\w){re.escape(wanted.lower())}(?!\w)", answer.lower()) is not None


class Result(NamedTuple):
    """How one conversation ended."""

    prompt: Prompt
    answer: str
    broken: list[str]

    @property
    def is_acceptable(self) -> bool:
        """Whether the answer is what the rule asks for, and whole."""
        return bool(self.answer) and not self.broken and self.prompt.accepts(self.answer)


def read_prompts(path: Path = PROMPTS) -> list[Prompt]:
    """Returns the prompts in the order of the file."""
    prompts, heading = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            heading = line.strip("[]")
        elif "=>" in line and not line.startswith("#"):
            messages, rule = line.split("=>")
            prompts.append(Prompt(heading, tuple(text.strip() for text in messages.split(" | ")), rule.strip()))
    return prompts


def is_graded(dialogue: Dialogue) -> bool:
    """Whether a dialogue asks what is graded: a prompt of one message, case and punctuation left aside."""
    graded = _graded_texts()
    return any(_bare(m["content"]) in graded for m in dialogue.messages if m["role"] == "user")


@lru_cache
def _graded_texts() -> frozenset[str]:
    return frozenset(_bare(prompt.messages[0]) for prompt in read_prompts() if len(prompt.messages) == 1)


def _bare(text: str) -> str:
    return " ".join(re.findall(r"\w+|\+|-|=", text.lower()))


def words_of(text: str) -> set[str]:
    """The words of a text in lower case, numbers left aside."""
    return set(re.findall(r"[^\W\d_]+", text.lower()))


def vocabulary() -> set[str]:
    """Every word that the model's fixed answers and lists hold."""
    texts: list[str] = [IDENTITY, phrases.INTRODUCTION, *DECLINES, BEYOND, TOO_FAR, NOTHING_TOLD]
    texts += [answer for _, answer in phrases.SMALL_TALK]
    texts += [topic.answer for topic in TOPICS]
    texts += [part for fact in FACTS.values() for part in (fact.noted, fact.answer, fact.missing)]
    texts += [item for items in LISTS.values() for item in items]
    texts += [*NAMES, *CITIES, *JOBS, *PET_KINDS, *RELATIONS, *THINGS, "yes no you have not told me you said x"]
    return words_of(" ".join(texts))


def broken_words(answer: str, conversation: Iterable[str], known: set[str]) -> list[str]:
    """The words of an answer that are in nobody's vocabulary."""
    return sorted(words_of(answer) - known - words_of(" ".join(conversation)))


def grade(reply: Reply, prompts: Iterable[Prompt]) -> list[Result]:
    """Holds each conversation."""
    known = vocabulary()
    return [_hold(reply, prompt, known) for prompt in prompts]


def _hold(reply: Reply, prompt: Prompt, known: set[str]) -> Result:
    conversation: list[Json] = []
    answer = ""
    for text in prompt.messages:
        conversation.append({"role": "user", "content": text})
        answer = reply(conversation)
        conversation.append({"role": "assistant", "content": answer})
    return Result(prompt, answer, broken_words(answer, prompt.messages, known))


def row(results: list[Result]) -> str:
    """The results as a row of the card's table."""
    share = sum(result.is_acceptable for result in results) / len(results)
    return f"| free-form prompts | {len(results)} | {share:.1%} | 90% |"


def summary(results: list[Result], show_failures: int) -> str:
    """The results in words: failures first, then figures by heading."""
    failures = [result for result in results if not result.is_acceptable]
    lines = [f"{' | '.join(r.prompt.messages)!r}\n    said {r.answer!r}, not {r.prompt.rule!r}" for r in failures]
    lines = lines[:show_failures]
    for heading in dict.fromkeys(result.prompt.heading for result in results):
        group = [result.is_acceptable for result in results if result.prompt.heading == heading]
        lines.append(f"{heading:24} {sum(group):3} of {len(group)}")
    broken = sum(len(result.broken) > 0 for result in results)
    return "\n".join([*lines, f"answers with broken words: {broken}", row(results)])
