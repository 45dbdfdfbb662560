"""What edges of the prefix tree are called, where a text is found in them, and what is kept of earlier trees."""

from typing import Any

import numpy as np

from cache.types import TokenArray
from cache.views import Traced
from models.prompt.shapes import Outline
from server.api.activity import TreeHistory
from server.api.admin.names import KnownTurn, beginning, find_text, known_turn, name_edges
from server.diagnosis.account import EvaluatedTurn
from server.diagnosis.prompt import Part, Prompt, prompt_of

SYSTEM = {"role": "system", "content": "You are careful."}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def tokens(num: int) -> TokenArray:
    return np.arange(num, dtype=np.int32)


def turn(session: str, question: str = "Where?", num: int = 150, head: int = 100, **of: Any) -> KnownTurn:
    """A system message of 40 tokens, a tool up to token 100, a question up to 120, and a reply."""
    prompt = prompt_of([SYSTEM, user(question)], [TOOL], **of)
    reply = Part("assistant", "There.")
    outline = Outline((0, 40), ("system", "user"))
    return known_turn(
        session,
        EvaluatedTurn(prompt, reply, tokens=tokens(num), num_prompt_tokens=120, outline=outline, head_tokens=head),
    )


def asked(prompt: Prompt, num: int, outline: Outline = Outline((0,), ("user",))) -> KnownTurn:  # noqa: B008
    return known_turn("one", EvaluatedTurn(prompt, tokens=tokens(num), num_prompt_tokens=num, outline=outline))


def traced(*edges: tuple[int, int, int], length: int = 150) -> tuple[Traced, Traced]:
    return Traced(list(edges), length), Traced([], 0)


def test_an_edge_is_called_by_what_it_holds_of_whom() -> None:
    paths = [traced((1, 0, 40), (2, 40, 100), (3, 100, 150)), traced((1, 0, 40), (2, 40, 100), (4, 100, 150))]
    names = name_edges([turn("one"), turn("two", "When?")], paths, 0)
    assert [(names[number].role, names[number].num_sessions) for number in (1, 2, 3, 4)] == [
        *(("system", 2), ("tools", 2)),
        *(("user", 1), ("user", 1)),
    ]
    assert names[1].text == "You are careful." and names[1].sessions == ["one", "two"]
    assert names[2].tools == 1 and names[1].tools == 0
    assert (names[3].first, names[3].last, names[3].text) == (1, 2, "Where?") and names[4].text == "When?"
    assert name_edges([turn("one")], paths[:1], 1) == {}


def test_the_tools_are_named_with_the_message_whose_tokens_hold_them() -> None:
    (name,) = name_edges([turn("one", head=40)], [traced((1, 0, 40))], 0).values()
    assert (name.role, name.tools) == ("system", 1)


def test_a_text_in_the_middle_of_which_an_edge_begins_is_not_quoted() -> None:
    long = asked(prompt_of([user("a" * 400)]), 200)
    names = name_edges([long], [traced((1, 0, 100), (2, 100, 200), length=200)], 0)
    assert [(names[number].role, names[number].text) for number in (1, 2)] == [("user", ""), ("user", "")]


def test_an_edge_that_goes_on_with_other_tokens_is_not_theirs() -> None:
    parted = traced((1, 0, 40), (2, 40, 130), length=60)
    assert list(name_edges([turn("one")], [parted], 0)) == [1]
    grown = traced((1, 0, 40), (2, 40, 400), length=150)
    assert list(name_edges([turn("one")], [grown], 0)) == [1, 2]


def test_a_prompt_without_messages_has_an_owner_only() -> None:
    plain = asked(Prompt((Part("prompt", "Once"),)), 9, Outline())
    name = name_edges([plain], [traced((1, 0, 9), length=9)], 0)[1]
    assert (name.sessions, name.role, name.first, plain.session.title) == (["one"], None, None, "Once")


def test_only_some_owners_are_told_and_all_are_counted() -> None:
    turns = [turn(f"s{number}") for number in range(9)]
    name = name_edges([*turns, *turns], [traced((1, 0, 40))] * 18, 0)[1]
    assert (name.sessions, name.num_sessions) == (["s0", "s1", "s2"], 9)


def test_a_person_s_words_stand_behind_an_agent_s() -> None:
    assert beginning("<system-reminder>\nBe brief.\n</system-reminder>\nMend the door.") == "Mend the door."
    assert beginning("<system-reminder>x</system-reminder>") == "<system-reminder>x</system-reminder>"
    assert len(beginning("x" * 5000)) == 100


def test_a_text_is_found_in_each_edge_in_which_it_begins() -> None:
    letters = "".join(chr(97 + number % 26) for number in range(150))
    paths = [traced((1, 0, 40), (2, 40, 100), (3, 100, 150))]

    def found(text: str, question: str) -> Any:
        return find_text(text, [turn("one", question)], paths, lambda ids: "".join(letters[one] for one in ids))

    # The question has the tokens from 100 on: "wxyzabc…".
    assert found("YZAB", "wxyzabcd") == ([3], [], False)
    assert found("yzab", "no such text") == ([], [], False)
    assert found("nowhere", "nowhere") == ([], [], False), "messages have it, the tokens do not"


def test_a_search_decodes_a_bounded_number_of_tokens() -> None:
    long = asked(prompt_of([user("x" * 99)]), 300_000)
    edges = [(number, 1000 * number, 1000 * number + 1000) for number in range(300)]
    decoded: list[int] = []

    def text_of(ids: Any) -> str:
        decoded.append(len(ids))
        return ""

    found = find_text("xxx", [long], [traced(*edges, length=300_000)], text_of)
    assert found == ([], [], True) and sum(decoded) < 250_000


def test_earlier_trees_are_kept_for_some_minutes_and_within_their_bytes() -> None:
    now = [1000.0]
    history = TreeHistory(lambda: now[0], max_bytes=2500)
    bodies = [np.random.default_rng(seed).bytes(1000) for seed in range(4)]
    for body in bodies[:2]:
        assert history.is_due("ours", "m")
        history.add("ours", "m", body)
        assert not history.is_due("ours", "m") and history.is_due("ours", "other") and history.is_due("theirs", "m")
        now[0] += 10
    assert history.times("ours", "m") == [1000.0, 1010.0] and history.times("theirs", "m") == []
    assert history.at("ours", "m", 1005) == bodies[0] and history.at("ours", "m", 2000) == bodies[1]
    assert history.at("ours", "m", 999) is None and history.at("theirs", "m", 2000) is None
    history.add("theirs", "m", bodies[2])
    assert history.times("ours", "m") == [1010.0] and history.num_bytes <= 2500
    history.forget("ours")
    assert history.times("ours", "m") == [] and 0 < history.num_bytes < 1500
    now[0] += 1000
    assert history.times("theirs", "m") == [] and history.num_bytes == 0
