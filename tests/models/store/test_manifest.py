"""Manifest and Modelfile: what is written is read, nothing is lost, and damage is told and kept."""

import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models.errors import InvalidParameter, ModelfileError, StoreError
from models.store.manifest import FILE_NAME, Manifest
from models.store.stored_model import (
    SAMPLING_DEFAULTS,
    ExampleMessage,
    ModelDefaults,
    Modelfile,
    StoredModel,
    WeightsPlace,
    find_full_name,
    parse_full_name,
)
from tests.support import forked

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


def model(name: str = "writer:latest", **defaults: object) -> StoredModel:
    return StoredModel(name, WeightsPlace("built-in", "demo"), NOW, NOW, ModelDefaults(**defaults))  # type: ignore[arg-type]


def store(manifest: Manifest, *models: StoredModel) -> None:
    with manifest.change() as stored:
        stored.update({one.name: one for one in models})


def test_what_was_written_is_read_by_another_process(tmp_path: Path) -> None:
    told = StoredModel(
        "writer:v2",
        WeightsPlace("repository", "org/name", "a" * 40),
        NOW,
        NOW,
        ModelDefaults(
            system="Be brief. Ünïcödé “ok”",
            messages=(ExampleMessage("user", "Hi"), ExampleMessage("assistant", "Yes?")),
            sampling={"temperature": 0.25, "top_k": 40, "seed": 2**62 + 1},
            stop=("\n\n", "END"),
            max_tokens=7,
            context_tokens=512,
            template_arguments={"enable_thinking": False, "nested": {"list": [1, "two"]}},
        ),
        license="MIT",
    )
    store(Manifest(tmp_path), told)
    assert Manifest(tmp_path).models() == {"writer:v2": told}
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0


WRITER = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from models.store.manifest import Manifest
from models.store.stored_model import ModelDefaults, StoredModel, WeightsPlace

now, place = datetime.now(UTC), WeightsPlace("built-in", "demo")
for number in range(10):
    name = f"{sys.argv[2]}{number}:latest"
    with Manifest(Path(sys.argv[1])).change() as stored:
        stored[name] = StoredModel(name, place, now, now, ModelDefaults())
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    writers = [forked.start(str(tmp_path), prefix, code=WRITER, imported=forked.COMMANDS) for prefix in "abc"]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    assert set(Manifest(tmp_path).models()) == {
        f"{prefix}{number}:latest" for prefix in "abc" for number in range(10)
    }


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    store(manifest, model())
    before = manifest.path.read_bytes()
    with pytest.raises(ZeroDivisionError), manifest.change() as stored:
        stored["other:latest"] = model(max_tokens=1 // 0)
    assert manifest.path.read_bytes() == before
    assert set(manifest.models()) == {"writer:latest"}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b'{"models": []}',
        b'{"version": 1}',
        b'{"version": 1, "models": [{"name": "../x"}]}',
        b'{"version": "1", "models": []}',
    ],
)
def test_a_damaged_file_is_set_aside_once_and_kept(tmp_path: Path, text: bytes) -> None:
    manifest = Manifest(tmp_path)
    for number in (1, 2):
        manifest.path.write_bytes(text)
        with pytest.raises(StoreError, match=f"set aside as {FILE_NAME}.damaged-{number}"):
            manifest.models()
        assert (tmp_path / f"{FILE_NAME}.damaged-{number}").read_bytes() == text
        assert manifest.models() == {}
    manifest.path.write_bytes(text)
    with pytest.raises(StoreError, match="set aside"), manifest.change():
        pass
    store(manifest, model())
    assert set(manifest.models()) == {"writer:latest"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../x:latest"),
        ("name", "UPPER:latest"),
        ("defaults", {"sampling": {"temperature": 9}}),
        ("defaults", {"sampling": {"logit_bias": 1}}),
        ("defaults", {"stop": [""]}),
        ("defaults", {"context_tokens": 1}),
        ("weights", {"kind": "address", "name": "x"}),
    ],
)
def test_a_value_that_could_not_have_been_written_is_damage(tmp_path: Path, field: str, value: object) -> None:
    manifest = Manifest(tmp_path)
    store(manifest, model())
    found = json.loads(manifest.path.read_bytes())
    found["models"][0][field] = value
    manifest.path.write_text(json.dumps(found))
    with pytest.raises(StoreError, match="set aside"):
        manifest.models()


def test_a_newer_file_is_left_alone(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    manifest.path.write_text('{"version": 2, "models": {}}')
    with pytest.raises(StoreError, match="newer mlx-serve"), manifest.change():
        pass
    assert manifest.path.read_text() == '{"version": 2, "models": {}}'


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    manifest = Manifest(tmp_path / "file" / "mlx-serve")
    with pytest.raises(StoreError, match="cannot be used"), manifest.change():
        pass


HOSTILE = [
    "../x",
    "/etc",
    "~",
    "a/b/c",
    "C:\\",
    "a\0b",
    "ä",
    "x" * 10_240,
    "",
    ":",
    "a:",
    ":b",
    "a:b:c",
    ".",
    "..",
    "-a",
    "a\n",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_none(name: str) -> None:
    assert find_full_name(name) is None
    with pytest.raises(StoreError, match="is no name for a model") as caught:
        parse_full_name(name)
    assert len(str(caught.value)) < 400


@given(st.text(max_size=200))
def test_no_name_is_a_path_or_a_repository(text: str) -> None:
    full = find_full_name(text)
    if full is not None:
        assert not set(full) - set("abcdefghijklmnopqrstuvwxyz0123456789._-:")
        assert full[0] not in ".-:~"
        assert find_full_name(full) == full == find_full_name(full.upper())


def test_the_tag_is_latest_where_none_is_said(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    store(manifest, model("writer:latest"), model("writer:v2"))
    for name in ("writer", "Writer:latest", "WRITER"):
        found = manifest.find(name)
        assert found is not None
        assert (found.name, found.short_name) == ("writer:latest", "writer")
    assert manifest.find("writer:v3") is None


@pytest.mark.parametrize("name", SAMPLING_DEFAULTS)
def test_each_sampling_default_is_checked(name: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        ModelDefaults(sampling={name: 2.0**70}).check()


def test_a_request_that_has_a_system_prompt_keeps_it() -> None:
    defaults = ModelDefaults(
        system="Be brief.", messages=(ExampleMessage("user", "1"), ExampleMessage("assistant", "2"))
    )
    user = {"role": "user", "content": "Hi"}
    own = {"role": "system", "content": "Be long."}
    assert [one["role"] for one in defaults.conversation([user])] == ["system", "user", "assistant", "user"]
    assert defaults.conversation([own, user])[0] is own
    assert len(defaults.conversation([own, user])) == 4
    assert ModelDefaults().conversation([own, user]) == [own, user]


EXAMPLE = '''\
# A model of mine.
from qwen3:8b

Parameter temperature 0.25
PARAMETER stop "<|end|>\\n"
PARAMETER stop AI:
PARAMETER num_ctx 4096
PARAMETER num_predict -1
PARAMETER repeat_penalty 1.1
PARAMETER num_gpu 33
PARAMETER chat_template_kwargs {"enable_thinking": false}
SYSTEM """You are Mario.
# This is no comment.
"Answer" as he does.
"""
MESSAGE user Is Toronto in Canada?
MESSAGE assistant "yes"
message user """Two
lines"""
LICENSE "MIT"
'''


def test_an_example_is_read_as_ollama_reads_it() -> None:
    found = Modelfile.parse(EXAMPLE)
    assert found.base == "qwen3:8b"
    assert found.system == 'You are Mario.\n# This is no comment.\n"Answer" as he does.\n'
    assert found.messages == [
        ExampleMessage("user", "Is Toronto in Canada?"),
        ExampleMessage("assistant", "yes"),
        ExampleMessage("user", "Two\nlines"),
    ]
    assert found.license == "MIT"
    assert ModelDefaults().with_parameters(found.parameters) == ModelDefaults(
        sampling={"temperature": 0.25, "repetition_penalty": 1.1},
        stop=("<|end|>\n", "AI:"),
        context_tokens=4096,
        template_arguments={"enable_thinking": False},
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no FROM"),
        ("SYSTEM hi", "no FROM"),
        ("FROM a\nFROM b", "line 2: there is a FROM already"),
        ("FROM a\nTEMPLATE {{ .Prompt }}", "line 2: TEMPLATE is not taken: a model's template comes with its files"),
        ("FROM a\nADAPTER ./lora", "line 2: ADAPTER is not taken: .* --adapter NAME=FOLDER"),
        ("FROM a\nSYSTME hi", "line 2: there is no instruction 'SYSTME'; did you mean SYSTEM?"),
        ("FROM a\nPARAMETER temperature", "line 2: PARAMETER takes a name and a value"),
        ("FROM a\nMESSAGE robot hi", "line 2: MESSAGE takes a role"),
        ('FROM a\nSYSTEM """never\nends', "line 2: the text that begins"),
        ('FROM a\nSYSTEM """a""" b', "line 2: nothing may follow"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ModelfileError, match=said):
        Modelfile.parse(text)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temprature", "1", "no parameter 'temprature'; did you mean temperature?"),
        ("zzz", 1, "there are temperature"),
        ("temperature", "hot", "temperature is a number, not 'hot'"),
        ("temperature", 9, "temperature must be a number in"),
        ("temperature", "nan", "temperature must be a number"),
        ("top_k", "1.5", "top_k is a whole number"),
        ("top_k", True, "top_k is a whole number"),
        ("num_ctx", 1, "num_ctx must be at least 16"),
        ("repeat_penalty", 0, "repeat_penalty must be"),
        ("stop", [1], "stop is a text"),
        ("stop", "", "stop: at most"),
        ("chat_template_kwargs", "[]", "an object in JSON"),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_an_error(name: str, value: Any, said: str) -> None:
    with pytest.raises(ModelfileError, match=said):
        ModelDefaults().with_parameters([(name, value)])


def test_what_is_said_later_goes_before_what_the_parent_has() -> None:
    parent = ModelDefaults(sampling={"temperature": 0.1, "top_p": 0.5}, stop=("a",), max_tokens=5)
    child = parent.with_parameters([("temperature", 0.9), ("stop", ["b", "c"]), ("num_predict", -1)])
    assert child == ModelDefaults(sampling={"temperature": 0.9, "top_p": 0.5}, stop=("b", "c"))
    assert parent.with_parameters([]) == parent


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("top_k", -1, {"top_k": 0}), ("seed", -1, {}), ("top_p", 0, {"top_p": 1.0, "top_k": 1})],
)
def test_values_that_turn_something_off_mean_the_same(name: str, value: int, expected: dict[str, float]) -> None:
    assert ModelDefaults().with_parameters([(name, value)]).sampling == expected


TEXTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters='"\r\ufeff'), min_size=1)


@example(system="a  \nb", stop=[], temperature=0, said="0\x0c\n0")
@given(
    system=TEXTS,
    stop=st.lists(st.text(min_size=1, max_size=9).filter(lambda text: text.isprintable()), max_size=4),
    temperature=st.integers(0, 20),
    said=TEXTS.filter(lambda text: text.strip() == text),
)
def test_what_is_written_is_read_again(system: str, stop: list[str], temperature: int, said: str) -> None:
    defaults = ModelDefaults(system, (ExampleMessage("user", said),), {"temperature": temperature / 10}, tuple(stop))
    stored = StoredModel("a:latest", WeightsPlace("repository", "org/name", "c" * 40), NOW, NOW, defaults)
    found = Modelfile.parse(stored.modelfile())
    assert found.base == f"org/name@{'c' * 40}"
    assert found.system == system
    assert found.messages == list(defaults.messages)
    assert ModelDefaults().with_parameters(found.parameters) == ModelDefaults(
        sampling=defaults.sampling, stop=defaults.stop
    )
    assert dict(defaults.parameters())["temperature"] == f"{temperature / 10:g}"


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    for tried in (text, f"FROM a\n{text}", f'FROM a\nSYSTEM """{text}'):
        with contextlib.suppress(ModelfileError):
            ModelDefaults().with_parameters(Modelfile.parse(tried).parameters)
