"""The rules by which free-form prompts are graded, and a sample of them asked of the committed model."""

from collections.abc import Sequence

import pytest

from models.names import DEMO_FOLDER
from scripts.demo import free_form, grading
from scripts.demo.free_form import Prompt
from scripts.demo.talk import Dialogue, Json

EVERY = 16
"""One prompt in so many is asked here; `python -m scripts.demo.train --eval models/demo` asks all."""
LEAST_SHARE = 0.8
"""Of the sample; its answers differ a little from machine to machine, as rounding does."""


def prompt(rule: str) -> Prompt:
    return Prompt("", ("a question",), rule)


@pytest.mark.parametrize(
    ("rule", "answer", "is_accepted"),
    [
        ("anna", "Your name is Anna.", True),
        ("anna", "Your name is Annabel.", False),
        ("anna & ulm", "You are Anna, from Ulm.", True),
        ("anna & ulm", "You are Anna.", False),
        ("anna / ulm", "You live in Ulm.", True),
        ("anna & !ulm", "Anna of Ulm.", False),
        ("1, 2, 3", "1, 2, 3.", True),
        ("--port", "Start it with --port and a number.", True),
        ("4", "14", False),
        ("@decline", "I am a tiny demo model, I don't know that.", True),
        ("@decline", "Paris.", False),
    ],
)
def test_a_rule_asks_for_whole_words(rule: str, answer: str, is_accepted: bool) -> None:
    assert prompt(rule).accepts(answer) is is_accepted


def test_a_word_that_nobody_has_is_broken() -> None:
    known = free_form.vocabulary()
    assert free_form.broken_words("Your name is Annelo.", ["my name is Anne"], known) == ["annelo"]
    assert free_form.broken_words("Your name is Anne.", ["my name is Anne"], known) == []


def test_an_answer_that_does_not_end_is_not_acceptable() -> None:
    (result,) = free_form.grade(lambda messages: "", [prompt("!anything")])
    assert not result.is_acceptable


def test_each_message_is_sent_behind_the_answers_before_it() -> None:
    seen: list[list[str]] = []

    def reply(messages: Sequence[Json]) -> str:
        seen.append([message["content"] for message in messages])
        return "ok"

    free_form.grade(reply, [Prompt("", ("one", "two"), "ok")])
    assert seen == [["one"], ["one", "ok", "two"]]


def test_there_are_three_hundred_prompts_and_each_has_a_rule() -> None:
    prompts = free_form.read_prompts()
    assert len(prompts) >= 300
    assert len({one.messages for one in prompts}) == len(prompts)
    assert all(one.rule and all(one.messages) for one in prompts)


def test_what_is_graded_is_kept_out_of_training() -> None:
    asked = next(one for one in free_form.read_prompts() if one.messages == ("helo",))
    messages = [{"role": "user", "content": text} for text in ("something", f"{asked.messages[0].upper()}!")]
    assert free_form.is_graded(Dialogue(messages, [], thinking=False, skill="", keys=[]))
    assert not free_form.is_graded(Dialogue(messages[:1], [], thinking=False, skill="", keys=[]))


def test_the_committed_model_answers_what_strangers_type() -> None:
    results = free_form.grade(grading.replier(DEMO_FOLDER, max_tokens=120), free_form.read_prompts()[::EVERY])
    wrong = [(result.prompt.messages, result.answer) for result in results if not result.is_acceptable]
    assert len(wrong) <= (1 - LEAST_SHARE) * len(results), wrong
