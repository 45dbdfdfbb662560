"""Pictures among the tokens of a conversation: ids, positions, chunks, and what else a template says."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from cache.snapshots import RestorePointKind
from models.errors import PromptTooLong
from models.prompt.chat_template import ChatRenderer, ChatTemplateError, plain_text
from models.prompt.pictures import Placeholder, ids_of, words_at_end
from tests.models.prompt.test_chat_template import make_tokenizer
from tests.support.fake_vision import picture_of, prompt_of


def positions_by_hand(prompt: list[tuple[int, int] | None]) -> list[tuple[int, int, int]]:
    """Returns what transformers counts: words one by one, a picture as its longer side."""
    found, following = list[tuple[int, int, int]](), 0
    for part in prompt:
        rows, columns = part or (1, 1)
        found += [
            (following, following + row, following + column) for row in range(rows) for column in range(columns)
        ]
        following += max(rows, columns)
    return found


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_positions_have_three_axes_in_a_picture_and_a_shift_behind(chunk: int) -> None:
    tokens, pictures = prompt_of(
        [1, 2], picture_of(b"a", 2, 4), picture_of(b"b", 5, 3), [3], picture_of(b"c", 1, 1), [4]
    )
    wanted = positions_by_hand([None, None, (2, 4), (5, 3), None, (1, 1), None])
    starts = range(0, len(tokens), chunk)
    found = [pictures.positions(start, min(start + chunk, len(tokens))) for start in starts]
    assert [tuple(column) for column in np.concatenate(found, axis=1).T.tolist()] == wanted
    assert len(tokens) - 1 + pictures.shift(len(tokens)) == wanted[-1][0]
    words = [offset for offset, token in enumerate(tokens) if token >= 0]
    assert [offset + pictures.shift(offset) for offset in words] == [wanted[offset][0] for offset in words]


def test_one_chunk_holds_a_whole_picture_and_positions_without_axes_are_the_words() -> None:
    tokens, pictures = prompt_of([1, 2, 3], replace(picture_of(b"a"), is_whole=True, has_axes=False), [4, 5])
    assert [pictures.chunk_end(offset, offset + 2) for offset in (0, 2, 3, 11)] == [2, 3, 11, 13]
    assert pictures.shift(len(tokens)) == 0


def test_words_stand_for_pictures_where_ids_must_be_words() -> None:
    tokens, pictures = prompt_of([1, 2], picture_of(b"a"), [4, 5])
    found = np.array(tokens, np.int32)
    assert pictures.in_words(found).tolist() == [1, 2, *[49] * 8, 4, 5]
    assert words_at_end(found).tolist() == [4, 5]
    assert words_at_end(found[:2]).tolist() == [1, 2]
    assert [one.start for one in pictures.until(9).placed] == [] and pictures.until(10).ranges == ((2, 10),)


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
    placeholder = Placeholder(PAD, tokenizer.convert_tokens_to_ids(PAD), PAD, (PAD,))
    return ChatRenderer(tokenizer, max_tokens, placeholder)


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


@pytest.mark.parametrize("has_picture", [True, False])
def test_a_spelled_placeholder_is_broken_up(has_picture: bool) -> None:
    asked = shows(f"What is {PAD}?", *([ONE] if has_picture else []))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"text": PAD}}}
    said = {"role": "assistant", "content": PAD, "tool_calls": [call]}
    prompt = renderer_of().render([asked, said, shows("Go on.")])
    assert prompt.text.count(PAD) == has_picture and prompt.text.count("< |image_pad|>") == 3
    assert len(prompt.pictures.placed) == has_picture


def test_where_roles_alternate_a_results_picture_follows_an_answer() -> None:
    strict = renderer_of("message.content if message.content is string else 'parts'")
    refusal = "{{ raise_exception('roles alternate') }}"
    check = (
        f"{{%- if loop.previtem and loop.previtem.role == 'tool' and message.role == 'user' %}}{refusal}{{% endif %}}"
    )
    check += "{%- if loop.previtem and loop.previtem.role == message.role == 'user' %}" + refusal + "{% endif %}"
    loop = "{%- for message in messages %}"
    strict._tokenizer.chat_template = strict._tokenizer.chat_template.replace(loop, loop + check)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    read = [shows("Read it."), {"role": "assistant", "content": "", "tool_calls": [call]}, shows(ONE, role="tool")]
    first = strict.render(read)
    assert [one.picture for one in first.pictures.placed] == [ONE]
    assert "<|im_start|>assistant\nShow me the image.<|im_end|>\n<|im_start|>user\n<|vision_start|>" in first.text
    later = strict.render([*read, {"role": "assistant", "content": "Seen."}, shows("Go on.")])
    assert (
        later.tokens[: first.pictures.placed[0].stop].tolist()
        == first.tokens[: first.pictures.placed[0].stop].tolist()
    )
    asked = strict.render([*read, shows("What is it?")])
    assert "<|vision_end|>What is it?<|im_end|>" in asked.text and "Go on." not in asked.text
    own = strict.render([*read, {"role": "assistant", "content": "Go on."}, shows("What is it?")])
    assert "assistant\nGo on.<|im_end|>" in own.text, "the client's own words"


def test_a_frame_takes_the_place_of_what_the_template_shows() -> None:
    plain, framed = renderer_of(), renderer_of()
    begin, token = "<|vision_start|>", plain._tokenizer.convert_tokens_to_ids(PAD)
    # As Gemma 3's processor writes it: what the template shows is not the token that has the place.
    frame = f"\n\n{begin}{PAD}<|vision_end|>\n\n"
    framed._placeholder = Placeholder(begin, token, frame, (begin, PAD))
    framed._tokenizer.chat_template = (
        TEMPLATE.replace(PAD, "").replace("<|vision_end|>", "").replace("RESULT", "'done'")
    )
    asked = [SYSTEM, shows(f"What is {PAD} {begin}", ONE, "?"), {"role": "assistant", "content": "A."}, shows("b")]
    prompt = framed.render(asked)
    place = prompt.pictures.placed[0]
    assert prompt.text.count(frame) == prompt.text.count(begin) == prompt.text.count(PAD) == 1
    assert prompt.tokens[place.start : place.stop].tolist() == place.ids.tolist()
    assert prompt.tokens[place.start - 1] == framed._tokenizer.convert_tokens_to_ids(begin)
    assert prompt.outline.starts[-1] > place.stop
    assert [one.offset for one in prompt.restore_points if place.start < one.offset < place.stop] == []


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
