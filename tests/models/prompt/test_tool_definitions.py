"""Tools that are loaded later are written as each template writes those at the head of a prompt."""

import json
from typing import Any

import pytest

from models.prompt.tool_definitions import ToolDefinitions
from tests.models.prompt.test_template_shapes import renderer_of

ASK = {"role": "user", "content": "Hi"}
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

FAMILIES: dict[str, str] = {
    "qwen": "{% if tools %}<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>{% endif %}" + TURNS,
    "llama": "{% if tools %}{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}" + TURNS,
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}" + TURNS,
    "granite": "{% if tools %}{{ tools | map(attribute='function') | list | tojson(indent=2) }}\n{% endif %}" + TURNS,
    "deepseek": "{% if tools %}## Tools\n{% for t in tools %}### {{ t.function.name }}\nDescription: "
    "{{ t.function.description }}\nParameters: {{ t.function.parameters | tojson }}\n\n{% endfor %}{% endif %}"
    + TURNS,
    "gpt-oss": "{% if tools %}namespace functions {\n\n{% for t in tools %}// {{ t.function.description }}\ntype "
    "{{ t.function.name }} = (_: {\n{% for k in t.function.parameters.properties %}{{ k }}: string,\n{% endfor %}"
    "}) => any;\n\n{% endfor %}} // namespace functions{% endif %}" + TURNS,
    "qwen coder": '{% if tools %}<tools>{% for t in tools %}{{ "\n" }}<function>\n<name>'
    "{{ t.function.name }}</name>\n"
    "{{ t.function.parameters | tojson }}\n</function>{% endfor %}{{ '\n' }}</tools>{% endif %}" + TURNS,
    "command": "{% if tools %}```python\n{% for t in tools %}def {{ t.function.name }}({% for k in "
    't.function.parameters.properties %}{{ k }}{% endfor %}):\n    """{{ t.function.description }}"""\n    pass\n\n'
    "{% endfor %}```{% endif %}" + TURNS,
    "gemma": "{% for t in tools or [] %}<decl>{{ t.function.name }}{{ t.function.parameters | tojson }}</decl>"
    "{% endfor %}" + TURNS,
    "minimax": "{% if tools %}<tools>\n{% for t in tools %}<tool>{{ t.function | tojson }}</tool>\n{% endfor %}"
    "</tools>{% endif %}" + TURNS,
    "counting": "{% if tools %}{{ tools | length }} tools:{% for t in tools %} {{ t.function.name }}{% endfor %}"
    "{% endif %}" + TURNS,
}


def tool(name: str) -> dict[str, Any]:
    properties = {"city": {"type": "string", "description": f"where {name} looks"}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"{name} it.", "parameters": parameters}}


TOOLS = {name: tool(name) for name in ("find_it", "keep_it", "qfirst_it")}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_tool_has_the_form_of_one_at_the_head(family: str) -> None:
    renderer = renderer_of(FAMILIES[family])
    head = renderer.render([ASK], list(TOOLS.values())).text
    block = renderer.definitions.block(["find_it", "keep_it"], TOOLS, "place")
    first, *written, last = block.splitlines()
    assert (first, last) == ("<functions>", "</functions>")
    whole = "\n".join(written)
    start = whole.index("keep_it")
    assert "find_it" in whole[:start] and "find_it" not in whole[start:]
    if family == "counting":
        assert (
            json.loads(written[0].removeprefix("<function>").removesuffix("</function>"))
            == TOOLS["find_it"]["function"]
        )
        return
    alone = renderer.definitions.block(["find_it"], TOOLS, "elsewhere").splitlines()[1:-1]
    definition = "\n".join(alone)
    assert definition in head and whole.startswith(definition)
    for words in ("find_it", "city"):
        assert words in definition


def test_several_places_where_a_definition_could_begin_are_told_apart() -> None:
    renderer = renderer_of(FAMILIES["qwen coder"])
    block = renderer.definitions.block(["find_it"], TOOLS, "place")
    assert block.startswith("<functions>\n<function>\n<name>find_it</name>") and block.endswith(
        "</function>\n</functions>"
    )


def test_a_conversation_keeps_the_wording_that_it_saw_first() -> None:
    definitions = ToolDefinitions(lambda tools: "".join(f"{json.dumps(one)}\n" for one in tools))
    first = definitions.block(["find_it"], TOOLS, "one")
    reworded = {"find_it": tool("find_it") | {"function": {"name": "find_it", "description": "Other words."}}}
    assert definitions.block(["find_it"], reworded, "one") == definitions.block(["find_it"], {}, "one") == first
    assert "Other words." in definitions.block(["find_it"], reworded, "two")


def test_a_tool_that_is_gone_is_said_to_be_until_it_comes_back() -> None:
    definitions = ToolDefinitions(lambda tools: "".join(f"{json.dumps(one)}\n" for one in tools))
    names = ["find_it", "lost_it"]
    partly = definitions.block(names, TOOLS, "one")
    assert "where find_it looks" in partly and partly.endswith("</functions>\nlost_it is no longer available.")
    assert definitions.block(["lost_it"], TOOLS, "one") == "lost_it is no longer available."
    back = definitions.block(names, {**TOOLS, "lost_it": tool("lost_it")}, "one")
    assert "where lost_it looks" in back and "no longer" not in back


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.prompt.tool_definitions.MAX_KEPT_CHARACTERS", 1000)
    definitions = ToolDefinitions(lambda tools: "".join(f"{json.dumps(one)}\n" for one in tools))
    first = definitions.block(["find_it"], TOOLS, 0)
    for place in range(1, 20):
        definitions.block(["find_it"], TOOLS, place)
    assert definitions.block(["find_it"], {}, 19) == first
    assert definitions.block(["find_it"], {}, 0) == "find_it is no longer available."
