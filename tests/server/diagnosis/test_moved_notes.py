"""Which note stands at the end of a prompt and will not be there in the next one."""

from typing import Any

import pytest

from server.diagnosis.compare import find_moved_note
from server.diagnosis.prompt import Prompt, prompt_of

NOTE = "Answer with blocks only."


def prompt(*said: str) -> Prompt:
    """`s`, `u`, `a` or `t`, a colon and the text."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return prompt_of([{"role": roles[one[0]], "content": one[2:]} for one in said])


@pytest.mark.parametrize(
    ("earlier", "later", "found"),
    [
        (["s:S", f"u:one\n{NOTE}"], ["s:S", "u:one", "a:A", f"u:two\n{NOTE}"], (3, "two")),
        (["s:S", f"u:{NOTE}\none"], ["s:S", "u:one", "a:A", f"u:{NOTE}\ntwo"], (3, "two")),
        (["s:S", "u:one", f"s:{NOTE}"], ["s:S", "u:one", "a:A", "u:two", f"s:{NOTE}"], (4, "")),
        (["s:S", "u:one", f"u:{NOTE}"], ["s:S", "u:one", "a:A", "t:result", f"u:{NOTE} Now!"], (4, "")),
        (
            ["s:S", f"u:one\n{NOTE}", "a:A", "t:result"],
            ["s:S", "u:one", "a:A", "t:result", "a:B", f"u:two\n{NOTE}"],
            (5, "two"),
        ),
        # the same history goes on
        (["s:S", "u:one"], ["s:S", "u:one", "a:A", "u:two"], None),
        (["s:S", "u:one", f"s:{NOTE}"], ["s:S", "u:one", f"s:{NOTE}", "a:A", f"s:{NOTE}"], None),
        # the note is gone
        (["s:S", "u:one", f"s:{NOTE}"], ["s:S", "u:one", "a:A", "u:two"], None),
        (["s:S", f"u:one\n{NOTE}"], ["s:S", "u:one", "a:A", "u:two"], None),
        (["s:S", f"u:one\n{NOTE}"], ["s:S", "u:one", "a:A", f"u:\n{NOTE}"], None),
        (["s:S", f"u:one\n{NOTE}"], ["s:S", "u:one", "a:A", "u:two, and more words than\nthe note has."], None),
        # the question was asked anew, the history was edited, the rules are others, it is over
        (["s:S", f"u:one\n{NOTE}"], ["s:S", "u:one"], None),
        (["s:S", "u:one", f"s:{NOTE} 1"], ["s:S", "u:one", f"s:{NOTE} 2"], None),
        (["s:S", "u:one x", "a:A", "u:two x"], ["s:S", "u:one", "a:A", "u:two x"], None),
        ([f"s:S {NOTE}", "u:one"], ["s:S", "u:one", "a:A", f"u:two\n{NOTE}"], None),
        (["s:S", f"u:one\n{NOTE}"], ["s:S", "u:one", "a:A"], None),
    ],
)
def test_a_note_is_found_where_it_moved(earlier: list[str], later: list[str], found: Any) -> None:
    assert find_moved_note(prompt(*earlier), prompt(*later)) == found
