"""A picture in a conversation: its places among the tokens, and what else the template says."""

from typing import Any

import pytest
from tokenizers import AddedToken

from cache.snapshots import RestorePoint, RestorePointKind
from models.errors import PromptTooLong
from models.prompt.chat_template import ChatRenderer, ChatTemplateError, plain_text
from models.prompt.pictures import ids_of
from tests.models.prompt.test_chat_template import make_tokenizer
from tests.support.fake_vision import picture_of

PAD = "<|image_pad|>"
TEMPLATE = """\
{%- macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{% endmacro %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ RESULT if message.role == 'tool' else shown(message.content) }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SYSTEM = {"role": "system", "content": "You are terse. " * 5}
ONE, OTHER = picture_of(b"one", 2, 4), picture_of(b"other", 3, 3)


def renderer_of(
    result: str = "shown(message.content)", role: str = "tool", max_tokens: int | None = None
) -> ChatRenderer:
    """`result` is what the template shows of messages of a `role`."""
    tokenizer = make_tokenizer(TEMPLATE.replace("RESULT", result).replace("'tool'", f"'{role}'"))
    added = ("<|vision_start|>", "<|vision_end|>", PAD)
    tokenizer.add_tokens([AddedToken(one, special=True, normalized=False) for one in added], special_tokens=True)
    return ChatRenderer(tokenizer, max_tokens, (PAD, tokenizer.convert_tokens_to_ids(PAD)))


def shows(*parts: Any, role: str = "user") -> dict[str, Any]:
    content = [{"text": one} if isinstance(one, str) else {"text": one.label, "picture": one} for one in parts]
    return {"role": role, "content": content}


CONVERSATION = [
    SYSTEM,
    shows("What is ", ONE, " and\nwhat ", OTHER, "?"),
    {"role": "assistant", "content": "A cat."},
    shows(ONE, "And this?"),
]


def test_pictures_stand_for_their_placeholders() -> None:
    renderer = renderer_of()
    prompt = renderer.render(CONVERSATION)
    assert [one.picture for one in prompt.pictures.placed] == [ONE, OTHER, ONE]
    assert prompt.text.count(PAD) == 3 and "What is <|vision_start|>" in prompt.text
    words, left = renderer.tokenize(prompt.text), prompt.tokens.tolist()
    for one in prompt.pictures.placed:
        assert left[one.start : one.stop] == ids_of(one.picture.digest, one.picture.num_tokens).tolist()
    singles = [one.start for one in prompt.pictures.placed]
    kept = [
        token
        for place, token in enumerate(prompt.pictures.in_words(prompt.tokens).tolist())
        if left[place] >= 0 or place in singles
    ]
    assert kept == words


def test_restore_points_and_outline_are_of_the_tokens_with_pictures() -> None:
    renderer = renderer_of()
    prompt = renderer.render(CONVERSATION)
    points = {point.offset for point in prompt.restore_points}
    assert {one.stop for one in prompt.pictures.placed} <= points
    tokens = prompt.pictures.in_words(prompt.tokens).tolist()
    header = renderer.tokenize("<|im_start|>")
    starts = [place for place, token in enumerate(tokens) if [token] == header]
    for start, found in zip(starts, prompt.outline.starts, strict=False):
        assert start - 4 <= found <= start, "a message begins behind the end of turn of the one before"
    ends = [point.offset for point in prompt.restore_points if point.kind is RestorePointKind.PROMPT_END]
    assert starts[-1] in ends


def test_the_next_turn_and_another_question_begin_alike() -> None:
    renderer = renderer_of()
    first = renderer.render(CONVERSATION[:2])
    following = renderer.render(CONVERSATION)
    assert (
        following.tokens[: first.pictures.placed[-1].stop].tolist()
        == first.tokens[: first.pictures.placed[-1].stop].tolist()
    )
    other = renderer.render([SYSTEM, shows("What is ", ONE, " please?")])
    place = first.pictures.placed[0]
    assert other.tokens[: place.stop].tolist() == first.tokens[: place.stop].tolist()
    assert RestorePoint(place.stop, RestorePointKind.BRANCH) in first.restore_points


@pytest.mark.parametrize("has_picture", [True, False])
def test_a_spelled_placeholder_is_broken_up(has_picture: bool) -> None:
    asked = shows(f"What is {PAD}?", *([ONE] if has_picture else []))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"text": PAD}}}
    said = {"role": "assistant", "content": PAD, "tool_calls": [call]}
    prompt = renderer_of().render([asked, said, shows("Go on.")])
    assert prompt.text.count(PAD) == has_picture and prompt.text.count("< |image_pad|>") == 3
    assert len(prompt.pictures.placed) == has_picture


def test_a_text_that_spells_a_mark_shows_no_picture() -> None:
    spelled = f"\ufffc{ONE.digest.hex()}\ufffc"
    prompt = renderer_of().render([shows(spelled, ONE)])
    assert len(prompt.pictures.placed) == 1 and ONE.digest.hex() in prompt.text


def test_where_results_show_no_pictures_these_follow_as_the_users() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    read = [shows("Read it."), {"role": "assistant", "content": "", "tool_calls": [call, call]}]
    results = [shows("done", ONE, role="tool"), shows(OTHER, role="tool")]
    beside = renderer_of("message.content if message.content is string else 'parts'")
    inside = renderer_of()
    for further in ([], [{"role": "assistant", "content": "Seen."}, shows("Go on.")]):
        moved, kept = (one.render([*read, *results, *further]) for one in (beside, inside))
        assert (
            [one.picture for one in moved.pictures.placed]
            == [ONE, OTHER]
            == [one.picture for one in kept.pictures.placed]
        )
        assert moved.text.count("<|im_start|>user") == kept.text.count("<|im_start|>user") + 1
        assert "<|im_start|>tool\ndone<|im_end|>" in moved.text


def test_a_template_that_shows_fewer_pictures_is_refused_and_a_long_prompt_too() -> None:
    hides = renderer_of("'' if message.role == 'assistant' else shown(message.content)", "assistant")
    with pytest.raises(ChatTemplateError, match="2 times for 3 images"):
        hides.render([*CONVERSATION[:2], shows(ONE, role="assistant"), shows("?")])
    with pytest.raises(PromptTooLong):
        renderer_of(max_tokens=60).render([shows(*[OTHER] * 6)])


def test_labels_stand_for_pictures_in_plain_text() -> None:
    text = plain_text(CONVERSATION[1]["content"])
    assert text == f"What is {ONE.label} and\nwhat {OTHER.label}?"
    assert "\ufffc" not in text
