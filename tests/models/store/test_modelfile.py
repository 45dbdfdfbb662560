"""Ollama's Modelfile: what is read of it, what is refused, and that it can be written back."""

import contextlib
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models.errors import ModelfileError
from models.store.stored_model import ExampleMessage, ModelDefaults, Modelfile, StoredModel, WeightsPlace

NOW = datetime(2026, 11, 23, tzinfo=UTC)
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


TEXTS = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters='"\r\ufeff'),
    min_size=1,
)


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
