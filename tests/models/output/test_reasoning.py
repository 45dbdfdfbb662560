"""A thought is told from the answer wherever the stream cuts the text, and its tokens are counted."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.output.call_formats import HERMES
from models.output.call_reader import CallReader
from models.output.pieces import (
    KNOWN_MARKERS,
    OutputParser,
    Piece,
    Reasoning,
    ReasoningFormat,
    ReasoningParser,
    ReasoningWatch,
    Text,
    Thinking,
    ToolArguments,
    ToolCallEnded,
    ToolCallStarted,
    find_reasoning_format,
)

THINK = ReasoningFormat("<think>", "</think>", closing_ids=(90, 91))
WORDY = ReasoningFormat("<|channel>thought", "<channel|>")

CASES = [
    ("Hello.", False, "", "Hello."),
    ("", False, "", ""),
    ("", True, "", ""),
    (" \n ", False, "", " \n "),
    ("<think>\nHm, so.\n</think>\n\nHello.\n", False, "Hm, so.", "Hello.\n"),
    ("\n<think>a</think>b", False, "a", "b"),
    ("Hm.\n\nSo.\n</think>\n\n  Hello.", True, "Hm.\n\nSo.", "Hello."),
    ("\n\n</think>\n\nHello.", True, "", "Hello."),
    ("Hm, so", True, "Hm, so", "Hm, so"),
    ("Hm, so \n", True, "Hm, so \n", "Hm, so"),
    ("a </thin b", True, "a </thin b", "a </thin b"),
    ("a </thin", True, "a </thin", "a </thin"),
    ("<think>never closed", False, "never closed", "never closed"),
    ("<thin", False, "", "<thin"),
    ("say <think>no</think>", False, "", "say <think>no</think>"),
    ("say </think>", False, "", "say </think>"),
    ("a</think>b <think>c</think>", True, "a", "b <think>c</think>"),
    ("<think>a <think> b</think>c", False, "a <think> b", "c"),
]


def run(texts: Sequence[str], *, is_open: bool, thought: ReasoningFormat = THINK) -> tuple[str, str]:
    """All that was thought, and all that was said behind it."""
    parser = ReasoningParser(thought, OutputParser(), OutputParser(), is_open=is_open)
    pieces: list[Piece] = [piece for text in texts for piece in parser.feed(text)]
    pieces += parser.finish(is_complete=True)
    said = [piece for piece in pieces if isinstance(piece, Text)]
    thoughts = [piece for piece in pieces if isinstance(piece, Reasoning)]
    assert pieces == [*thoughts, *said]
    assert all(piece.text for piece in said) and all(piece.text for piece in thoughts)
    return "".join(piece.text for piece in thoughts), "".join(piece.text for piece in said)


@pytest.mark.parametrize(("text", "is_open", "thought", "answer"), CASES)
def test_a_thought_is_told_from_the_answer_at_every_cut(text: str, is_open: bool, thought: str, answer: str) -> None:
    assert run(list(text), is_open=is_open) == (thought, answer)
    for cut in range(len(text) + 1):
        assert run([text[:cut], text[cut:]], is_open=is_open) == (thought, answer)


@given(st.text(alphabet="<think>/ \na", max_size=40), st.booleans(), st.lists(st.integers(0, 40)))
def test_cuts_change_nothing_and_no_letter_is_lost(text: str, is_open: bool, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    thought, answer = run([text[start:stop] for start, stop in itertools.pairwise(edges)], is_open=is_open)
    assert (thought, answer) == run([text], is_open=is_open)
    if thought.rstrip() == answer and "</think>" not in text:
        answer = ""  # a thought that never closes is the answer too
    rest = iter(text)
    assert all(letter in rest for letter in thought + answer), "the pieces are not in the text, in order"
    num_lost = len("".join(text.split())) - len("".join((thought + answer).split()))
    assert num_lost in (0, len("<think>"), len("</think>"), len("<think></think>"))


@pytest.mark.parametrize(("start", "end"), KNOWN_MARKERS)
def test_every_known_pair_of_markers_is_found_by_tokens_and_by_template(start: str, end: str) -> None:
    vocabulary = {"<|channel>" if start.startswith("<|channel>") else start, end}
    for found in (find_reasoning_format(vocabulary, ""), find_reasoning_format(set(), f"... {end} ...")):
        assert found is not None
        assert (found.start, found.end) == (start, end)
        assert run([f"{start}\na\n{end}b"], is_open=False, thought=found) == ("a", "b")
    assert find_reasoning_format({start}, "") is None


def test_text_is_released_as_soon_as_it_is_certain() -> None:
    parser = ReasoningParser(THINK, OutputParser(), OutputParser(), is_open=True)
    assert parser.feed("I am ") == [Reasoning("I am")]
    assert parser.feed("sure.") == [Reasoning(" sure.")]
    assert parser.feed("</think>\n\n") == []
    assert parser.feed("Yes") == [Text("Yes")]


def test_calls_are_found_behind_the_thought_and_not_in_it() -> None:
    call, tools = '<tool_call>{"name": "f"}</tool_call>', [{"function": {"name": "f"}}]
    parser = ReasoningParser(
        THINK, CallReader(HERMES, tools), CallReader(HERMES, tools, in_thought=True), is_open=True
    )
    pieces = [*parser.feed(f"use {call}?</think>\n{call}"), *parser.finish(is_complete=True)]
    thoughts = [piece.text for piece in pieces if isinstance(piece, Reasoning)]
    kinds = [type(piece) for piece in pieces[len(thoughts) :]]
    assert kinds == [ToolCallStarted, ToolArguments, ToolCallEnded]
    assert "".join(thoughts) == f"use {call}?"
    assert parser.made_calls


@pytest.mark.parametrize(
    ("prompt", "is_open"), [("a<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_a_prompt_opens_the_thought_with_its_end(prompt: str, is_open: bool) -> None:
    assert THINK.is_opened_by(prompt) is is_open


def watch(
    tokens: Sequence[str], *, is_open: bool = False, limit: int | None = None, thought: ReasoningFormat = THINK
) -> tuple[int, list[int]]:
    """The tokens counted, and those that were forced; each token is its text."""
    watched, forced = ReasoningWatch(Thinking(thought, is_open, limit)), list[int]()
    for text in tokens:
        closing = watched.forced()[:1]
        forced += closing
        watched.accept(text)
    watched.finish()
    return watched.num_tokens, forced


@pytest.mark.parametrize(
    ("tokens", "is_open", "count"),
    [
        (["<think>", "\n", "a", "b", "</think>", "c"], False, 3),
        (["a", "b", "</think>", "c", "</think>"], True, 2),
        (["a", "", "b"], True, 3),
        (["say", "<think>", "a"], False, 0),
        (["a", "</", "think", ">", "b"], True, 1),
        (["a", "</", "think", "ing", "b"], True, 5),
        (["a", "</", "x</", "think>", "b"], True, 2),
        (["a", "</", "think"], True, 3),
        (["<", "think", ">", "a", "</think>"], False, 1),
    ],
)
def test_the_tokens_of_a_thought_are_counted(tokens: list[str], is_open: bool, count: int) -> None:
    assert watch(tokens, is_open=is_open) == (count, [])


@pytest.mark.parametrize(
    ("tokens", "is_open", "limit", "expected"),
    [
        (list("abcdefg"), True, 3, (3, [90, 91])),
        (list("abcdefg"), True, 0, (0, [90, 91])),
        (["<think>", *"abcdefg"], False, 2, (2, [90, 91])),
        (list("abcdefg"), False, 2, (0, [])),
        (["a", "b", "</think>", "c", "d"], True, 3, (2, [])),
        (["a", "b", "</think>", "c", "d"], True, 2, (2, [90, 91])),
        (["a", "<", "<", "c", "d"], True, 2, (2, [90, 91])),
    ],
)
def test_a_thought_is_closed_at_its_limit(
    tokens: list[str], is_open: bool, limit: int, expected: tuple[int, list[int]]
) -> None:
    assert watch(tokens, is_open=is_open, limit=limit) == expected


def test_without_tokens_to_close_it_a_thought_goes_on() -> None:
    assert watch(list("abc"), is_open=True, limit=1, thought=WORDY) == (3, [])
