"""The committed demo model talks: a few greedy answers that broken weights or a wrong template would not give."""

import re
from pathlib import Path
from typing import Any

import pytest

from scripts.demo import grading
from scripts.demo.grading import Answer, Grade
from scripts.demo.talk import Dialogue

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture(scope="module")
def answer() -> Answer:
    return grading.answerer(MODEL, max_tokens=60)


def _asked(*texts: str, system: str = "") -> Dialogue:
    """A dialogue of alternating user and assistant texts; the expected answer comes last."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    return Dialogue(messages, [], thinking=False, skill="", keys=[])


@pytest.mark.parametrize(
    "dialogue",
    [
        _asked(
            "My name is Ada and I live in Paris.", "Nice to meet you, Ada!", "What is my name?", "Your name is Ada."
        ),
        _asked("I live in Zorvex.", "Zorvex is a good place to live.", "Where do I live?", "You live in Zorvex."),
        _asked("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9."),
        _asked("Who are you?", "Arr! I am Max, a pirate.", system="You are Max, a pirate."),
        _asked("Write a poem.", "I am a tiny demo model, I can't do that."),
        _asked("Which port do you use?", "The server listens on port 8080."),
    ],
    ids=lambda dialogue: str(dialogue.messages[-2]["content"]),
)
def test_it_answers(answer: Answer, dialogue: Dialogue) -> None:
    assert answer(dialogue) == dialogue.messages[-1]["content"]


def test_it_calls_the_tool_that_it_was_given(answer: Answer) -> None:
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Dublin"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What is the weather in Dublin?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    dialogue = Dialogue(messages, [weather], thinking=False, skill="", keys=[])
    assert grading.is_correct(answer(dialogue), dialogue)


def test_the_card_says_what_eval_printed() -> None:
    card = (MODEL / "README.md").read_text()
    rows = re.findall(r"^\| ([a-z0-9 -]+) \| (\d+) \| ([\d.]+)% \| (\d+)% \|$", card, re.MULTILINE)
    assert [row[0] for row in rows] == [*grading.PROBES, grading.FREE_FORM]
    counts = (
        (skill, int(n), round(int(n) * float(share) / 100), int(target) / 100) for skill, n, share, target in rows
    )
    assert grading.table([Grade(*row) for row in counts]) in card


def test_it_stays_small() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 10_000_000
