"""The first call of an output is found to be complete at its end marker, wherever the text is cut."""

from dataclasses import replace

import pytest

from models.output.call_formats import GLM
from models.output.call_reader import CallWatch
from models.output.pieces import ReasoningFormat, ReasoningWatch, Thinking

CALL_FORMAT = replace(GLM, open="<call>", close="</call>")
TOOLS = [{"function": {"name": name}} for name in ("f", "g")]
THINKS = ReasoningFormat("<think>", "</think>")


def complete_at(text: str, size: int, *, thinks: bool = False, is_open: bool = False) -> int | None:
    """Returns how many characters were read when a call was complete, told in pieces; None if none was."""
    thoughts = ReasoningWatch(Thinking(THINKS, is_open)) if thinks else None
    watch = CallWatch(CALL_FORMAT, TOOLS)
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        watch.accept(piece if thoughts is None else thoughts.accept(piece))
        if watch.is_complete:
            return start + len(piece)
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_a_call_is_complete_with_its_end_marker(size: int) -> None:
    call = "Let me see.</call> <call>f<arg_key>a</arg_key><arg_value>no </call> yet</arg_value></call>"
    found = complete_at(f"{call}\n<call>g</call>", size)
    assert found is not None and len(call) <= found < len(call) + size
    assert complete_at(call[:-1], size) is None
    assert complete_at("no call at all </call></call> <call>h</call>", size) is None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_call_in_a_thought_is_none(size: int, is_open: bool) -> None:
    thought = f"{'' if is_open else '<think>'}I could say <call>f</call>.</think>"
    assert complete_at(thought, size, thinks=True, is_open=is_open) is None
    found = complete_at(f"{thought}<call>f</call>.......", size, thinks=True, is_open=is_open)
    assert found is not None and len(thought) + 14 <= found < len(thought) + 14 + size


def test_a_token_may_hold_the_end_of_a_thought_and_a_whole_call() -> None:
    assert complete_at("So.</think><call>f</call>", 99, thinks=True, is_open=True) is not None
