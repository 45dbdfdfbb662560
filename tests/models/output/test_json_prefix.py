"""What is passed on of an object is always the beginning of a valid one, and all of a valid one is."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.output.tool_calls import JsonPrefix

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_a_valid_object_is_certain_to_its_last_brace(value: Any, indent: int | None, is_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    reader = JsonPrefix()
    read = "".join(reader.push(letter) for letter in text)
    if "\\ud" in text:
        assert text.startswith(read)
        return
    assert (read, reader.is_complete, reader.is_broken) == (text, True, False)
    assert reader.push("}") == ""
    whole = JsonPrefix()
    assert whole.push(text) == text


@given(st.text(alphabet='{}[]":,\\ u0a1-.etrunfalse ', max_size=30).map(lambda rest: "{" + rest))
def test_what_python_reads_is_read_and_nothing_else(text: str) -> None:

    reader = JsonPrefix()
    read = "".join(reader.push(letter) for letter in text)
    assert text.startswith(read)
    try:
        is_valid = isinstance(json.loads(text), dict)
    except ValueError:
        is_valid = False
    if is_valid:
        assert read == text.rstrip() and reader.is_complete
    elif reader.is_complete:
        assert isinstance(json.loads(read), dict)


@pytest.mark.parametrize(
    ("text", "certain"),
    [
        ('{"a": nul', '{"a": '),
        ('{"a": NaN}', '{"a": '),
        ('{"a": 01}', '{"a": '),
        ('{"a": "x\ny"}', '{"a": "x'),
        ('{"a": "x\\u00', '{"a": "x'),
        ('{"a": "x\\u00e9', '{"a": "x\\u00e9'),
        ('{"a": "x\\ud83d\\ude00"}', '{"a": "x'),
        ('{"a": "\\q"}', '{"a": "'),
        ("{,}", "{"),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a": [1, {"b": true', '{"a": [1, {"b": '),
        ('{"a": [}', '{"a": ['),
        ("[1]", ""),
        ("5}", ""),
    ],
)
def test_no_more_than_what_is_certain(text: str, certain: str) -> None:
    reader = JsonPrefix()
    assert reader.push(text) == certain
    assert not reader.is_complete
