"""Recorded requests: how a file is read, which conversation a request belongs to, and what each turn loses."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.app.config import StartError
from server.diagnosis.causes import Cause
from server.diagnosis.prompt import Part
from server.doctor.findings import NEGLIGIBLE_TOKENS, Checkup, findings_of
from server.doctor.recorded import checkups_of, read_requests

RULES = "You are a coding agent. Follow the rules with care. " * 40
REPLY = "The step is done. " * 40


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return path


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def checkup(folder: Path, *bodies: dict[str, Any]) -> Checkup:
    """The checkup of the only conversation of these requests."""
    (result,) = checkups_of(read_requests(written(folder, *bodies)))
    return result


def causes(result: Checkup) -> list[tuple[Cause, str, int]]:
    return [(finding.cause, finding.where, finding.turns) for finding in findings_of(result.losses)]


# -------------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"a": 1}', "holds no list of messages"),
        ('{"messages": []}', "holds no list of messages"),
        ('{"messages": [{"role": "user", "content": "Hi"}], "system": "Be brief."}', "a body of the Messages API"),
        ('{"messages": [5]}', "messages[0] is no object with a role"),
        ('{"messages": [{"content": "x"}]}', "messages[0] is no object with a role"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": {}}', "tools is no list of objects"),
        ('{"messages": [{"role": "user", "content": "x"}], "session_id": 5}', "session_id must be a text"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = written(tmp_path, body(user("fine")), "", line)
    with pytest.raises(StartError) as caught:
        read_requests(path)
    assert str(caught.value).startswith(f"{path} line 3")
    assert words in str(caught.value)


def test_a_file_that_is_not_there_is_no_text_or_is_empty(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"gone\.jsonl cannot be read: no such file"):
        read_requests(tmp_path / "gone.jsonl")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StartError, match="no text in UTF-8"):
        read_requests(binary)
    with pytest.raises(StartError, match="holds no requests"):
        read_requests(written(tmp_path, "", "  "))


def test_every_way_of_writing_a_request_is_read(tmp_path: Path) -> None:
    plain = body(user("Hi"), session_id="s")
    parts = body({"role": "user", "content": [{"type": "text", "text": "Hi"}]}, session_id="s")
    wrapped = {"custom_id": "1", "body": body(user("Hi")), "headers": {"X-Session-Id": "s"}}
    outside = {"session_id": "s", "request": body(user("Hi"))}
    requests = read_requests(written(tmp_path, plain, parts, wrapped, outside))
    assert {request.session_id for request in requests} == {"s"}
    assert {request.prompt.parts for request in requests} == {(Part("user", "Hi"),)}


def test_calls_and_other_parts_are_part_of_the_text(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    image = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "?"}],
    }
    (request,) = read_requests(written(tmp_path, body(call, image)))
    assert request.prompt.parts[0].calls == ('["f", {}]',) and request.prompt.parts[0].call_ids == ("1",)
    assert "image_url" in request.prompt.parts[1].text and request.prompt.parts[1].text.endswith("\n?")


def test_requests_count_in_the_order_of_their_times_where_all_have_one(tmp_path: Path) -> None:
    late, early = body(user("late"), session_id="s", timestamp=2), body(user("early"), session_id="s", timestamp=1.5)
    assert [r.prompt.parts[0].text for r in read_requests(written(tmp_path, late, early))] == ["early", "late"]
    timeless = body(user("timeless"), session_id="s")
    texts = [r.prompt.parts[0].text for r in read_requests(written(tmp_path, late, timeless, early))]
    assert texts == ["late", "timeless", "early"]


def test_requests_without_a_name_belong_where_their_messages_stand(tmp_path: Path) -> None:
    def request(*texts: str) -> dict[str, Any]:
        return body(system("S"), *(user(text) for text in texts))

    first, other, second, more = request("a"), request("x"), request("a", "b"), request("x", "y")
    found = checkups_of(read_requests(written(tmp_path, first, other, second, more)))
    told = [(one.name, one.num_turns, one.losses) for one in found]
    assert told == [
        ("(unnamed 1)", 2, ()),
        ("(unnamed 2)", 2, ()),
    ]


# ------------------------------------------------------------------------------------------------ the stories


def chat(*systems: str, **fields: Any) -> list[dict[str, Any]]:
    """A conversation whose turns have these system messages and are otherwise as they should be."""
    history, bodies = list[dict[str, Any]](), []
    for number, text in enumerate(systems):
        history.append(user(f"Question {number}?"))
        bodies.append(body(system(text), *history, **fields))
        history.append(assistant(f"{number}: {REPLY}"))
    return bodies


THOUGHT = "The first step is to read the file; then I shall say what stands in it, if it is there. " * 8
ANSWER = "It says that the door is blue, which is what I read there. " * 4
SOURCES = "\n\nSources: the file that you named, the one beside it, and what you told me about the house before. " * 8
INLINE, CALLS = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", {"tool_calls": [{"id": "1", "function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("reply", "sent", "cause"),
    [
        ({"content": INLINE}, {"content": ANSWER}, Cause.THOUGHTS),
        ({"content": INLINE.removeprefix("<think>")}, {"content": ANSWER}, Cause.THOUGHTS),
        ({"content": f"[THINK]{THOUGHT}[/THINK]{ANSWER}"}, {"content": ANSWER}, Cause.THOUGHTS),
        ({"content": ANSWER, "reasoning": THOUGHT}, {"content": ANSWER}, Cause.THOUGHTS),
        ({"content": INLINE}, {"content": INLINE}, None),
        ({"content": INLINE}, {"content": ANSWER, "reasoning_content": THOUGHT.strip()}, None),
        ({"content": ANSWER, "reasoning_content": THOUGHT.strip()}, {"content": INLINE}, None),
        ({"content": ANSWER + SOURCES}, {"content": ANSWER}, Cause.REPLY),
        ({"content": f"<details>{SOURCES}</details>{ANSWER}"}, {"content": ANSWER}, Cause.REPLY),
        (CALLS, {"content": "", **CALLS}, None),
        (CALLS, {"content": "[called f]"}, Cause.REPLY),
    ],
)
@pytest.mark.parametrize("is_toggled", [False, True])
def test_what_a_client_does_to_a_reply_is_told_alike_with_and_without_thinking_toggled(
    tmp_path: Path, reply: dict[str, Any], sent: dict[str, Any], cause: Cause | None, is_toggled: bool
) -> None:
    """The reply is no newest message of the client's, which may have been sent with a note around it."""
    asked = [system(RULES), user("What does it say?")]
    first, second = body(*asked), body(*asked, {"role": "assistant", **sent}, user("And then?"))
    if is_toggled:
        first, second = {**first, "enable_thinking": True}, {**second, "enable_thinking": False}
    answer = {"choices": [{"message": {"role": "assistant", **reply}}]}
    result = checkup(tmp_path, {"body": first, "response": answer}, second)
    found = [finding.cause for finding in findings_of(result.losses)]
    assert found == [Cause.TEMPLATE_ARGUMENTS] * is_toggled + [one for one in [cause] if one]


def test_what_changes_behind_another_change_is_named_and_costs_nothing_yet(tmp_path: Path) -> None:
    result = checkup(tmp_path, *chat(*(f"It is 09:1{n}. {RULES} Memory: {40 + n}% used. {RULES}" for n in range(3))))
    clock, counter = findings_of(result.losses)
    assert (clock.cause, clock.tokens > 0) == (Cause.CLOCK, True)
    assert (counter.cause, counter.tokens) == (Cause.COUNTER, 0)


def test_a_known_nonce_that_the_server_replaces_is_no_loss(tmp_path: Path) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.5.7b4; cch={};\n"
    assert checkup(tmp_path, *chat(*(line.format(f"eb6c{n}") + RULES for n in range(3)))).losses == ()


def test_an_edited_message_counts_unless_it_is_the_newest(tmp_path: Path) -> None:
    _, _, third = chat(RULES, RULES, RULES)
    edited = json.loads(json.dumps(third).replace("Question 0?", "Another question?"))
    assert causes(checkup(tmp_path, third, edited)) == [(Cause.EDITED, "message 1 (user)", 1)]
    edited = json.loads(json.dumps(third).replace("Question 2?", "Something else" * NEGLIGIBLE_TOKENS))
    assert checkup(tmp_path, third, edited).losses == ()


def test_a_request_again_and_a_shorter_one_lose_nothing(tmp_path: Path) -> None:
    first, second = chat(RULES, RULES)
    assert checkup(tmp_path, first, second, second, first).losses == ()


def test_side_requests_under_the_name_of_a_conversation_are_told(tmp_path: Path) -> None:
    turns = chat(RULES, RULES, RULES, session_id="s")
    titles = [body(system("Write a title."), user(f"{n} {REPLY}"), session_id="s") for n in range(3)]
    result = checkup(tmp_path, turns[0], titles[0], turns[1], titles[1], turns[2], titles[2])
    assert causes(result) == [(Cause.SIDE_REQUEST, "", 3)]
    assert [loss.turn for loss in result.losses] == [2, 4, 6]
    assert [loss.tokens for loss in result.losses] == [pytest.approx(len(REPLY) / 4, abs=20)] * 3
    assert result.kept == 1.0


def test_a_turn_after_many_agents_under_its_name_is_no_side_request(tmp_path: Path) -> None:
    """Sub-agents that an agent starts at once name its session, and each goes on from its own turn."""
    asked = [system(RULES), user("Mend the door of the house, please.")]
    agents = [
        [system("You search files. " * 40), user(f"Look for the {thing}, and say where the {thing} is. " * 9)]
        for thing in ("doors", "windows", "roofs", "chairs", "letters", "lamps")
    ]
    more = [body(*one, assistant(f"{n} {REPLY}"), user("Go on."), session_id="s") for n, one in enumerate(agents)]
    first, last = body(*asked, session_id="s"), body(*asked, assistant(REPLY), user("Thanks."), session_id="s")
    result = checkup(tmp_path, first, *(body(*agent, session_id="s") for agent in agents), *more, last)
    assert {loss.turn for loss in result.losses} <= set(range(2, 2 + len(agents)))


def test_single_questions_under_one_name_are_told_their_clock_alone(tmp_path: Path) -> None:
    questions = ("Is this mail spam?", "Who wrote the letter?", "How long is the bill?")
    bodies = [
        body(system(f"It is 09:{10 + n}. {RULES}"), user(text), session_id="s") for n, text in enumerate(questions)
    ]
    assert causes(checkup(tmp_path, *bodies)) == [(Cause.CLOCK, "system message", 2)]


def test_a_title_that_quotes_the_whole_reply_is_no_summary_where_the_conversation_goes_on(tmp_path: Path) -> None:
    asked = [user("Mend the door of the house, please."), assistant(REPLY), user("Thanks.")]
    title = user(f"Write a title for this. USER: {asked[0]['content']} ASSISTANT: {REPLY}")
    result = checkup(
        tmp_path,
        {"body": body(asked[0], session_id="s"), "response": {"message": assistant(REPLY)}},
        {"body": body(title, session_id="s"), "response": {"message": assistant("The door")}},
        {"body": body(*asked, session_id="s")},
    )
    assert causes(result) == [(Cause.SIDE_REQUEST, "", 1)]


def test_a_question_that_is_dropped_before_its_reply_is_trimmed_history(tmp_path: Path) -> None:
    first, reply = body(system(RULES), user(REPLY)), assistant("It is done, all of it, as you wished.")
    line = {"body": first, "response": {"message": reply}}
    result = checkup(tmp_path, line, body(system(RULES), reply, user("And the window?")))
    assert causes(result) == [(Cause.TRIMMED, "message 1 (user)", 1)]


@pytest.mark.parametrize("fields", [{"prefix": True}, {}])
def test_an_answer_that_goes_on_with_a_message_comes_back_as_one_with_it(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    asked = [system(RULES), user("Mend the door.")]
    first = body(*asked, {**assistant("Well, "), **fields}, **({} if fields else {"continue_final_message": True}))
    second = body(*asked, assistant(f"Well, {REPLY}"), user("Thanks."))
    assert checkup(tmp_path, {"body": first, "response": {"message": assistant(REPLY)}}, second).losses == ()


def test_two_conversations_under_one_name_are_compared_each_with_its_own(tmp_path: Path) -> None:
    first = chat(RULES, RULES, session_id="s")
    second = json.loads(json.dumps(first).replace("Question", "Task").replace(REPLY, "Done. " * 100))
    result = checkup(tmp_path, first[0], second[0], first[1], second[1])
    assert (result.losses, result.kept) == ((), 1.0)
    # Its own head is what it costs.
    other = json.loads(json.dumps(second).replace("coding", "testing"))
    result = checkup(tmp_path, first[0], other[0], first[1], other[1])
    assert [(loss.miss.cause, loss.turn) for loss in result.losses] == [(Cause.SIDE_REQUEST, 2)]
    assert result.losses[0].tokens == pytest.approx(len(RULES) / 4, abs=20)
