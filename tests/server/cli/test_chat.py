"""The chat in the terminal: its logic on a scripted engine, and one real round in a terminal of its own."""

import contextlib
import io
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.inference.sampling_params import SamplingParams
from models.prompt.chat_template import RenderedPrompt
from models.prompt.shapes import Message
from models.store.stored_model import ModelDefaults
from server.cli.chat import Chat, Opening, chat
from server.cli.repl.conversation import Dialogue, describe_timings
from server.cli.repl.terminal import Screen
from server.engine.messages import Generation
from server.engine.request import GenerationRequest, StepFailed, Timings
from tests.support import forked
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.local_models import local_models
from tests.support.tiny_models import write


class Transcript:
    """Renders a conversation as one token per character, and remembers each as text."""

    reads_tools = False

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.template_kwargs: list[Any] = []

    def render(
        self, messages: Sequence[Message], tools: Any = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> RenderedPrompt:
        self.template_kwargs.append(template_kwargs)
        self.texts.append("|".join(f"{message['role']}: {message['content']}" for message in messages))
        return self.encode(self.texts[-1])

    def encode(self, text: str) -> RenderedPrompt:
        return RenderedPrompt(np.array([ord(letter) for letter in text], np.int32), ())


class Talk:
    """A person who types `lines`, and what they see."""

    def __init__(self, *lines: str | type[BaseException], system: str = "", **model: Any) -> None:
        self.transcript = Transcript()
        self.engine = FakeEngine(Script(texts=("Hello", " there.")))
        self.prompts: list[str] = []
        self._lines = iter(lines)
        self._seen: list[str] = []
        self.on_write: Callable[[str], None] = lambda text: None
        models = local_models(fake_model(renderer=self.transcript, **model), self.engine)
        self.chat = Chat(models, Screen(self._write), Dialogue(system), read_line=self._read)

    def run(self) -> str:
        self.chat.run()
        return "".join(self._seen)

    def _write(self, text: str) -> None:
        self._seen.append(text)
        self.on_write(text)

    def _read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line


def test_answers_stream_and_every_turn_carries_the_conversation() -> None:
    talk = Talk("Hi", "And you?")
    assert talk.run() == "Hello there.\nHello there.\n\n"
    assert talk.transcript.texts == ["user: Hi", "user: Hi|assistant: Hello there.|user: And you?"]
    assert {request.session_id for request in talk.engine.requests} == {"run-1"}
    assert len({request.request_id for request in talk.engine.requests}) == 2


def test_the_answer_may_fill_the_context_and_samples_as_the_model_recommends() -> None:
    sampling = SamplingParams(temperature=0.6)
    talk = Talk("Hi", sampling=sampling, context_tokens=50)
    talk.run()
    [request] = talk.engine.requests
    assert request.max_tokens == 50 - len("user: Hi")
    assert request.sampling == sampling
    bounded = Talk("Hi", "/set max_tokens 10000", "Hi", context_tokens=50, defaults=ModelDefaults(max_tokens=400))
    bounded.run()
    assert [request.max_tokens + len(request.tokens) for request in bounded.engine.requests] == [50, 50]


def test_lines_continue_after_a_backslash_and_between_quotes() -> None:
    talk = Talk("one \\", "two\\", "three", '"""four', " five", 'six"""', '"""seven"""')
    talk.run()
    assert [text.rpartition("user: ")[2] for text in talk.transcript.texts] == [
        "one \ntwo\nthree",
        "four\n five\nsix",
        "seven",
    ]
    assert talk.prompts[:4] == [">>> ", "... ", "... ", ">>> "]


def test_new_forgets_the_turns_and_keeps_the_system_message() -> None:
    talk = Talk("Hi", "/new", "Again", system="Be kind.")
    talk.run()
    assert talk.transcript.texts[-1] == "system: Be kind.|user: Again"
    assert [request.session_id for request in talk.engine.requests] == ["run-1", "run-2"]


def test_the_system_message_is_set_and_shown() -> None:
    talk = Talk("/system", "/system Be brief.", "/system", "Hi")
    output = talk.run()
    assert "There is no system message." in output
    assert "Be brief.\n" in output
    assert talk.transcript.texts == ["system: Be brief.|user: Hi"]


def test_stats_are_of_the_last_answer_and_gone_after_new() -> None:
    talk = Talk("/stats", "Hi", "/stats", "/new", "/stats")
    talk.engine.script = Script(hit_tokens=2)
    output = talk.run()
    assert output.count("There is no answer yet.") == 2
    assert "prompt: 8 tokens, 2 cached (25%), 6 evaluated in 20 ms" in output


def test_speed_counts_the_tokens_made_between_the_first_and_the_last() -> None:
    assert describe_timings(Timings(0, 10, 5.0, 101, 500.0)).endswith("answer: 101 tokens, 200.0 tokens/s")
    assert describe_timings(Timings(0, 10, 5.0, 1, 0.0)).endswith("answer: 1 tokens")


def test_an_unknown_command_is_not_sent_to_the_model_but_a_path_is() -> None:
    talk = Talk("/syst", "/nwe", "/xyzzy", "/etc/hosts is what?", "", "  ")
    said = talk.run()
    assert "There is no command /syst; did you mean /system?" in said and "did you mean /new?" in said
    assert "There is no command /xyzzy; /? lists them" in said
    assert talk.transcript.texts == ["user: /etc/hosts is what?"]


def test_pasted_lines_are_a_message_whatever_they_begin_with() -> None:
    talk = Talk("/etc\nis a folder", "one\\\ntwo\\")
    talk.run()
    assert [text.rpartition("user: ")[2] for text in talk.transcript.texts] == ["/etc\nis a folder", "one\\\ntwo\\"]


def test_retry_asks_again_in_place_of_the_answer() -> None:
    talk = Talk("/retry", "Hi", "/retry", "/clear", "/retry")
    assert talk.run().count("There is no message to ask again.") == 2
    assert talk.transcript.texts == ["user: Hi", "user: Hi"]


def test_retry_after_a_failure_keeps_earlier_turns() -> None:
    talk = Talk("Hi", "Hi", "/retry")
    scripts = iter([Script(texts=("One",)), Script(texts=(), error=StepFailed("it broke")), Script()])
    talk.engine.script = lambda _: next(scripts)
    talk.run()
    assert talk.transcript.texts[-1] == "user: Hi|assistant: One|user: Hi"


def test_an_empty_message_is_told_and_not_sent() -> None:
    talk = Talk("", "  ")
    assert talk.run().count("Nothing to send") == 2
    assert not talk.engine.requests


def test_ctrl_c_twice_at_the_prompt_leaves() -> None:
    talk = Talk(KeyboardInterrupt, "Hi", KeyboardInterrupt, KeyboardInterrupt, "never read")
    talk.run()
    assert len(talk.engine.requests) == 1


@pytest.mark.parametrize("line", ["/bye", " /bye ", "/exit", "/quit"])
def test_bye_leaves(line: str) -> None:
    talk = Talk(line, "never read")
    talk.run()
    assert talk.prompts == [">>> "]


def test_ctrl_c_in_an_answer_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk("Hi", "Go on")
    # Nothing follows " two" until the signal is handled.
    talk.engine.script, talk.engine.max_texts = Script(texts=("One", " two", " three")), 2

    def interrupt(text: str) -> None:
        if text == " two":
            talk.engine.script = Script(texts=("Four",))
            os.kill(os.getpid(), signal.SIGINT)

    talk.on_write = interrupt
    assert talk.run() == "One two …\nFour\n\n"
    assert talk.transcript.texts[-1] == "user: Hi|assistant: One two|user: Go on"
    assert talk.engine.requests[0].request_id in talk.engine.cancelled


def test_ctrl_c_before_the_first_word_keeps_the_question() -> None:
    talk = Talk("Hi", "/stats", "Go on", "/new", "Hi", "/retry")
    submit = talk.engine.submit

    def interrupt(request: GenerationRequest) -> Generation:
        is_stopped = len(talk.engine.requests) in (0, 2)
        talk.engine.max_texts = 0 if is_stopped else None
        if is_stopped:
            os.kill(os.getpid(), signal.SIGINT)
        return submit(request)

    talk.engine.submit = interrupt  # type: ignore[method-assign]
    assert "answer: 0 tokens\n" in talk.run()
    assert talk.transcript.texts[1:] == ["user: Hi|user: Go on", "user: Hi", "user: Hi"]
    talk.chat.dialogue = Dialogue(turns=[{"role": "user", "content": "Hi"}])  # without figures, as from a server
    assert talk.chat._describe_last_answer("") == "The answer was stopped before its first word."


def test_ctrl_c_in_the_only_answer_is_told_by_the_exit_status() -> None:
    talk = Talk()
    talk.engine.script, talk.engine.max_texts = Script(texts=("One", " two", " three")), 2
    talk.on_write = lambda text: os.kill(os.getpid(), signal.SIGINT) if text == " two" else None
    assert talk.chat.answer("Hi") == 130


def test_a_failure_is_one_line_and_the_message_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk("Hi", "Hi again")
    talk.engine.script = Script(texts=(), error=StepFailed("it broke"))
    assert talk.run() == "\n"
    assert capsys.readouterr().err == "mlx-serve: it broke\n" * 2
    assert talk.transcript.texts == ["user: Hi", "user: Hi again"]


def test_a_template_that_shows_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk("Hi", context_tokens=60)
    talk.transcript.render = lambda *given, **more: talk.transcript.encode("")  # type: ignore[method-assign]
    talk.run()
    assert "has 0 tokens and the context 60; /new starts another" in capsys.readouterr().err


def test_a_full_context_is_told_and_new_helps(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk("x" * 100, "/new", "Hi", context_tokens=60)
    output = talk.run()
    assert "has 106 tokens and the context 60; /new starts another" in capsys.readouterr().err
    assert output.endswith("Hello there.\n\n")


# ------------------------------------------------------------------------------------------ a real terminal


DEADLINE_SECONDS = 300.0
PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
"""What a line editor tells the terminal when it begins and ends to read."""
CONTROL = re.compile(r"\x1b\[[\d?;]*.")


class Terminal:
    """A command on a pseudo-terminal of 80 columns and 24 rows, read until some text appears."""

    def __init__(self, *arguments: str, fresh: bool = False, imported: tuple[str, ...] = forked.MODELS) -> None:
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._before = termios.tcgetattr(self._master)
        files: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        options: dict[str, Any] = {"fresh": fresh, "imported": imported, "start_new_session": True}
        self.process = forked.start(*arguments, **options, **files)
        os.close(slave)
        self.output = ""

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._master) == self._before

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, since: int = 0) -> int:
        """Reads until `text` was shown after position `since`; returns where it ends."""
        self._read_until(lambda: text in self.output[since:])
        return self.output.index(text, since) + len(text)

    def wait_for_more(self, since: int) -> None:
        """Reads until any letter was shown after position `since`; moves of the cursor are none."""
        self._read_until(lambda: bool(CONTROL.sub("", self.output[since:]).strip()))

    def wait_for_prompt(self, since: int = 0) -> int:
        """Reads until a message can be typed or pasted; returns where that was shown."""
        return self.wait_for(">>>", self.wait_for(PASTE_ON, since))

    def _read_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.output
            if select.select([self._master], [], [], 0.1)[0]:
                self.output += os.read(self._master, 4096).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(120)
        os.close(self._master)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    return folder


@pytest.fixture
def terminal(folder: Path) -> Iterator[Terminal]:
    terminal = Terminal("run", str(folder))
    yield terminal
    terminal.close()


def test_ctrl_c_stops_a_real_answer_and_not_the_program(terminal: Terminal) -> None:
    at = terminal.wait_for_prompt(terminal.wait_for("tiny · /help"))
    terminal.type("Write a long story\r")
    at = terminal.wait_for(PASTE_OFF, at)
    terminal.wait_for_more(at)
    os.killpg(terminal.process.pid, signal.SIGINT)
    at = terminal.wait_for_prompt(terminal.wait_for(" …", at))
    terminal.type("/stats\r")
    terminal.wait_for_prompt(terminal.wait_for("answer: ", at))
    terminal.type("\x04")
    assert terminal.process.wait(DEADLINE_SECONDS) == 0


@pytest.fixture
def plain_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal("run", str(folder))
    yield terminal
    terminal.close()


def test_pasted_lines_are_one_message_and_ctrl_c_twice_leaves(plain_terminal: Terminal) -> None:
    terminal = plain_terminal
    at = terminal.wait_for_prompt()
    # The backslash at the end of what is pasted continues nothing.
    terminal.type("\x1b[200~/system one\rtwo 猫 👩‍🚀\\\x1b[201~")
    at = terminal.wait_for("two", at)
    terminal.type("\r")
    at = terminal.wait_for_prompt(terminal.wait_for("The system message is set.", at))
    terminal.type("/system\r")
    at = terminal.wait_for_prompt(terminal.wait_for("one\r\ntwo 猫 👩‍🚀\\", terminal.wait_for(PASTE_OFF, at)))
    terminal.type("\x03")
    at = terminal.wait_for_prompt(terminal.wait_for("Ctrl-C again", at))
    terminal.type("\x03")
    assert terminal.process.wait(DEADLINE_SECONDS) == 0
    assert set(re.findall(r"\x1b\[([\d;]*)m", terminal.output)) <= {"", "0"}, "NO_COLOR is heeded"


def test_ctrl_d_while_the_model_is_loaded_leaves_at_the_first_prompt(folder: Path) -> None:
    with contextlib.closing(Terminal("run", str(folder), fresh=True)) as terminal:
        until_quiet(terminal)
        terminal.type("\x04")
        terminal.wait_for_prompt()
        assert terminal.process.wait(DEADLINE_SECONDS) == 0


def until_quiet(terminal: Terminal) -> None:
    """Waits until the program takes keys one by one, which it does long before it reads them."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while termios.tcgetattr(terminal._master)[3] & termios.ICANON:
        assert time.monotonic() < deadline, "the terminal still hands over lines"
        time.sleep(0.005)
    assert ">>>" not in terminal.output


def test_a_pipe_is_one_message(folder: Path) -> None:
    ended = forked.run("run", str(folder), "--context", "64", sent=b"a\nb\n")
    assert ended.returncode == 0
    assert ended.stderr == b""
    assert len(ended.stdout) > 1
    assert b">>>" not in ended.stdout
    assert b"\x1b" not in ended.stdout


def test_an_empty_pipe_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" \n")))
    assert chat(local_models(fake_model(), FakeEngine()), Opening()) == 1
    assert capsys.readouterr() == ("", "mlx-serve: there is no question: standard input is empty\n")


@pytest.mark.parametrize(
    ("question", "piped", "message"),
    [("What is it?", "a text\n", "What is it?\n\na text"), ("Why?", "", "Why?"), ("", "Because.\n", "Because.")],
)
def test_what_is_piped_stands_below_the_question(
    question: str, piped: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transcript = Transcript()
    models = local_models(fake_model(renderer=transcript), FakeEngine(Script(texts=("Hello", " there."))))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
    assert chat(models, Opening("Be kind.", question)) == 0
    assert transcript.texts == [f"system: Be kind.|user: {message}"]
    assert capsys.readouterr().out == "Hello there.\n"
