"""Known nonces at the head of a prompt become constants; everything else stays as it was written."""

from typing import Any

import pytest

from models.prompt.shapes import with_constant_header, with_constant_headers

LINE = "x-anthropic-billing-header: cc_version=2.1.100.{}; cc_entrypoint=cli; cch={};"
CONSTANT = LINE.format("000", "00000")
REST = "\nYou are a careful assistant. cch=eb6c6; stays here.\n"


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def test_two_requests_of_one_client_become_equal() -> None:
    first, second = (
        with_constant_header(LINE.format(version, nonce) + REST)
        for version, nonce in (("7b4", "eb6c6"), ("01c", "3"))
    )
    assert first == second == CONSTANT + REST


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LINE.format("7b4", "eb6c6"), CONSTANT),
        (LINE.format("7b4", "eb6c6") + "\r\nrest", CONSTANT + "\r\nrest"),
        (
            "x-anthropic-billing-header: cch=ff;cc_version=2.1.5;",
            "x-anthropic-billing-header: cch=00000;cc_version=2.1.5;",
        ),
        ("x-anthropic-billing-header: cc_version=2.1.5.9; cc_entrypoint=sdk-cli;", None),
        ("x-anthropic-billing-header: cch=ff", None),
        ("x-anthropic-billing-header: cch=ff; and so on", None),
        ("X-Anthropic-Billing-Header: cch=ff;", None),
        (" x-anthropic-billing-header: cch=ff;", None),
        ("The first line of x-anthropic-billing-header: cch=ff;", None),
        ("Hello\n" + LINE.format("7b4", "eb6c6"), None),
        ("x-anthropic-billing-header: xcch=ff;", None),
        ("", None),
    ],
)
def test_only_the_known_shape_at_its_place_is_changed(text: str, expected: str | None) -> None:
    assert with_constant_header(text) == (text if expected is None else expected)


def test_it_is_found_as_a_text_and_as_the_first_part() -> None:
    line = LINE.format("7b4", "eb6c6")
    part: dict[str, Any] = {"text": line, "cache_control": {}}
    messages = with_constant_headers([system(line), system([part, {"text": line}])])
    assert messages == [system(CONSTANT), system([{"text": CONSTANT, "cache_control": {}}, {"text": line}])]
    assert part["text"] == line


def test_only_leading_system_messages_are_looked_at() -> None:
    line = LINE.format("7b4", "eb6c6")
    messages = [{"role": "user", "content": line}, system(line), {"role": "assistant", "content": None}]
    assert with_constant_headers(messages) == messages
    assert with_constant_headers([system([]), system(None)]) == [system([]), system(None)]
