"""Which conversation a request without a name belongs to, and how the messages of two turns are aligned."""

import pytest

from models.prompt.outline import NO_OUTLINE
from server.diagnosis.account import EvaluatedTurn, Rendered
from server.diagnosis.compare import Turn, find_changes_between
from server.diagnosis.conversations import Conversations
from server.diagnosis.prompt import Part, Prompt
from server.diagnosis.words import find_changes
from server.doctor.compare import characters_of
from server.engine.diagnosis import Cause

OPENING = "Please read this list of things that I would like to buy: {} and bread."


def prompt(*texts: str) -> Prompt:
    """A conversation, the user first."""
    return Prompt(tuple(Part("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)))


def rendered(one: Prompt) -> Rendered:
    return Rendered(one, characters_of(one), NO_OUTLINE)


def is_grouped(earlier: Prompt, reply: str, later: Prompt) -> bool:
    """Whether two requests without a name are one conversation."""
    conversations = Conversations()
    first, _ = conversations.find(None, rendered(earlier), "1")
    part = Part("assistant", reply)
    tokens = characters_of(earlier, part)
    conversations.record(first, EvaluatedTurn(Turn(earlier, part), tokens, len(characters_of(earlier))))
    second, previous = conversations.find(None, rendered(later), "2")
    return second == first and previous is not None


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (prompt(OPENING.format("milk"), "Yes.", "And now?"), True),  # its reply
        (prompt(OPENING.format("milk"), "Yes, of course.", "And now?"), True),  # its question
        (prompt(OPENING.format("soap"), "Yes, of course.", "And now?"), True),  # a version of its question
        (prompt("How far is the sea?", "Far.", "And now?"), False),
        (prompt(OPENING.format("soap")), False),  # asked for the first time
        (prompt("Buy bread."), False),
    ],
)
def test_a_request_belongs_to_the_conversation_whose_words_it_holds(later: Prompt, expected: bool) -> None:
    assert is_grouped(prompt(OPENING.format("milk")), "Yes.", later) is expected


def causes(earlier: Prompt, later: Prompt) -> list[tuple[Cause, int | None]]:
    return [(change.cause, change.index) for change in find_changes_between(Turn(earlier), later)]


def test_a_message_removed_before_an_edited_one_is_no_summary() -> None:
    earlier = prompt("What is here?", "A house.", OPENING.format("milk"), "Bread it is.", "And now?")
    parts = earlier.parts
    edited = Part("user", OPENING.format("soap"))
    later = Prompt((parts[0], edited, parts[3], parts[4], Part("assistant", "Go."), Part("user", "Where?")))
    assert causes(earlier, later) == [(Cause.REMOVED, 1), (Cause.EDITED, 1)]


def test_a_message_put_in_before_an_edited_one_is_told_beside_it() -> None:
    earlier = prompt(OPENING.format("milk"), "Bread it is.", "And now?")
    parts = earlier.parts
    edited = Part("user", OPENING.format("soap"))
    later = Prompt((Part("assistant", "Welcome!"), edited, *parts[1:], Part("assistant", "Go."), Part("user", "Eh?")))
    assert causes(earlier, later) == [(Cause.INSERTED, 0), (Cause.EDITED, 1)]


def test_several_changes_of_a_text_are_each_told_by_the_words_around_them() -> None:
    before = "Session id: kqzw\nThere are 5 apples in the basket of the shop."
    after = "Session id: hjvb\nThere are 6 apples in the basket of the shop."
    assert [change.cause for change in find_changes(before, after)] == [Cause.NONCE, Cause.COUNTER]
    assert "There are 5 apples" in find_changes(before, after)[1].before
