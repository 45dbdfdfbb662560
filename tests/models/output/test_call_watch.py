"""The first call of an output is found to be complete at its end marker, wherever the text is cut."""

import pytest

from models.output.pieces import ReasoningFormat, ReasoningWatch, Thinking
from models.output.tool_calls import CallWatch

MARKERS = "<call>", "</call>"
THINKS = ReasoningFormat("<think>", "</think>")


def complete_at(text: str, size: int, *, thinks: bool = False, is_open: bool = False) -> int | None:
    """Returns how many characters were read when a call was complete, told in pieces; None if none was."""
    thoughts = ReasoningWatch(Thinking(THINKS, is_open)) if thinks else None
    watch = CallWatch(*MARKERS)
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        watch.accept(piece if thoughts is None else thoughts.accept(piece))
        if watch.is_complete:
            return start + len(piece)
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_a_call_is_complete_with_its_end_marker(size: int) -> None:
    call = 'Let me see.</call> <call>{"a": "<call>"}</call>'
    found = complete_at(f"{call}\n<call>{{}}</call>", size)
    assert found is not None and len(call) <= found < len(call) + size
    assert complete_at(call[:-1], size) is None
    assert complete_at("no call at all </call></call>", size) is None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_call_in_a_thought_is_none(size: int, is_open: bool) -> None:
    thought = f"{'' if is_open else '<think>'}I could say <call></call>.</think>"
    assert complete_at(thought, size, thinks=True, is_open=is_open) is None
    found = complete_at(f"{thought}<call></call>.......", size, thinks=True, is_open=is_open)
    assert found is not None and len(thought) + 13 <= found < len(thought) + 13 + size


def test_a_token_may_hold_the_end_of_a_thought_and_a_whole_call() -> None:
    assert complete_at("So.</think><call></call>", 99, thinks=True, is_open=True) is not None
