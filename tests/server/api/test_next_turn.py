"""A turn that is over is evaluated as its next prompt will show it, while nobody waits."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.prompt.chat_template import RenderedPrompt
from server.api.conversation import MIN_TOKENS_AHEAD, next_turn_request
from server.engine.request import GenerationRequest, Priority
from tests.server.api.test_live import Live, assistant, serving, until, user
from tests.support import tiny_models

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>I think at length about this.</think>{% endif %}"
)
"""Opens each answer with a thought, and never shows one again."""


def prompt(*tokens: int) -> RenderedPrompt:
    return RenderedPrompt(np.array(tokens, np.int32))


def request(*tokens: int, **fields: Any) -> GenerationRequest:
    return GenerationRequest("r", np.array(tokens, np.int32), 50, **fields)


def test_what_the_next_prompt_shows_otherwise_is_evaluated_in_the_background() -> None:
    shown = [1, 2, 3, *range(100, 100 + MIN_TOKENS_AHEAD)]
    made = next_turn_request(request(1, 2, 3, 4, session_id="s", is_volatile=True), [5, 6], prompt(*shown))
    assert made is not None
    assert made.tokens.tolist() == shown
    assert (made.max_tokens, made.priority, made.is_idle_work) == (0, Priority.BACKGROUND, True)
    assert (made.session_id, made.is_volatile) == ("s", True)


@pytest.mark.parametrize(
    "shown",
    [
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6, *range(100, 200)],
        [1, 2, 3, *range(100, 99 + MIN_TOKENS_AHEAD)],
        [1, 2],
    ],
)
def test_what_is_known_or_short_is_left_to_the_next_turn(shown: list[int]) -> None:
    assert next_turn_request(request(1, 2, 3, 4), [5, 6], prompt(*shown)) is None


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def thinking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose template drops what was thought."""
    folder: Path = tiny_models.write(request.param, tmp_path_factory.mktemp(request.param) / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with serving(folder) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_evaluates_only_its_new_message(thinking: Live, stream: bool, num_ahead: list[None]) -> None:
    system = {"role": "system", "content": f"Answers are evaluated, streamed or not ({stream}). " * 4}
    options = {"extra_body": {"session_id": f"s{stream}", "ignore_eos": True}, "max_tokens": 200}
    ask = thinking.streamed if stream else thinking.text
    first = ask(system, user("one"), **options)
    until(lambda: bool(num_ahead))
    second = thinking.ask(system, user("one"), assistant(first), user("two"), **options)
    assert second.model_extra["timings"]["prompt_n"] < 64 < second.usage.completion_tokens


def test_a_short_answer_without_its_thought_costs_the_next_turn_only_what_is_new(thinking: Live) -> None:
    options: Any = {"max_tokens": 4, "extra_body": {"session_id": "short", "ignore_eos": True}}
    system = {"role": "system", "content": "Answers are short. " * 4}
    first = thinking.ask(system, user("one"), **options)
    second = thinking.ask(system, user("one"), assistant("said"), user("two"), **options)
    opening = tiny_models.tokenizer().tokenize("<think>I think at length about this.</think>")
    shared = first.usage.prompt_tokens - len(opening)
    assert second.usage.prompt_tokens_details.cached_tokens == shared


NOTE = "Answer with a block for each file that you change, and nothing else. " * 12


def in_text(text: str) -> list[dict[str, Any]]:
    return [user(f"{text}\n\n{NOTE}")]


def in_message(text: str) -> list[dict[str, Any]]:
    return [user(text), {"role": "system", "content": NOTE}]


@pytest.mark.parametrize("newest", [in_text, in_message])
def test_a_note_that_moves_on_costs_no_reply_once_it_has_moved(
    thinking: Live, newest: Any, num_ahead: list[None]
) -> None:
    def is_evaluated(num_turns: int) -> bool:
        return len(num_ahead) == num_turns

    options: Any = {"extra_body": {"session_id": newest.__name__, "ignore_eos": True}, "max_tokens": 150}
    history: list[dict[str, Any]] = [{"role": "system", "content": f"You write code, {newest.__name__}. " * 4}]
    num_evaluated = list[int]()
    for turn, text in enumerate(("one", "two", "three"), 1):
        answered = thinking.ask(*history, *newest(text), **options)
        num_evaluated.append(answered.model_extra["timings"]["prompt_n"])
        until(partial(is_evaluated, turn))
        history += [user(text), assistant(answered.choices[0].message.content)]
    note = len(tiny_models.tokenizer().tokenize(NOTE))
    # The note stays while the tools of a question answer.
    steps = [assistant("I look. " * 20), {"role": "tool", "tool_call_id": "c", "content": "Seen. " * 20}]
    thinking.ask(*history, *newest("four"), **options)
    answered = thinking.ask(*history, *newest("four"), *steps, **options)
    until(partial(is_evaluated, 5))
    history += [user("four"), *steps, assistant(answered.choices[0].message.content)]
    last = thinking.ask(*history, *newest("five"), **options).model_extra["timings"]["prompt_n"]
    assert last < note + 64, (last, note)
    assert num_evaluated[1] > note + 150 > note + 64 > num_evaluated[2], (num_evaluated, note)
