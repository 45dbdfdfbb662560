"""What `mlx-serve run` shows, and the server that it joins."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from models.output.pieces import Reasoning, Text
from server.app.config import ServerConfig
from server.cli.ask import KeyNeeded, Served, find_served
from server.cli.chat import Chat, JoinedModels
from server.cli.repl.terminal import Screen, WordWrap
from server.engine.request import StepFailed
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running

FAMILY = "👨‍👩‍👧"


def wrapped(text: str, width: int, *, by: int = 1) -> str:
    """The text as it is shown when it comes in pieces of `by` letters."""
    wrap = WordWrap(lambda: width)
    shown = [wrap.feed(text[start : start + by]) for start in range(0, len(text), by)]
    return "".join(shown) + wrap.finish()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three", "one two\nthree"),
        ("one two\nthree", "one two\nthree"),
        ("one  two", "one  two"),
        ("exactly8 then", "exactly8\nthen"),
        ("a verylongwordindeed b", "a\nverylongwordindeed b"),
        ("    code", "    code"),
        ("two\n\nparts", "two\n\nparts"),
        ("猫猫猫猫猫猫", "猫猫猫猫\n猫猫"),
        ("猫猫猫猫。猫", "猫猫猫\n猫。猫"),
        (f"{FAMILY} {FAMILY} {FAMILY} {FAMILY}", f"{FAMILY} {FAMILY} {FAMILY}\n{FAMILY}"),
        ("```\nx = aaaa + bbbb\n```\nso it is now", "```\nx = aaaa + bbbb\n```\nso it is\nnow"),
        ("a\x1b[2Jb\x07c\x9b", "a[2Jbc"),
    ],
)
@pytest.mark.parametrize("by", [1, 3, 100])
def test_text_is_broken_at_words(text: str, shown: str, by: int) -> None:
    assert wrapped(text, 8, by=by) == shown


WORDS = st.lists(st.text("ab猫é", min_size=1, max_size=7), max_size=20)


@given(WORDS, st.integers(14, 40), st.integers(1, 9))
def test_no_line_is_too_wide_and_no_word_is_lost(words: list[str], width: int, by: int) -> None:
    shown = wrapped(" ".join(words), width, by=by)
    assert all(cell_len(line) <= width for line in shown.split("\n"))
    assert shown.replace("\n", "").replace(" ", "") == "".join(words)


@given(WORDS, st.integers(1, 40), st.integers(1, 9))
def test_it_does_not_matter_in_which_pieces_text_comes(words: list[str], width: int, by: int) -> None:
    text = " ".join(words)
    assert wrapped(text, width, by=by) == wrapped(text, width)


# ------------------------------------------------------------------------------------------------------- screen


def test_the_programs_own_lines_are_broken_at_words() -> None:
    seen: list[str] = []
    Screen(seen.append, lambda: 15).note("/new      forget it all now")
    assert seen == ["/new\nforget it all\nnow\n"]


def shown_by(*said: Text | Reasoning, **options: object) -> str:
    seen: list[str] = []
    screen = Screen(seen.append, **options)  # type: ignore[arg-type]
    for part in said:
        screen.show(part)
    screen.end()
    return "".join(seen)


REASONING_AND_ANSWER = (Reasoning("Let me"), Reasoning(" think."), Text("Yes.\nNo."))


def test_thoughts_are_dim_on_a_terminal() -> None:
    shown = shown_by(*REASONING_AND_ANSWER, columns=lambda: 40, is_coloured=True)
    assert shown == "\x1b[2mLet me think.\n\n\x1b[0mYes.\nNo.\n"


def test_thoughts_alone_leave_nothing_dim() -> None:
    assert shown_by(Reasoning("Hm"), columns=lambda: 40, is_coloured=True) == "\x1b[2mHm\x1b[0m\n"


def test_without_colours_there_are_no_codes() -> None:
    assert shown_by(*REASONING_AND_ANSWER, columns=lambda: 40) == "Let me think.\n\nYes.\nNo.\n"


def test_in_a_pipe_there_is_the_answer_only_unwrapped() -> None:
    assert shown_by(*REASONING_AND_ANSWER, Text(" word" * 30)) == "Yes.\nNo." + " word" * 30 + "\n"


# ------------------------------------------------------------------------------------------------ joined server


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(Script(texts=("Hello", " there."), hit_tokens=2))


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with running(create_app(engine, fake_model(), ServerConfig(api_key="sesame"))) as address:
        yield address


def talk_to(url: str, *lines: str) -> tuple[str, Chat]:
    """Returns what a person who types `lines` sees, and the chat."""
    seen: list[str] = []
    typed = iter([*lines, "/bye"])
    chat = Chat(
        JoinedModels(Served(url, "tiny", key="sesame")),
        Screen(seen.append, lambda: 80),
        read_line=lambda _: next(typed),
    )
    chat.run()
    return "".join(seen), chat


def test_a_server_is_found_by_the_model_that_it_has(url: str) -> None:
    nothing = "http://127.0.0.1:1"
    assert find_served("tiny", [nothing, url], "sesame") == Served(url, "tiny", fake_model().context_tokens, "sesame")
    assert find_served("other", [nothing, url], "sesame") is None
    assert find_served("tiny", [nothing], "sesame") is None


def test_a_server_that_asks_for_a_key_is_named(url: str) -> None:
    for key in (None, "wrong"):
        with pytest.raises(KeyNeeded, match=url):
            find_served("tiny", [url], key)


def test_a_short_name_is_the_repository_it_stands_for() -> None:
    model = fake_model(id="mlx-community/Qwen3-0.6B-4bit")
    with running(create_app(FakeEngine(), model, ServerConfig())) as address:
        found = Served(address, model.id, model.context_tokens)
        assert find_served("qwen3:0.6b", [address], None) == found
        assert find_served("https://hf.co/mlx-community/Qwen3-0.6B-4bit", [address], None) == found
        assert find_served("qwen3:4b", [address], None) is None


def test_a_conversation_goes_on_over_http_and_is_measured(url: str, engine: FakeEngine) -> None:
    shown, _ = talk_to(url, "Hi", "And you?", "/stats")
    assert shown.startswith("Hello there.\nHello there.\nprompt: ")
    assert "2 cached" in shown
    [session] = {request.session_id for request in engine.requests}
    talk_to(url, "Hi")
    assert engine.requests[-1].session_id != session, "two programs never share a conversation"


def test_errors_of_the_server_are_one_line(url: str, engine: FakeEngine) -> None:
    engine.script = Script(texts=("Hel", "lo"), error=StepFailed("it broke"))
    shown, _ = talk_to(url, "Hi")
    assert "Hello …\nmlx-serve: the model failed on this request\n" in shown


def test_a_server_that_has_gone_is_told() -> None:
    shown, _ = talk_to("http://127.0.0.1:1", "Hi")
    assert shown == "mlx-serve: the server at http://127.0.0.1:1 does not answer any more\n"


def test_another_program_that_calls_itself_the_same_is_not_joined() -> None:
    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "tiny", "owned_by": "mlx-serve"}, {"id": "tiny", "owned_by": None}]})

    with running(Starlette(routes=[Route("/v1/models", models)])) as url:
        assert find_served("tiny", [url], None) is None
