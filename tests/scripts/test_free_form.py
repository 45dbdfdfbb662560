"""The rules by which free-form prompts are graded, and a sample of them asked of the committed model."""

from models.names import DEMO_FOLDER
from scripts.demo import free_form, grading
from scripts.demo.free_form import Prompt

EVERY = 16
"""One prompt in so many is asked here; `python -m scripts.demo.train --eval models/demo` asks all."""
LEAST_SHARE = 0.8
"""Of the sample; its answers differ a little from machine to machine, as rounding does."""


def prompt(rule: str) -> Prompt:
    return Prompt("", ("a question",), rule)


def test_there_are_three_hundred_prompts_and_each_has_a_rule() -> None:
    prompts = free_form.read_prompts()
    assert len(prompts) >= 300
    assert len({one.messages for one in prompts}) == len(prompts)
    assert all(one.rule and all(one.messages) for one in prompts)


def test_the_committed_model_answers_what_strangers_type() -> None:
    results = free_form.grade(grading.replier(DEMO_FOLDER, max_tokens=120), free_form.read_prompts()[::EVERY])
    wrong = [(result.prompt.messages, result.answer) for result in results if not result.is_acceptable]
    assert len(wrong) <= (1 - LEAST_SHARE) * len(results), wrong
