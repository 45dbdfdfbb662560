"""The demo model's world: the same seed gives the same text, and evaluation stays apart from training."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from scripts.demo import grading
from scripts.demo.talk import Dialogue
from scripts.demo.tokenizer import assistant_text, render
from scripts.demo.tools import DAYS
from scripts.demo.words import held_words, is_held
from scripts.demo.world import training_dialogue

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
NUM_DIALOGUES = 300


def _dialogues(first_seed: int = 0) -> list[Dialogue]:
    seeds = range(first_seed, first_seed + NUM_DIALOGUES)
    return [training_dialogue(random.Random(seed), 1 + seed % 11, seed % 13 == 0) for seed in seeds]


@pytest.fixture(scope="module")
def training() -> list[Dialogue]:
    return _dialogues()


@pytest.fixture(scope="module")
def with_full_thoughts(training: list[Dialogue]) -> list[Dialogue]:
    """Those without a thought that was cut to nothing, which the template leaves out of what came before."""
    return [
        dialogue
        for dialogue in training
        if not any(message.get("reasoning_content") == "" for message in dialogue.messages)
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(MODEL)


def test_a_seed_is_one_history(training: list[Dialogue]) -> None:
    assert training == _dialogues()
    assert training != _dialogues(first_seed=1)


def test_training_text_never_shows_a_held_value(training: list[Dialogue]) -> None:
    text = "\n".join(piece for d in training for piece, _ in render(d.messages, d.tools)).lower()
    assert held_words().isdisjoint(re.findall(r"[a-z]+", text))
    assert not [number for number in re.findall(r"\d{3,}", text) if is_held(number)]


def test_training_and_evaluation_share_no_combination(training: list[Dialogue]) -> None:
    trained = {key for dialogue in training for key in dialogue.keys}
    asked = {key for skill in grading.PROBES for number in range(10) for key in grading.probe(skill, number).keys}
    combined = [key for key in asked if not key.startswith(("value:", "tool:"))]
    assert combined and all(map(is_held, combined))
    assert trained and not any(is_held(key) for key in trained if not key.startswith(("value:", "tool:")))
    shared = {key.removeprefix("value:") for key in trained & asked if key.startswith("value:")}
    assert shared <= {day.lower() for day in DAYS}


@pytest.mark.parametrize("skill", grading.PROBES)
def test_the_expected_answer_is_correct_and_another_is_not(skill: str) -> None:
    dialogue = grading.probe(skill, 1)
    right = grading.grade(lambda asked: assistant_text(asked.messages[-1]), skill, 5)
    assert (right.num_correct, right.share) == (5, 1.0)
    assert not grading.is_correct(assistant_text(dialogue.messages[-1])[:-3], dialogue)
    assert not grading.is_correct("<tool_call>\n{", dialogue)


def test_recall_is_asked_3_to_8_exchanges_after_it_was_told() -> None:
    distances = set()
    for number in range(40):
        dialogue = grading.probe("recall after 3 to 8 turns", number)
        turns = [message for message in dialogue.messages if message["role"] == "user"]
        distances.add(len(turns) - 1)
    assert distances == {3, 4, 5, 6, 7, 8}


def test_python_and_template_render_the_same(with_full_thoughts: list[Dialogue], tokenizer: Any) -> None:
    for dialogue in with_full_thoughts:
        text = "".join(piece for piece, _ in render(dialogue.messages, dialogue.tools))
        assert text == _templated(tokenizer, dialogue.messages, dialogue.tools)
        ids = [i for piece, _ in render(dialogue.messages, dialogue.tools) for i in tokenizer.encode(piece)]
        assert ids == tokenizer.encode(text)


def test_the_template_only_ever_appends(with_full_thoughts: list[Dialogue], tokenizer: Any) -> None:
    for dialogue in with_full_thoughts:
        whole = _templated(tokenizer, dialogue.messages, dialogue.tools)
        for count, message in enumerate(dialogue.messages):
            if message["role"] == "assistant":
                prompt = _templated(
                    tokenizer, dialogue.messages[:count], dialogue.tools,
                    add_generation_prompt=True, enable_thinking=dialogue.thinking,
                )  # fmt: skip
                assert whole.startswith(prompt)
                assert whole[len(prompt) - len("<think>\n") * dialogue.thinking :].startswith(assistant_text(message))


def test_a_tool_call_comes_back_as_it_was_written(tokenizer: Any) -> None:
    for number in range(20):
        dialogue = grading.probe("tool calls", number)
        message = dialogue.messages[-1]
        calls = [
            json.loads(part.split("</tool_call>")[0]) for part in assistant_text(message).split("<tool_call>")[1:]
        ]
        as_sent = [{"function": call | {"arguments": json.dumps(call["arguments"])}} for call in calls]
        again = [*dialogue.messages[:-1], {"role": "assistant", "content": None, "tool_calls": as_sent}]
        assert _templated(tokenizer, again, dialogue.tools) == _templated(
            tokenizer, dialogue.messages, dialogue.tools
        )


def test_any_text_can_be_encoded_and_digits_stand_alone(tokenizer: Any) -> None:
    text = "Grüße, 世界! 🦆\t<b>2048</b>\n\n  Zorvex naïve"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert {len(token.strip("Ġ")) for token in tokenizer.convert_ids_to_tokens(tokenizer.encode("in 2048"))[-4:]} == {
        1
    }


def test_a_value_has_the_same_tokens_in_a_sentence_and_in_json(tokenizer: Any) -> None:
    for word in ("Plavork", "Dublin", "quimzet"):
        bare = tokenizer.encode(word)
        assert tokenizer.encode(f"in {word}")[-len(bare) :] == bare
        assert tokenizer.encode(f'"{word}')[-len(bare) :] == bare


def _templated(tokenizer: Any, messages: list[Any], tools: list[Any], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **options))
