"""A prompt that goes on with the assistant's last message ends behind its text, whatever the template puts there."""

from typing import Any

import pytest

from cache.snapshots import RestorePointKind
from models.output.pieces import ReasoningFormat
from models.prompt.chat_template import ChatRenderer, ChatTemplateError
from tests.models.prompt.test_chat_template import PLAIN, SYSTEM, SlowTokenizer, assistant, make_tokenizer, user
from tests.support import tiny_models

THINKING = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>
{{ (m.reasoning_content or '').strip('\\n') }}
</think>

{% endif %}{{ m.content.strip() }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
"""Shows the thought of the last message only, and no white space around a text."""

MARKERS = ReasoningFormat("<think>", "</think>")
ASKED = [SYSTEM, user("What is the weather?")]


def is_open(prompt: Any) -> bool:
    return MARKERS.is_opened_by(prompt.text, prompt.begun)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("text", ["It is", "é 你好", "It is qendx", "<|im_end|>", "It is\n\n- hot", "e"])
@pytest.mark.parametrize("template", [None, PLAIN])
def test_the_prompt_is_the_one_that_the_tokenizer_makes(text: str, template: str | None, slow: bool) -> None:
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    messages = [user("What is the weather?"), assistant(text)]
    prompt = ChatRenderer(SlowTokenizer(tokenizer) if slow else tokenizer).render(messages, continues=True)
    expected = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert prompt.text == expected
    assert prompt.tokens.tolist() == tokenizer.encode(expected, add_special_tokens=False)
    assert prompt.begun.endswith(text)


def test_white_space_at_the_end_is_kept_where_the_template_would_strip_it() -> None:
    prompt = ChatRenderer(make_tokenizer(THINKING)).render([*ASKED, assistant("It is \n")], continues=True)
    assert prompt.text.endswith("</think>\n\nIt is \n")


def test_parts_are_joined_and_an_empty_text_is_the_header_alone() -> None:
    renderer = ChatRenderer(make_tokenizer())
    parts = {"role": "assistant", "content": [{"text": "It"}, {"text": "is"}]}
    assert renderer.render([*ASKED, parts], continues=True).text.endswith("<|im_start|>assistant\nIt\nis")
    empty = renderer.render([*ASKED, {"role": "assistant", "content": None}], continues=True)
    assert (empty.text, empty.begun) == (renderer.render(ASKED).text, "")


def test_the_restore_points_are_those_of_the_conversation_before_it() -> None:
    renderer = ChatRenderer(make_tokenizer())
    asked, other = (renderer.render([*ASKED, assistant(text)], continues=True) for text in ("It is", "We have"))
    shared = len(make_tokenizer().apply_chat_template(ASKED, return_dict=False))
    ends = [{p.offset for p in one.restore_points if p.kind is RestorePointKind.PROMPT_END} for one in (asked, other)]
    assert shared in ends[0] & ends[1]
    user_starts = [point for point in asked.restore_points if point.kind is RestorePointKind.USER_START]
    assert user_starts == [p for p in renderer.render(ASKED).restore_points if p.kind is RestorePointKind.USER_START]


def test_a_reply_joined_to_what_it_continues_keeps_its_tokens() -> None:
    tokenizer = tiny_models.tokenizer()
    renderer = ChatRenderer(tokenizer)
    prompt = renderer.render([user("hello"), assistant("in ")], continues=True)
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert tokenizer.encode("the", add_special_tokens=False) != ids
    renderer.remember_reply(prompt, "the", ids)
    following = renderer.render([user("hello"), assistant("in the"), user("what")]).tokens.tolist()
    assert following[: len(prompt.tokens) + 3] == [*prompt.tokens.tolist(), *ids]


def test_a_thought_is_open_where_it_is_continued_and_over_where_an_answer_is() -> None:
    renderer = ChatRenderer(make_tokenizer(THINKING))
    thinks = {"role": "assistant", "content": "", "reasoning_content": "The user"}
    thought = renderer.render([*ASKED, thinks], continues=True)
    assert thought.text.endswith("<think>\nThe user") and is_open(thought)
    answer = renderer.render([*ASKED, {**thinks, "content": "It"}], continues=True)
    assert answer.text.endswith("<think>\nThe user\n</think>\n\nIt") and not is_open(answer)
    said = ChatRenderer(make_tokenizer()).render([user("<think>"), assistant("<think>\nSo")], continues=True)
    assert is_open(said)
    assert not is_open(ChatRenderer(make_tokenizer()).render([user("<think>"), assistant("So")], continues=True))


@pytest.mark.parametrize("shown", ["", "{{ m.content | upper }}", "{{ m.content }} {{ m.content }}"])
def test_a_message_that_is_not_shown_as_it_is_cannot_be_continued(shown: str) -> None:
    template = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        ChatRenderer(make_tokenizer(template)).render([user("a"), assistant("b")], continues=True)
