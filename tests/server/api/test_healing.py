"""What `--heal` shows otherwise than sent, and that the shown prompt grows at its end only."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from models.texts import shared_length
from server.api.healing import MIN_SYSTEM_CHARACTERS, changed_lines, system_in_front
from server.app.config import ConfigError, ServerConfig, from_environment, merge
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, FakeRenderer, fake_model
from tests.support.fake_grammar import FakeCompiler

RULES = "\n".join(f"Rule {number}: be careful." for number in range(20))
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


def system(status: str) -> dict[str, Any]:
    return {"role": "system", "content": f"{RULES}\nGit status: {status}\n{RULES}"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Served:
    def __init__(self, *heals: str, **model: Any) -> None:
        self.healed: Any = None
        self.renderer, self.engine = FakeRenderer(), FakeEngine()
        served = fake_model(renderer=self.renderer, context_tokens=9000, **model)
        self.client = TestClient(create_app(self.engine, served, ServerConfig(heals=heals)))

    def ask(self, *messages: dict[str, Any], key: str = "ours", **fields: Any) -> list[str]:
        """The messages that the template gets."""
        self.renderer.calls.clear()
        self.engine.requests.clear()
        body = {"messages": list(messages), **fields}
        answer = self.client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        self.healed = answer.json()["cache"]["healed"]
        prompt = self.engine.requests[0].tokens.tolist()
        call = next(
            call for call in self.renderer.calls if self.renderer.render(call["messages"]).tokens.tolist() == prompt
        )
        self.tools, shown = call["tools"], call["messages"]
        return [f"{one['role']}: {self.renderer._text(one['content'])}" for one in shown]


def test_changed_lines_are_told_in_full() -> None:
    place, note = changed_lines(f"a\nb is 1\n{RULES}", f"a\nb is 2\n{RULES}\ne") or (0, "")
    assert place == 7 and "\nb is 1\n" in note and note.endswith("\nb is 2\ne")
    assert changed_lines("one text\n" * 9, "quite another one\n" * 9) is None


def test_a_changed_line_of_the_system_message_is_a_note_that_keeps_its_place() -> None:
    served = Served("tiny=git")
    first = served.ask(system("clean"), user("One"))
    assert first[0] == f"system: {system('clean')['content']}" and not served.healed
    other = served.ask(system("M a.py"), user("Two"))
    assert other[0] == first[0] and "Git status: M a.py" in other[1] and other[2:] == ["user: Two"]
    assert served.healed["kinds"] == ["git"]
    again = served.ask(system("M a.py"), user("Two"), assistant("Yes."), user("Go on"))
    assert again == [*other, "assistant: Yes.", "user: Go on"]
    history = [user("One"), assistant("Yes.")]
    later = served.ask(system("M b.py"), *history, user("Go on"))
    assert later[:3] == [*first, "assistant: Yes."] and "M b.py" in later[3] and later[4:] == ["user: Go on"]
    history += [user("Go on"), assistant("Done, and this is longer than a note that all is as it was. " * 2)]
    back = served.ask(system("clean"), *history, user("What now?"))
    assert back[: len(later)] == later and "again" in back[-2] and back[-1] == "user: What now?"


@pytest.mark.parametrize("place", range(0, 21, 4))
@pytest.mark.parametrize("history", [[], [user("One"), assistant("Yes.")]])
def test_no_note_has_more_to_evaluate_than_the_prompt_as_sent(place: int, history: list[dict[str, Any]]) -> None:
    rules = RULES.splitlines()

    def asked(served: Served, status: str) -> str:
        text = "\n".join([*rules[:place], f"Git status: {status}", *rules[place:]])
        return "\n".join(served.ask({"role": "system", "content": text}, *history, user("Two")))

    def num_new(*heals: str) -> int:
        served = Served(*heals)
        before = asked(served, "clean")
        after = asked(served, "M a.py")
        return len(after) - shared_length(before, after)

    assert num_new("tiny=git") <= num_new()


def test_a_conversation_that_begins_with_the_same_question_has_its_own_notes() -> None:
    served = Served("tiny=git")
    served.ask(system("clean"), user("One"))
    changed = [served.ask(system(status), user("One")) for status in ("M a.py", "M b.py")]
    assert all(
        len(shown) == 3 and note in shown[1] for shown, note in zip(changed, ("M a.py", "M b.py"), strict=True)
    )


def test_the_note_of_a_turn_of_tools_stands_behind_their_results() -> None:
    served = Served("t*=git")
    called = [user("One"), {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    served.ask(system("9:15"), user("One"))
    shown = served.ask(system("9:16"), *called, result)
    assert shown[3] == "tool: ok" and "9:16" in shown[4]
    later = served.ask(system("9:16"), *called, result, assistant("Yes."), user("Go on"))
    assert later[:5] == shown


@pytest.mark.parametrize(
    ("heal", "key", "text"),
    [
        ("other=git", "ours", system("M a.py")["content"]),
        ("tiny=system,compaction", "ours", system("M a.py")["content"]),
        ("tiny=git", "theirs", system("M a.py")["content"]),
        ("tiny=git", "ours", "You are somebody else."),
    ],
)
def test_other_system_messages_are_shown_as_sent(heal: str, key: str, text: str) -> None:
    served = Served(heal)
    served.ask(system("clean"), user("One"))
    assert served.ask({"role": "system", "content": text}, user("Two"), key=key)[0] == f"system: {text}"


def test_a_long_system_message_behind_the_first_question_goes_before_it() -> None:
    long = {"role": "system", "content": "x" * MIN_SYSTEM_CHARACTERS}
    served = Served("tiny=system")
    shown = served.ask(system("clean"), user("One"), long, assistant("Yes."), user("Two"))
    assert [one.partition(":")[0] for one in shown] == ["system", "system", "user", "assistant", "user"]
    assert Served().ask(user("One"), long)[0] == "user: One"
    for messages in ([user("One"), system("short")], [user("One")], [], [system("clean")]):
        short = [{**one, "content": str(one["content"])[:99]} for one in messages]
        assert system_in_front(short) == (short, [])


@pytest.mark.parametrize(
    ("heal", "status", "question", "shows"),
    [
        ("tiny=compaction", "clean", "One", True),
        ("tiny=git", "clean", "One", False),
        ("tiny=compaction", "clean", "Another", False),
        ("tiny=compaction", "M a.py", "One", False),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"tools": []}])
def test_a_history_without_its_tools_is_shown_with_them(
    heal: str, status: str, question: str, shows: bool, fields: dict[str, Any]
) -> None:
    served = Served(heal, grammars=FakeCompiler())
    served.ask(system("clean"), user("One"), tools=TOOLS)
    served.ask(system(status), user(question), assistant("Yes."), user("Sum up."), **fields)
    assert bool(served.tools) is shows and (served.engine.requests[-1].grammar is not None) is shows
    assert (served.healed or {}).get("kinds") == (["compaction"] if shows else None)


def test_a_first_request_without_tools_gets_none() -> None:
    served = Served("tiny=compaction", grammars=FakeCompiler())
    served.ask(user("One"), tools=TOOLS)
    served.ask(user("One"))
    assert not served.tools


def test_what_is_healed_is_checked_and_has_commas_of_its_own() -> None:
    given = {"MLX_SERVE_HEAL": "qwen3:8b=git,system"}
    assert merge([from_environment(given)])["heals"].value == ("qwen3:8b=git,system",)
    for wrong in ("git", "tiny=", "tiny=git,all", "=git"):
        with pytest.raises(ConfigError, match="heals nothing"):
            merge([from_environment({"MLX_SERVE_HEAL": wrong})])
