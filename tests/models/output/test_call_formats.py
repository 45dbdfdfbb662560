"""A model's format of calls is found, and each description says what its family writes."""

import pkgutil

import pytest
from mlx_lm import tool_parsers

from models.output import call_formats
from models.output.call_formats import FORMATS, CallFormat, find_call_format
from tests.support.call_writer import written

CALLS = [("f", {"a": "x\ny", "n": [1]}), ("g", {})]

WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nx\ny\n</parameter>\n<parameter=n>\n[1]\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x\ny</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>[1]</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x\ny</parameter>\n'
    '<parameter name="n">[1]</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
    "dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x\ny'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "minicpm": '<function name="f"><param name="a"><![CDATA[x\ny]]></param><param name="n">[1]</param></function>'
    '<function name="g"></function>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f" index="0"<|sep|>'
    '<|open|>argument key="a" type="string"<|sep|>'
    'x\ny<|close|>argument<|sep|><|open|>argument key="n" type="array"<|sep|>[1]<|close|>argument<|sep|>'
    '<|close|>call<|sep|><|open|>call tool="g" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "gemma4": '<|tool_call>call:f{a:<|"|>x\ny<|"|>,n:[1]}<tool_call|><|tool_call>call:g{}<tool_call|>',
    "lfm2": "<|tool_call_start|>[f(a='x\\ny', n=[1]), g()]<|tool_call_end|>",
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "x\\ny", "n": [1]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "llama": '<|python_tag|>{"name": "f", "parameters": {"a": "x\\ny", "n": [1]}}; {"name": "g", "parameters": {}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "x\\ny", "n": [1]}[TOOL_CALLS]g[ARGS]{}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": "x\\ny", "n": [1]}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": "x\\ny", "n": [1]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n'
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3.1": "<｜tool▁calls▁begin｜>"
    '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x\\ny", "n": [1]}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}
"""As the families' templates write these calls; other families differ from one of these in names only."""


@pytest.mark.parametrize("name", WRITTEN)
def test_a_description_says_what_the_template_writes(name: str) -> None:
    form = next(one for one in FORMATS if one.name == name)
    assert written(form, CALLS) == WRITTEN[name]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_format_is_found_by_its_own_calls_in_a_template(form: CallFormat) -> None:
    if form.name not in ("pythonic", "llama", "kimi_k3", "minicpm", "deepseek_v3"):
        assert find_call_format((), f"tools {written(form, CALLS)}") is form


@pytest.mark.parametrize(
    ("vocabulary", "template", "name"),
    [
        ({"<|channel|>", "<|message|>", "<|start|>"}, "tools", "harmony"),
        ({"<|channel|>"}, "", "harmony"),
        ({"<｜tool▁call▁begin｜>"}, "tools", "deepseek_v3.1"),
        ((), "tools '<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n'", "deepseek_v3"),
        ({"｜DSML｜", "<｜tool▁call▁begin｜>"}, "", "dsml"),
        ({"<|python_tag|>"}, "if tools", "llama"),
        ({"<|python_tag|>"}, "messages only", None),
        ({"<|python_start|>", "<|python_tag|>"}, "if tools", "pythonic"),
        ((), "if tools: [func_name1(params_name1=params_value1)]", "pythonic"),
        ((), 'tools {"name": function name, "parameters": dictionary}', "llama"),
        ({"<tool_call>"}, r"tools <tool_call>\n<function=example>", "qwen3_coder"),
        ({"<tool_call>"}, 'tools <tool_call>\\n{"name": ', "hermes"),
        ({"<tool_call>"}, "messages only", None),
        ({"<|tool_call_start|>"}, "tools", "lfm2"),
        ((), "tools <|tool_list_start|>", "lfm2"),
        ({"<|open|>", "<|end_of_msg|>"}, "tools", "kimi_k3"),
        ((), """tools '<function name="' + name + '"><param name="'""", "minicpm"),
        ((), "if tools", None),
    ],
)
def test_a_format_is_found_by_template_or_vocabulary(vocabulary: set[str], template: str, name: str | None) -> None:
    found = find_call_format(vocabulary, template)
    assert (found and found.name) == name


def test_what_a_configuration_declares_comes_first() -> None:
    assert find_call_format((), "tools <tool_call>", "laguna") is call_formats.GLM
    assert find_call_format((), "tools <tool_call>", "of tomorrow") is call_formats.HERMES


def test_every_parser_of_mlx_lm_has_a_description() -> None:
    names = [module.name for module in pkgutil.iter_modules(tool_parsers.__path__)]
    assert names and all(find_call_format((), "tools", name) is not None for name in names)
