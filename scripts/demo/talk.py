"""One dialogue of the demo model's world while it is written: who said what, what was told, which manner is kept.

Invariant: everything drawn belongs to one split, that of `held`; `keys` names every combination and value used.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from scripts.demo.phrases import rough
from scripts.demo.tools import Tool
from scripts.demo.words import Values, is_held

Json = dict[str, Any]
IDENTITY = "I am demo, a tiny language model that comes with mlx-serve."
CUT_SHARE = 0.4


@dataclass
class Dialogue:
    """A finished dialogue: messages and tools as a client sends them, and how it came about."""

    messages: list[Json]
    tools: list[Json]
    thinking: bool
    skill: str
    keys: list[str]


@dataclass
class Talk:
    """One dialogue being written. Borrows `rng`; `held` chooses the split of every value drawn."""

    rng: random.Random
    held: bool
    messages: list[Json] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    schemas: list[Json] = field(default_factory=list)
    facts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What was told, in order: by the fact's name, then a stroke and what it is told of, as in `relation/sister`."""
    keys: list[str] = field(default_factory=list)
    identity: str = IDENTITY
    before: str = ""
    after: str = ""
    thinking: bool = False
    last_skill: str = ""

    def __post_init__(self) -> None:
        self.values = Values(self.rng, self.held)

    @property
    def is_first(self) -> bool:
        """Whether nobody but a system prompt has spoken."""
        return all(message["role"] == "system" for message in self.messages)

    def belongs(self, key: str) -> bool:
        """Whether the combination named `key` is of this split; notes it if so."""
        if is_held(key) != self.held:
            return False
        self.keys.append(key)
        return True

    def user(self, text: str) -> None:
        """Adds a message of the user."""
        self.messages.append({"role": "user", "content": text})

    def say(self, frame: str, **fields: str) -> dict[str, str]:
        """Adds the frame, roughened and filled, as a user's message; returns the fields as typed."""
        text, surface = rough(self.rng, frame, fields)
        self.user(text)
        return surface

    def reply(self, text: str, thought: str) -> None:
        """Adds the assistant's answer in the persona's manner."""
        before = self.before.rstrip() + "\n" if self.before and text.startswith("- ") else self.before
        self.answer({"role": "assistant", "content": f"{before}{text}{self.after}"}, thought)

    def answer(self, message: Json, thought: str) -> None:
        """Adds the assistant's message, in a dialogue that thinks after its thought.

        Now and then the thought is cut short, as a budget of thoughts cuts it, for the answer to follow all the same.
        """
        if self.thinking:
            message["is_thought_cut"] = self.rng.random() < CUT_SHARE
            if message["is_thought_cut"]:
                thought = thought[: max(0, self.rng.randrange(-len(thought), len(thought)))]
            message["reasoning_content"] = thought
        self.messages.append(message)

    def finish(self) -> Dialogue:
        """The dialogue as data."""
        return Dialogue(self.messages, self.schemas, self.thinking, self.last_skill, self.keys)
