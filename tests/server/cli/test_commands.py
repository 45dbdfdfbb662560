"""Parameters, saved conversations, other models, images and the history of the chat in the terminal."""

import base64
import json
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import closing
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.errors import ModelNotFound
from models.inference.sampling_params import SamplingParams
from server.app.config import ServerConfig
from server.cli.ask import Served, models_at
from server.cli.chat import Chat, JoinedModels, Models, Opening, chat, with_images
from server.cli.repl import local, terminal
from server.cli.repl.conversation import (
    ChatError,
    Dialogue,
    parse_parameter,
)
from server.cli.repl.local import LocalModels
from server.cli.repl.terminal import Screen, history_file, open_history
from tests.models.prompt.test_pictures import renderer_of
from tests.server.api.test_images import opened
from tests.server.cli.test_chat import Transcript
from tests.support import tiny_vision
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, Script, fake_model
from tests.support.live_server import running
from tests.support.local_models import local_models

PNG = tiny_vision.image(1)


def talk(models: Models, *lines: str, dialogue: Dialogue | None = None) -> str:
    """Returns what a person who types `lines` sees."""
    seen: list[str] = []
    typed = iter([*lines, "/bye"])
    Chat(models, Screen(seen.append), dialogue or Dialogue(), read_line=lambda _: next(typed)).run()
    return "".join(seen)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(Script(texts=("Hello", " there.")))


@pytest.fixture
def models(engine: FakeEngine) -> LocalModels:
    return local_models(fake_model(renderer=Transcript()), engine)


# -------------------------------------------------------------------------------------------------- parameters


def test_what_is_set_rules_the_answers_until_it_is_unset(models: LocalModels, engine: FakeEngine) -> None:
    lines = ("/set", "/set temperature 0.2", "/set seed 7", "/set max_tokens 5", "Hi", "/set", "/set seed default")
    shown = talk(models, *lines, "/new", "Again", "/set seed")
    first, second = engine.requests
    assert (first.sampling.temperature, first.sampling.seed, first.max_tokens) == (0.2, 7, 5)
    assert (second.sampling.temperature, second.sampling.seed) == (0.2, SamplingParams().seed)
    assert shown.startswith("Nothing is set: the model's own recommendations hold.\ntemperature 0.2\n")
    assert "max_tokens 5\nseed 7\ntemperature 0.2\n" in shown
    assert shown.endswith("seed is as the model recommends.\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temprature 1", "there is no parameter 'temprature'; did you mean temperature?"),
        ("/set system Be brief.", "the system message is no parameter; /system TEXT sets it"),
        ("/set xyzzy 1", "there is no parameter 'xyzzy'; there are temperature, "),
        ("/set temperature 9", "temperature must be a number in [0, 2], not 9.0"),
        ("/set temperature warm", "temperature is a number, not 'warm'"),
        ("/set max_tokens 0", "max_tokens is a whole number above 0, not 0"),
        ("/set top_k 1.5", "top_k is a whole number, not '1.5'"),
        ("/set end_token_ids 3", "there is no parameter 'end_token_ids'"),
        ("/set think maybe", "think is on or off, not 'maybe'"),
    ],
)
def test_a_wrong_parameter_is_told_and_changes_nothing(line: str, words: str, models: LocalModels) -> None:
    dialogue = Dialogue()
    assert words in talk(models, line, dialogue=dialogue)
    assert dialogue.parameters == {}


def test_parameters_reach_a_joined_server(engine: FakeEngine) -> None:
    with running(create_app(engine, fake_model(), ServerConfig())) as url:
        talk(
            JoinedModels(Served(url, "tiny")),
            *("/set temperature 0.2", "/set seed 7", "/set max_tokens 5", "/set repetition_penalty 1.5", "Hi"),
        )
    [request] = engine.requests
    assert (request.sampling.temperature, request.sampling.seed, request.max_tokens) == (0.2, 7, 5)
    assert request.sampling.repetition_penalty == 1.5


def test_thinking_is_told_to_the_template(engine: FakeEngine) -> None:
    renderer = Transcript()
    lines = ("Hi", "/set think off", "Hi", "/set think on", "Hi")
    talk(local_models(fake_model(renderer=renderer), engine), *lines)
    assert renderer.template_kwargs == [None, {"enable_thinking": False}, {"enable_thinking": True}]


def test_every_parameter_can_be_typed() -> None:
    assert parse_parameter("top_k", "40") == 40
    assert parse_parameter("top_p", "0.9") == 0.9
    assert parse_parameter("repeat_last_n", "-1") == -1
    assert parse_parameter("xtc_probability", "0.5") == 0.5
    with pytest.raises(ChatError):
        parse_parameter("logit_bias", "1")
    for name in ("bad_words", "allowed_token_ids", "dry_breakers", "dry_multiplier"):
        with pytest.raises(ChatError, match="there is no parameter"):
            parse_parameter(name, "1")


# --------------------------------------------------------------------------------------------- saving, loading


def test_a_saved_conversation_goes_on_where_it_was(models: LocalModels, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    first = Dialogue()
    shown = talk(models, "/system Be brief.", "/set seed 7", "Hi", f"/save {file}", dialogue=first)
    assert f"Saved in {file}." in shown
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = Dialogue()
    shown = talk(models, f"/load {file}", "/retry", "And you?", dialogue=second)
    assert shown.startswith("2 messages.\n")
    assert second.turns[:2] == first.turns
    assert (second.system, second.parameters, len(second.turns)) == ("Be brief.", {"seed": 7}, 4)
    assert second.number == 2, "it is no continuation of what was said before"


def test_a_saved_conversation_may_be_replaced_and_nothing_else(models: LocalModels, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("notes")
    assert "no saved conversation; choose another name" in talk(models, f"/save {other}")
    assert other.read_text() == "notes"
    assert "is no file" in talk(models, f"/save {tmp_path}")
    file = tmp_path / "talk.json"
    talk(models, f"/save {file}", "Hi", f"/save {file}")
    assert len(json.loads(file.read_text())["messages"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "talk.json"]


@pytest.mark.parametrize("name", ["/save", "/load", "/load {}/none", "/load {}", "/save {}/none/talk.json"])
def test_a_file_that_cannot_be_used_is_one_line(name: str, models: LocalModels, tmp_path: Path) -> None:
    shown = talk(models, name.format(tmp_path))
    assert shown.count("\n") == 1
    assert any(word in shown for word in ("needs the name", "cannot be read", "no file", "cannot be written"))


GOOD = {"format": "mlx-serve conversation 1", "model": "m", "system": "", "parameters": {}, "messages": []}


@pytest.mark.parametrize(
    "record",
    [
        [],
        {**GOOD, "format": "other"},
        {**GOOD, "messages": [{"role": "system", "content": "x"}]},
        {**GOOD, "messages": [{"role": "user", "content": ["x"]}]},
        {**GOOD, "parameters": {"temperature": "hot"}},
        {**GOOD, "parameters": {"think": 1}},
    ],
)
def test_what_is_damaged_changes_nothing(record: Any) -> None:
    dialogue = Dialogue("Be kind.", [{"role": "user", "content": "Hi"}])
    with pytest.raises(ChatError):
        dialogue.load(json.dumps(record))
    assert dialogue == Dialogue("Be kind.", [{"role": "user", "content": "Hi"}])


def test_a_parameter_that_no_model_takes_is_told_with_the_file(models: LocalModels, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({**GOOD, "parameters": {"temperature": 9}}))
    assert f"{file} cannot be loaded: temperature must be" in talk(models, f"/load {file}")


def test_a_conversation_with_another_model_names_it(models: LocalModels, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({**GOOD, "model": "a/b"}))
    assert "0 messages. The conversation was with a/b; to go on with that: /model a/b\n" in talk(
        models, f"/load {file}"
    )


# ------------------------------------------------------------------------------------------------ other models


def test_what_is_talked_to_is_shown(models: LocalModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "installed", list)
    shown = talk(models, "/system Be brief.", "/show", "/model", "/model other")
    assert "model    tiny\nsystem   Be brief.\nmessages 0\nNothing is set" in shown
    assert "tiny, which you are talking to\n" in shown
    assert "There is no model 'other'" in shown


def test_a_server_has_other_models(engine: FakeEngine) -> None:
    with running(create_app(engine, fake_model(), ServerConfig())) as url:
        joined = JoinedModels(Served(url, "gone"))
        shown = talk(joined, "/model", "/model unknown", "/model tiny", "Hi")
    assert "gone, which you are talking to\ntiny\n" in shown
    assert f"the server at {url} has no model 'unknown'" in shown
    assert "tiny goes on with the conversation.\nHello there.\n" in shown


class Loader:
    """Stands for loading a model into this process, which takes a real one and seconds."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.broken = ""

    def __call__(self, config: ServerConfig) -> Any:
        [name] = config.models
        if name == self.broken:
            raise ModelNotFound("it is broken")
        self.events.append(f"load {name}")
        engine = FakeEngine(Script(texts=("I am ", name)))
        engine.stop = lambda: self.events.append(f"unload {name}")  # type: ignore[method-assign]
        model = fake_model(id=name, renderer=Transcript())
        return SimpleNamespace(asked_for=model, engine=engine, start=lambda: None)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    loader = Loader()
    monkeypatch.setattr(local, "open_service", loader)
    monkeypatch.setattr(local, "resolve", _resolve)
    return loader


def _resolve(name: str) -> Path:
    if name == "unknown":
        raise ModelNotFound("there is no such model")
    return Path(name)


def test_another_model_takes_the_place_of_the_one_that_is_loaded(loader: Loader) -> None:
    with closing(LocalModels(ServerConfig(models=("a",)))) as models:
        shown = talk(models, "Hi", "/model unknown", "/model a", "/model b", "Hi")
    assert "there is no such model\n" in shown
    assert "b goes on with the conversation.\nI am b\n" in shown
    assert loader.events == ["load a", "unload a", "load b", "unload b"]


def test_the_old_model_comes_back_when_the_new_one_cannot_be_loaded(loader: Loader) -> None:
    loader.broken = "b"
    with closing(LocalModels(ServerConfig(models=("a",)))) as models:
        shown = talk(models, "/model b", "Hi")
    assert "it is broken\nI am a\n" in shown
    assert loader.events == ["load a", "unload a", "load a", "unload a"]


# ------------------------------------------------------------------------------------------------------ images


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "a cat.PNG"
    path.write_bytes(PNG)
    return path


@pytest.fixture
def seeing(engine: FakeEngine) -> LocalModels:
    vision: Any = SimpleNamespace(open=opened)
    return local_models(fake_model(renderer=renderer_of(), context_tokens=2000, vision=vision), engine)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("'{}' what is it?", ["", "what is it?"]),
        ('What is "{}"?', ["What is", "?"]),
        ("file://{}", [""]),
        ("what is {}?", ["what is", "?"]),
        ("{} and '{}'", ["", "and", ""]),
    ],
)
def test_an_image_that_is_there_stands_for_its_path(form: str, words: list[str], image: Path) -> None:
    path = str(image)
    escaped = path.replace(" ", "%20" if form.startswith("file:") else "\\ ")
    written = form.replace("'{}'", f"'{path}'").replace('"{}"', f'"{path}"').replace("{}", escaped)
    parts = [*with_images(written)]
    shown = {"type": "image_url", "image_url": {"url": f"data:image;base64,{base64.b64encode(PNG).decode()}"}}
    texts: list[Any] = [{"type": "text", "text": word} for word in words]
    joined = [part for pair in zip(texts, [shown] * len(texts), strict=True) for part in pair]
    wanted = joined if form == "file://{}" else joined[:-1]
    assert parts == [part for part in wanted if part.get("text") != ""]


@pytest.mark.parametrize(
    "text", ["Describe cat.png", "/none/cat.png", "It's a cat, isn't it?", "/tmp", "", "'", "/\0.png", "{}/words.png"]
)
def test_what_is_only_spoken_of_or_is_no_image_stays_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "words.png").write_text("These are words.")
    text = text.format(tmp_path) if "{}" in text else text
    assert with_images(text) == text


def test_an_image_is_seen_sent_again_saved_and_a_line_for_a_model_of_text(
    image: Path, seeing: LocalModels, models: LocalModels, engine: FakeEngine, tmp_path: Path
) -> None:
    dialogue, file = Dialogue(), tmp_path / "saved.json"
    talk(seeing, f"What is in '{image}'?", "Go on.", "/retry", f"/save {file}", dialogue=dialogue)
    assert [[one.picture.data for one in request.pictures.placed] for request in engine.requests] == [[PNG]] * 3
    loaded = Dialogue()
    loaded.load(file.read_text())
    assert loaded.turns == dialogue.turns
    talk(local_models(fake_model(renderer=renderer_of(), context_tokens=2000), engine), "And?", dialogue=loaded)
    assert not engine.requests[-1].pictures.placed


def test_an_image_is_refused_politely_and_the_conversation_stays(
    image: Path,
    models: LocalModels,
    seeing: LocalModels,
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    dialogue = Dialogue()
    talk(models, "Hi", f"What is in '{image}'?", dialogue=dialogue)
    assert "sees no images" in capsys.readouterr().err
    for name, data, words in (
        ("cut.png", PNG[:-20], "cut short"),
        ("a.heic", b"\0\0\0\x18ftypheic", "only PNG, JPEG"),
    ):
        (tmp_path / name).write_bytes(data)
        talk(seeing, f"{tmp_path / name}", dialogue=dialogue)
        assert words in capsys.readouterr().err
    assert (len(engine.requests), len(dialogue.turns)) == (1, 2)


def piping(data: bytes) -> TextIOWrapper:
    return TextIOWrapper(BytesIO(data))


def test_an_image_from_a_pipe_is_seen(
    models: LocalModels,
    seeing: LocalModels,
    engine: FakeEngine,
    image: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for who, data, status in ((models, PNG, 1), (seeing, PNG, 0), (models, f"A log: {image}".encode(), 0)):
        monkeypatch.setattr(sys, "stdin", piping(data))
        assert chat(who, Opening(question="What is it?")) == status
    assert "sees no images" in capsys.readouterr().err
    assert [len(request.pictures.placed) for request in engine.requests] == [1, 0]


def test_a_server_is_sent_images_too(engine: FakeEngine, image: Path) -> None:
    vision: Any = SimpleNamespace(open=opened)
    model = fake_model(renderer=renderer_of(), context_tokens=2000, vision=vision)
    with running(create_app(engine, model, ServerConfig())) as address:
        (served,) = models_at(address, None)
        talk(JoinedModels(served), f"{image}".replace(" ", "\\ "))
    assert [one.picture.data for one in engine.requests[-1].pictures.placed] == [PNG]


# ----------------------------------------------------------------------------------------- history


def entries(path: Path) -> Sequence[str]:
    return list(open_history(path).load_history_strings())


def test_what_was_typed_is_there_the_next_time_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    kept = open_history(path)
    kept.store_string("one\ntwo")
    kept.store_string("three")
    assert entries(path) == ["three", "one\ntwo"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_long_history_loses_its_oldest_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "MAX_BYTES", 4000)
    path = tmp_path / "history"
    for number in range(200):
        open_history(path).store_string(f"message {number}")
    kept = entries(path)
    assert path.stat().st_size < 4200
    assert list(kept) == [f"message {number}" for number in range(199, 199 - len(kept), -1)]
    assert len(kept) > 20


def test_a_history_that_cannot_be_kept_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = open_history(tmp_path / "file" / "history")
    kept.store_string("one")
    path = tmp_path / "history"
    kept = open_history(path)
    path.unlink()
    path.mkdir()
    kept.store_string("two")
    open_history(None).store_string("three")
    assert os.listdir(path) == []  # noqa: PTH208


def test_the_history_lies_where_xdg_puts_it() -> None:
    assert history_file({"XDG_STATE_HOME": "/s"}) == Path("/s/mlx-serve/history")
    assert history_file({}) == Path("~/.local/state/mlx-serve/history").expanduser()
