"""Which conversation a request without a name belongs to, and how the messages of two turns are aligned."""

from dataclasses import replace

import pytest

from cache.types import common_prefix_length
from models.prompt.shapes import NO_OUTLINE, Outline
from server.diagnosis import account as conversations_module
from server.diagnosis.account import (
    MAX_TURNS,
    Conversations,
    EvaluatedTurn,
    Name,
    Rendered,
    explain,
    with_missing_bytes,
)
from server.diagnosis.causes import Cause, advice
from server.diagnosis.compare import Turn, find_changes_between
from server.diagnosis.prompt import Part, Prompt
from server.doctor.recorded import characters_of

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
    conversations.record(
        first, EvaluatedTurn(earlier, part, tokens=tokens, num_prompt_tokens=len(characters_of(earlier)))
    )
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
    return [(change.cause, change.message_index) for change in find_changes_between(Turn(earlier), later)]


def test_a_message_removed_before_an_edited_one_is_no_summary() -> None:
    earlier = prompt("What is here?", "A house.", OPENING.format("milk"), "Bread it is.", "And now?")
    parts = earlier.parts
    edited = Part("user", OPENING.format("soap"))
    later = Prompt((parts[0], edited, parts[3], parts[4], Part("assistant", "Go."), Part("user", "Where?")))
    assert causes(earlier, later) == [(Cause.REMOVED, 1), (Cause.EDITED, 1)]


@pytest.mark.parametrize("files", [(), ("My files.", "Ok.")], ids=["rules", "files and rules"])
def test_what_stood_beside_a_question_asked_again_has_moved_and_no_message_is_there_twice(
    files: tuple[str, ...],
) -> None:
    question, rules = "Mend it.", f"Mend it. {'Say no more than that. ' * 4}"
    earlier, reply = prompt(*files, rules), Part("assistant", "It is mended.")
    later = prompt(question, reply.text, "It ran.", "Ok.", *files, rules)
    changes = find_changes_between(Turn(earlier, reply), later)
    assert [(change.cause, change.message_index) for change in changes] == [(Cause.NOTE, 0)]


def test_examples_of_which_some_are_drawn_again_in_another_place_are_no_trimmed_history() -> None:
    said = [f"How heavy is a {item}?|It is {item}-heavy." for item in ("pear", "plum", "fig", "nut")]
    first, second = ([text for one in pairs for text in one.split("|")] for pairs in (said[:3], said[1:]))
    assert causes(prompt(*first, "And a cat?"), prompt(*second, "And a cat?", "Very.", "A dog?")) == [
        (Cause.EXAMPLES, 0)
    ]


def test_a_message_put_in_before_an_edited_one_is_told_beside_it() -> None:
    earlier = prompt(OPENING.format("milk"), "Bread it is.", "And now?")
    parts = earlier.parts
    edited = Part("user", OPENING.format("soap"))
    later = Prompt((Part("assistant", "Welcome!"), edited, *parts[1:], Part("assistant", "Go."), Part("user", "Eh?")))
    assert causes(earlier, later) == [(Cause.INSERTED, 0), (Cause.EDITED, 1)]


SHOP = (
    "You are a helpful assistant of a shop in a small town. {} Answer briefly, politely, and never speak of prices."
)


def asked(system: str, question: str, namespace: str = "") -> Prompt:
    """The only request of its conversation."""
    return Prompt((Part("system", SHOP.format(system)), Part("user", question)), namespace=namespace)


def accounts(*prompts: Prompt, session_ids: bool = False) -> list[list[tuple[Cause, int | None]]]:
    """What is said of requests that follow each other: causes, and the messages that they stand in."""
    conversations, found = Conversations(), list[list[tuple[Cause, int | None]]]()
    for number, one in enumerate(prompts):
        request = rendered(one)
        name, previous = conversations.find(str(number) if session_ids else None, request, str(number))
        hit = 0 if previous is None else common_prefix_length(previous.tokens, request.tokens)
        misses = explain(previous, request, match=hit, hit=hit).misses
        found.append([(miss.cause, miss.message_index) for miss in misses if miss.cause is not Cause.COLD])
        reply = Part("assistant", f"Answer {number}.")
        conversations.record(
            name, EvaluatedTurn(one, reply, tokens=characters_of(one, reply), num_prompt_tokens=len(request.tokens))
        )
    return found


@pytest.mark.parametrize("session_ids", [False, True])
def test_a_clock_that_keeps_conversations_from_sharing_is_told(session_ids: bool) -> None:
    questions = ("How far is the sea?", "Do you sell milk?", "Where are the apples?")
    prompts = [asked(f"It is 09:1{number}.", question) for number, question in enumerate(questions)]
    clock = [(Cause.CLOCK, 0)]
    assert accounts(*prompts, session_ids=session_ids) == [[], clock, clock]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (asked("You sell wine.", "How far is the sea?"), asked("You sell cheese.", "Do you sell milk?")),
        (asked("It is 09:16.", "How far is the sea?"), asked("It is 09:16.", "Do you sell milk?")),
        (asked("It is 09:16. You sell wine.", "Far?"), asked("It is 09:17. You sell cheese.", "Milk?")),
        (asked("It is 09:16.", "Far?", "a"), asked("It is 09:17.", "Milk?", "b")),
        (asked("Be kind. It is 09:16. You sell wine.", "Far?"), asked("Be kind. You sell wine.", "Milk?")),
        (asked(f"You serve store 12. {'Be kind. ' * 90}", "Far?"), asked("Be kind. " * 90, "Milk?")),
        (asked("It is 09:16.", "Far?"), asked("", "Milk?")),
        (prompt("How far is the sea at 09:16?"), prompt("How far is the moon at 09:17, by the way?")),
    ],
)
def test_conversations_that_share_nothing_or_all_are_told_nothing(first: Prompt, second: Prompt) -> None:
    assert accounts(first, second) == [[], []]


def test_a_clock_is_not_told_where_another_conversation_begins_just_like_the_request() -> None:
    first, second = asked("It is 09:16.", "Far?"), asked("It is 09:17.", "Milk?")
    third = asked("It is 09:16.", "Apples?")
    assert accounts(first, second, third) == [[], [(Cause.CLOCK, 0)], []]


def test_what_was_lost_to_a_clock_is_what_the_system_said() -> None:
    first, second = asked("It is 09:16.", "Far?" * 50), asked("It is 09:17.", "Milk?" * 50)
    turn = EvaluatedTurn(first, tokens=characters_of(first), num_prompt_tokens=1, is_neighbour=True)
    whole = characters_of(second)
    head = len(characters_of(Prompt(second.parts[:1])))
    request = Rendered(second, whole, Outline((0, head), ("system", "user")))
    reuse = explain(turn, request, match=60, hit=60)
    assert (reuse.lost_tokens, reuse.kept) == (head - 60, None)
    assert explain(turn, request, match=head, hit=head).misses == ()


def test_another_conversation_is_shown_from_behind_the_clock() -> None:
    changes = find_changes_between(Turn(asked("It is 09:16.", "Far?")), asked("It is 09:17.", "A title, please!"))
    assert [(change.cause, change.message_index) for change in changes] == [(Cause.CLOCK, 0), (Cause.SIDE_REQUEST, 1)]
    assert changes[1].after == "A title, please!"


TITLE = "You are a title generator. You output ONLY a thread title. Nothing else, of fifty letters at most."
AGENT = "You are a coding agent in a terminal. Use the tools that you are given, and keep your answers short."


@pytest.mark.parametrize("wrapped", ["Generate a title for this conversation:\n{}", "{}"])
@pytest.mark.parametrize("tools", [(), ('{"type": "function", "function": {"name": "read"}}',)])
@pytest.mark.parametrize("has_answered", [True, False])
def test_no_turn_goes_on_from_a_title_request(wrapped: str, tools: tuple[str, ...], has_answered: bool) -> None:
    question = Part("user", "Where is the sea in this repository?")
    title = Prompt((Part("system", TITLE), Part("user", wrapped.format(question.text))))
    first = Prompt((Part("system", AGENT), question), tools)
    second = Prompt((*first.parts, Part("assistant", "Far."), Part("user", "Why?")), tools)
    conversations = Conversations()

    def follow(one: Prompt, number: str, reply: str) -> EvaluatedTurn | None:
        name, previous = conversations.find("s", rendered(one), number)
        told = Part("assistant", reply) if has_answered else None
        turn = EvaluatedTurn(one, told, tokens=characters_of(one), num_prompt_tokens=1, request_id=number)
        conversations.record(name, turn)
        return previous

    follow(title, "title", "The sea")
    origin = follow(first, "first", "Far.")
    if tools or "title for" not in wrapped:
        assert origin is None
    previous = follow(second, "second", "So.")
    assert previous is not None and previous.request_id == "first"


def test_clearing_concerns_one_namespace() -> None:
    conversations = Conversations()
    for namespace in ("a", "b"):
        one = asked("You sell wine.", "Far?", namespace)
        name, _ = conversations.find("s", rendered(one), "1")
        conversations.record(name, EvaluatedTurn(one, tokens=characters_of(one), num_prompt_tokens=1))
    conversations.note_cleared("a")
    cleared = {
        namespace: conversations.find("s", rendered(asked("You sell wine.", "Far?", namespace)), "2")[1]
        for namespace in ("a", "b")
    }
    assert {namespace: turn.lost is Cause.CLEARED for namespace, turn in cleared.items() if turn} == {
        "a": True,
        "b": False,
    }


def test_of_the_only_conversation_the_oldest_turn_is_dropped_first() -> None:
    turns = [prompt(f"{letter}" * 4000) for letter in "abc"]
    conversations = Conversations(max_bytes=45_000)
    for one in turns:
        conversations.record(Name("", "s"), EvaluatedTurn(one, tokens=characters_of(one), num_prompt_tokens=1))
    assert len(conversations._turns) == 1
    assert conversations.num_bytes <= 45_000
    _, previous = conversations.find("s", rendered(turns[2]), "4")
    assert previous is not None
    assert previous.prompt == turns[2]


def test_turns_and_conversations_that_are_kept_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Conversations()
    for number in range(MAX_TURNS + 2):
        one = prompt(f"Question {number} about something else entirely {'xyz'[number % 3] * 50}")
        limited.record(Name("", "s"), EvaluatedTurn(one, tokens=characters_of(one), num_prompt_tokens=1))
    sizes = [limited.num_bytes]
    last = prompt("One more question, about the sea")
    limited.record(Name("", "s"), EvaluatedTurn(last, tokens=characters_of(last), num_prompt_tokens=1))
    assert limited.num_bytes < sizes[0], "the first turns of a name are never dropped"
    monkeypatch.setattr(conversations_module, "MAX_UNNAMED_LOOKED_AT", 1)
    looked = Conversations()
    for number, text in enumerate((OPENING.format("milk"), "How far is the sea?")):
        name, _ = looked.find(None, rendered(prompt(text)), str(number))
        part = Part("assistant", f"Answer {number}.")
        looked.record(
            name, EvaluatedTurn(prompt(text), part, tokens=characters_of(prompt(text), part), num_prompt_tokens=1)
        )
    _, previous = looked.find(None, rendered(prompt(OPENING.format("milk"), "Answer 0.", "And now?")), "3")
    assert previous is None


def test_what_went_with_an_unloaded_model_is_told_so() -> None:
    conversations = Conversations()
    prompts = {model: Prompt((Part("user", "How far is the sea from here?" * 3),), model=model) for model in "ab"}
    for model, one in prompts.items():
        conversations.record(Name("", model), EvaluatedTurn(one, tokens=characters_of(one), num_prompt_tokens=1))
    conversations.note_unloaded("a")
    causes = {}
    for model, one in prompts.items():
        longer = Prompt((*one.parts, Part("assistant", "Far."), Part("user", "Why?")), model=model)
        request = rendered(longer)
        _, previous = conversations.find(model, request, "2")
        causes[model] = [miss.cause for miss in explain(previous, request, match=0, hit=0).misses]
    assert causes == {"a": [Cause.UNLOADED], "b": [Cause.EVICTED]}


def test_of_evicted_state_is_told_how_much_more_memory_would_have_kept_it() -> None:
    """What must fit is the conversation and all that was asked since, beginnings that they share counted once."""
    conversations, turns = Conversations(), {}
    for number, words in enumerate(("milk", "soap", "bread")):
        one = asked("You sell wine.", f"Do you sell {words}?" * 9)
        name, _ = conversations.find(str(number), rendered(one), str(number))
        turns[words] = (name, one, EvaluatedTurn(one, tokens=characters_of(one), num_prompt_tokens=1))
        conversations.record(name, turns[words][2])
    name, one, _ = turns["milk"]
    request = rendered(Prompt((*one.parts, Part("assistant", "Yes."), Part("user", "How much?"))))
    _, previous = conversations.find("0", request, "3")
    rests = (len(turn.tokens) - common_prefix_length(turn.tokens, request.tokens) for _, _, turn in turns.values())
    num_tokens = conversations.num_tokens_since(name, request)
    assert num_tokens == len(request.tokens) + sum(rests) > 400
    reuse = with_missing_bytes(explain(previous, request, match=0, hit=0), 3_000_000)
    assert reuse.miss is not None and (reuse.miss.cause, reuse.miss.missing_bytes) == (Cause.EVICTED, 3_000_000)
    assert "about 3.0 MB more memory" in advice(reuse.miss.cause, None, reuse.miss.missing_bytes)
    assert with_missing_bytes(explain(previous, request, match=0, hit=0), -1).miss == replace(
        reuse.miss, missing_bytes=None
    )


def test_a_summary_of_all_is_told_from_another_conversation_and_from_a_title() -> None:
    said = asked("It is noon.", "Which apples do you sell?").parts
    earlier = Turn(
        Prompt((*said, Part("assistant", "Red ones."), Part("user", "Sum up."))), Part("assistant", SUMMARY)
    )
    system = said[:1]

    def cause(*parts: Part) -> Cause:
        return find_changes_between(earlier, Prompt(parts))[0].cause

    assert cause(*system, Part("user", f"<state>\n{SUMMARY}</state>")) is Cause.COMPACTED
    assert cause(*system, Part("user", "The conversation so far was summarized: apples.")) is Cause.COMPACTED
    assert cause(*system, Part("user", "How far is the sea?")) is Cause.SIDE_REQUEST
    title = (Part("system", "You write titles. Nothing else."), Part("user", "A title of the previous conversation!"))
    assert cause(*title) is Cause.SIDE_REQUEST


SUMMARY = "They asked for apples, and were told that the shop sells red ones only."
