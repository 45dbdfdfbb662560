"""A rendered prompt equals the tokenizer's own, and its restore points hold for every other continuation."""

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cache.snapshots import RestorePoint, RestorePointKind
from models.errors import PromptTooLong
from models.output.pieces import ReasoningFormat
from models.prompt import chat_template, tokenize
from models.prompt.chat_template import ChatRenderer, ChatTemplateError, RenderedPrompt
from models.prompt.shapes import with_constant_header, with_constant_headers
from models.prompt.tokenize import Abandoned, abandoned_when
from models.prompt.tool_definitions import ToolDefinitions
from tests.models.prompt.test_template_shapes import renderer_of
from tests.support import tiny_models

CHATML = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('no such role') }}{% endif %}
{%- if message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>
{% endif %}{% endif %}"""

PLAIN = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message.role == 'user' %}[INST] {{ message.content }} [/INST]{% else %} {{ message.content }}</s>{% endif %}
{%- endfor %}"""

HEADER_TOKENS = 12
"""More than a message's header takes in this tokenizer."""

SYSTEM = {"role": "system", "content": "You are terse. " * 20}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def make_tokenizer(template: str | None = CHATML, *, trim_offsets: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges that cross white space, as big models have them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    corpus = ["You are terse. What is the weather in Paris?\n\n\nHello there: é ü 你好 \n\n user\n\n system\n"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "</s>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


class SlowTokenizer:
    """The same tokenizer with neither backend nor offsets, as one written in Python would be."""

    def __init__(self, fast: Any) -> None:
        self._fast = fast
        self.chat_template = fast.chat_template
        self.added_tokens_decoder = fast.added_tokens_decoder
        self.bos_token, self.eos_token, self.eos_token_id = None, fast.eos_token, fast.eos_token_id

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._fast.apply_chat_template(*args, **kwargs)

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return self._fast.encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture(params=["fast", "fast, untrimmed", "slow"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    fast = make_tokenizer(trim_offsets=request.param == "fast")
    return SlowTokenizer(fast) if request.param == "slow" else fast


def offset(prompt: RenderedPrompt, kind: RestorePointKind) -> int:
    """The deepest restore point of a kind; fails where there is none."""
    return max(point.offset for point in prompt.restore_points if point.kind is kind)


def kinds(prompt: RenderedPrompt) -> set[RestorePointKind]:
    return {point.kind for point in prompt.restore_points}


def shared_tokens(left: RenderedPrompt, right: RenderedPrompt) -> int:
    length = min(len(left.tokens), len(right.tokens))
    differs = np.flatnonzero(left.tokens[:length] != right.tokens[:length])
    return int(differs[0]) if len(differs) else length


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_tokens_are_those_of_the_tokenizer_itself(tokenizer: Any, tools: Any) -> None:
    messages = [SYSTEM, user("What is the weather?"), assistant("é 你好\n\n"), user("Hello")]
    prompt = ChatRenderer(tokenizer).render(messages, tools)
    expected = make_tokenizer().apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert prompt.tokens.dtype == np.int32
    assert prompt.tokens.tolist() == expected


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("text", ["Hello", "\n\nHello", "a", "abc", " there", "", "é", "<|im_end|>"])
def test_another_conversation_shares_the_end_of_tools_and_system(tokenizer: Any, text: str, tools: Any) -> None:
    renderer = ChatRenderer(tokenizer)
    first = renderer.render([SYSTEM, user("What is the weather in Paris?")], tools)
    second = renderer.render([SYSTEM, user(text)], tools)
    point = offset(first, RestorePointKind.SYSTEM_END)
    assert point == offset(second, RestorePointKind.SYSTEM_END)
    assert point <= shared_tokens(first, second)
    assert point > len(renderer.render([SYSTEM], tools).tokens) - HEADER_TOKENS


def test_what_goes_on_after_the_first_of_two_system_messages_shares_that(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer)
    rules = {"role": "system", "content": "What is the weather?"}
    first, second = renderer.render([SYSTEM, rules, user("Hello")]), renderer.render([SYSTEM, user("a"), rules])
    points = [p.offset for p in first.restore_points if p.kind is RestorePointKind.SYSTEM_END]
    shared = shared_tokens(first, second)
    assert len(points) == 2 and shared - HEADER_TOKENS < points[0] <= shared < points[1]


@pytest.mark.parametrize("text", ["Hello", "\n\nHello", "a", " there", ""])
def test_an_edited_last_message_shares_what_stands_before_it(tokenizer: Any, text: str) -> None:
    renderer = ChatRenderer(tokenizer)
    history = [SYSTEM, user("What is the weather?"), assistant("Terse.")]
    first, second = renderer.render([*history, user("a b c")]), renderer.render([*history, user(text)])
    point = offset(first, RestorePointKind.USER_START)
    assert point == offset(second, RestorePointKind.USER_START) <= shared_tokens(first, second)
    assert point > len(renderer.render(history).tokens) - HEADER_TOKENS


def test_the_next_turn_shares_the_prompt_but_for_the_generation_header(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer)
    first = renderer.render([user("Hello")], template_kwargs={"enable_thinking": False})
    turn = renderer.render([user("Hello"), assistant("there"), user("What")])
    assert offset(first, RestorePointKind.PROMPT_END) <= shared_tokens(first, turn)
    end = len(make_tokenizer().apply_chat_template([user("Hello")], return_dict=False))
    assert RestorePoint(end, RestorePointKind.PROMPT_END) in first.restore_points


def test_a_run_of_user_messages_can_be_parted_at_its_start_and_before_its_last(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer)
    history = [user("Hello"), assistant("there")]
    first = renderer.render([*history, user("time: 9:16"), user("What is it?")])
    second = renderer.render([*history, user("What is it?"), assistant("a"), user("time: 9:17"), user("You")])
    points = [p.offset for p in first.restore_points if p.kind is RestorePointKind.USER_START]
    assert len(points) == 2
    assert shared_tokens(first, second) - HEADER_TOKENS < points[0] <= shared_tokens(first, second) < points[1]


@pytest.mark.parametrize("where", ["message", "first part", "last part"])
def test_an_explicit_point_stands_at_the_end_of_what_it_marks(tokenizer: Any, where: str) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Hello there"}, {"type": "text", "text": "You are"}]
    message: dict[str, Any] = {"role": "user", "content": parts}
    {"message": message, "first part": parts[0], "last part": parts[1]}[where].update(mark)
    renderer = ChatRenderer(tokenizer)
    prompt = renderer.render([message, assistant("a"), user("b")])
    point = offset(prompt, RestorePointKind.EXPLICIT)
    text = make_tokenizer().decode(prompt.tokens[:point].tolist())
    assert text.endswith("Hello there" if where == "first part" else "Hello there\nYou are")


def test_a_mark_for_the_cache_is_not_shown_to_the_model(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer)
    marked = [{**TOOLS[0], "cache_control": {"type": "ephemeral"}}]
    assert np.array_equal(
        renderer.render([user("Hello")], marked).tokens, renderer.render([user("Hello")], TOOLS).tokens
    )


def test_a_template_that_refuses_says_why_in_its_own_words(tokenizer: Any) -> None:
    with pytest.raises(ChatTemplateError, match="no such role"):
        ChatRenderer(tokenizer).render([{"role": "wizard", "content": "x"}])


def test_a_model_without_a_template_takes_no_conversation() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatRenderer(make_tokenizer(None)).render([user("Hello")])


def test_reading_tools_is_a_property_of_the_template() -> None:
    assert ChatRenderer(make_tokenizer()).reads_tools
    assert not ChatRenderer(make_tokenizer(PLAIN)).reads_tools
    assert not ChatRenderer(make_tokenizer(None)).reads_tools


def test_plain_text_is_encoded_as_it_stands(tokenizer: Any) -> None:
    prompt = ChatRenderer(tokenizer).encode(" Hello there")
    assert make_tokenizer().decode(prompt.tokens.tolist()) == " Hello there"
    assert [(p.offset, p.kind) for p in prompt.restore_points] == [
        (len(prompt.tokens) - 1, RestorePointKind.PROMPT_END)
    ]


def test_plain_text_gets_one_first_token_and_no_last_one() -> None:
    fast = make_tokenizer()
    fast.add_special_tokens({"bos_token": "</s>"})
    bos, eos = fast.bos_token_id, fast.eos_token_id
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A <|im_end|>", special_tokens=[("</s>", bos), ("<|im_end|>", eos)]
    )
    renderer = ChatRenderer(fast)
    ids = renderer.encode("Hello").tokens.tolist()
    assert ids == renderer.encode("</s>Hello").tokens.tolist()
    assert ids.count(bos) == 1
    assert eos not in ids


def test_nothing_is_encoded_as_no_tokens(tokenizer: Any) -> None:
    prompt = ChatRenderer(tokenizer).encode("")
    assert len(prompt.tokens) == 0
    assert prompt.restore_points == ()


def test_half_a_character_that_a_template_writes_is_replaced() -> None:
    prompt = ChatRenderer(make_tokenizer(r"{{ '\ud83d' }}{{ messages[0].content }}")).render([user("a\udc00")])
    assert prompt.text == "\ufffda\ufffd"


@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("kind", ["fast", "without a border", "slow"])
def test_no_way_to_tokenize_gives_the_tokenizer_a_long_text_at_once(
    kind: str, parse_special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "SLICE_CHARACTERS", 50)
    monkeypatch.setattr(tokenize, "OVERLAP_CHARACTERS", 10)
    monkeypatch.setattr(chat_template, "SLICE_CHARACTERS", 50)
    fast, texts, text = make_tokenizer(), list[str](), "1" * 150 + "\t7" * 300 + " \n" * 100 + "words and\nmore " * 90
    expected = fast.encode(text, add_special_tokens=False)
    if kind == "without a border":
        monkeypatch.setattr(tokenize.PromptParts, "fits", lambda _: False)
    renderer = ChatRenderer(slow := SlowTokenizer(fast) if kind == "slow" else fast)
    encode = tokenize.encode

    def noted(some: str) -> str:
        texts.append(some)
        return some

    def encode_slowly(some: str, **_: bool) -> Any:
        return fast.encode(noted(some), add_special_tokens=False)

    monkeypatch.setattr(tokenize, "encode", lambda backend, some: encode(backend, noted(some)))
    if kind == "slow":
        monkeypatch.setattr(slow, "encode", encode_slowly)
    renderer.tokenize("a", add_special=True, parse_special=parse_special)
    texts.clear()
    ids = renderer.tokenize(text, add_special=True, parse_special=parse_special)
    assert fast.decode(ids) == text and abs(len(ids) - len(expected)) < 40
    assert len(texts) > 10 and max(map(len, texts)) <= 50
    texts.clear()
    with abandoned_when(lambda: len(texts) > 2), pytest.raises(Abandoned):
        renderer.tokenize(text, parse_special=parse_special)
    assert len(texts) <= 4, "whether anybody waits is asked before each part"
    if kind == "slow":
        return
    with pytest.raises(PromptTooLong):
        renderer.tokenize(text, parse_special=parse_special, max_tokens=10)


LINE = "x-anthropic-billing-header: cc_version=2.1.100.{}; cc_entrypoint=cli; cch={};"
CONSTANT = LINE.format("000", "00000")


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LINE.format("7b4", "eb6c6"), CONSTANT),
        (LINE.format("7b4", "eb6c6") + "\r\nrest", CONSTANT + "\r\nrest"),
        (
            "x-anthropic-billing-header: cch=ff;cc_version=2.1.5;",
            "x-anthropic-billing-header: cch=00000;cc_version=2.1.5;",
        ),
        ("x-anthropic-billing-header: cc_version=2.1.5.9; cc_entrypoint=sdk-cli;", None),
        ("x-anthropic-billing-header: cch=ff", None),
        ("x-anthropic-billing-header: cch=ff; and so on", None),
        ("X-Anthropic-Billing-Header: cch=ff;", None),
        (" x-anthropic-billing-header: cch=ff;", None),
        ("The first line of x-anthropic-billing-header: cch=ff;", None),
        ("Hello\n" + LINE.format("7b4", "eb6c6"), None),
        ("x-anthropic-billing-header: xcch=ff;", None),
        ("", None),
    ],
)
def test_only_the_known_shape_at_its_place_is_changed(text: str, expected: str | None) -> None:
    assert with_constant_header(text) == (text if expected is None else expected)


def test_it_is_found_as_a_text_and_as_the_first_part() -> None:
    line = LINE.format("7b4", "eb6c6")
    part: dict[str, Any] = {"text": line, "cache_control": {}}
    messages = with_constant_headers([system(line), system([part, {"text": line}])])
    assert messages == [system(CONSTANT), system([{"text": CONSTANT, "cache_control": {}}, {"text": line}])]
    assert part["text"] == line


def test_only_leading_system_messages_are_looked_at() -> None:
    line = LINE.format("7b4", "eb6c6")
    messages = [{"role": "user", "content": line}, system(line), {"role": "assistant", "content": None}]
    assert with_constant_headers(messages) == messages
    assert with_constant_headers([system([]), system(None)]) == [system([]), system(None)]


THINKING = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>
{{ (m.reasoning_content or '').strip('\\n') }}
</think>

{% endif %}{{ m.content.strip() }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
"""Shows the thought of the last message only, and no white space around a text."""

MARKERS = ReasoningFormat("<think>", "</think>")
ASKED = [SYSTEM, user("What is the weather?")]


def is_open(prompt: Any) -> bool:
    return MARKERS.is_opened_by(prompt.text, prompt.begun)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("text", ["It is", "é 你好", "It is qendx", "<|im_end|>", "It is\n\n- hot", "e"])
@pytest.mark.parametrize("template", [None, PLAIN])
def test_the_prompt_is_the_one_that_the_tokenizer_makes(text: str, template: str | None, slow: bool) -> None:
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    messages = [user("What is the weather?"), assistant(text)]
    prompt = ChatRenderer(SlowTokenizer(tokenizer) if slow else tokenizer).render(messages, continues=True)
    expected = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert prompt.text == expected
    assert prompt.tokens.tolist() == tokenizer.encode(expected, add_special_tokens=False)
    assert prompt.begun.endswith(text)


def test_parts_are_joined_and_an_empty_text_is_the_header_alone() -> None:
    renderer = ChatRenderer(make_tokenizer())
    parts = {"role": "assistant", "content": [{"text": "It"}, {"text": "is"}]}
    assert renderer.render([*ASKED, parts], continues=True).text.endswith("<|im_start|>assistant\nIt\nis")
    empty = renderer.render([*ASKED, {"role": "assistant", "content": None}], continues=True)
    assert (empty.text, empty.begun) == (renderer.render(ASKED).text, "")


def test_a_reply_joined_to_what_it_continues_keeps_its_tokens() -> None:
    tokenizer = tiny_models.tokenizer()
    renderer = ChatRenderer(tokenizer)
    prompt = renderer.render([user("hello"), assistant("in ")], continues=True)
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert tokenizer.encode("the", add_special_tokens=False) != ids
    renderer.remember_reply(prompt, "the", ids)
    following = renderer.render([user("hello"), assistant("in the"), user("what")]).tokens.tolist()
    assert following[: len(prompt.tokens) + 3] == [*prompt.tokens.tolist(), *ids]


def test_a_thought_is_open_where_it_is_continued_and_over_where_an_answer_is() -> None:
    renderer = ChatRenderer(make_tokenizer(THINKING))
    thinks = {"role": "assistant", "content": "", "reasoning_content": "The user"}
    thought = renderer.render([*ASKED, thinks], continues=True)
    assert thought.text.endswith("<think>\nThe user") and is_open(thought)
    answer = renderer.render([*ASKED, {**thinks, "content": "It"}], continues=True)
    assert answer.text.endswith("<think>\nThe user\n</think>\n\nIt") and not is_open(answer)
    said = ChatRenderer(make_tokenizer()).render([user("<think>"), assistant("<think>\nSo")], continues=True)
    assert is_open(said)
    assert not is_open(ChatRenderer(make_tokenizer()).render([user("<think>"), assistant("So")], continues=True))


@pytest.mark.parametrize("shown", ["", "{{ m.content | upper }}", "{{ m.content }} {{ m.content }}"])
def test_a_message_that_is_not_shown_as_it_is_cannot_be_continued(shown: str) -> None:
    template = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        ChatRenderer(make_tokenizer(template)).render([user("a"), assistant("b")], continues=True)


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


BY_NAME = {name: tool(name) for name in ("find_it", "keep_it", "qfirst_it")}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_tool_has_the_form_of_one_at_the_head(family: str) -> None:
    renderer = renderer_of(FAMILIES[family])
    head = renderer.render([ASK], list(BY_NAME.values())).text
    block = renderer.definitions.block(["find_it", "keep_it"], BY_NAME, "place")
    first, *written, last = block.splitlines()
    assert (first, last) == ("<functions>", "</functions>")
    whole = "\n".join(written)
    start = whole.index("keep_it")
    assert "find_it" in whole[:start] and "find_it" not in whole[start:]
    if family == "counting":
        assert (
            json.loads(written[0].removeprefix("<function>").removesuffix("</function>"))
            == BY_NAME["find_it"]["function"]
        )
        return
    alone = renderer.definitions.block(["find_it"], BY_NAME, "elsewhere").splitlines()[1:-1]
    definition = "\n".join(alone)
    assert definition in head and whole.startswith(definition)
    for words in ("find_it", "city"):
        assert words in definition


def test_several_places_where_a_definition_could_begin_are_told_apart() -> None:
    renderer = renderer_of(FAMILIES["qwen coder"])
    block = renderer.definitions.block(["find_it"], BY_NAME, "place")
    assert block.startswith("<functions>\n<function>\n<name>find_it</name>") and block.endswith(
        "</function>\n</functions>"
    )


def test_a_conversation_keeps_the_wording_that_it_saw_first() -> None:
    definitions = ToolDefinitions(lambda tools: "".join(f"{json.dumps(one)}\n" for one in tools))
    first = definitions.block(["find_it"], BY_NAME, "one")
    reworded = {"find_it": tool("find_it") | {"function": {"name": "find_it", "description": "Other words."}}}
    assert definitions.block(["find_it"], reworded, "one") == definitions.block(["find_it"], {}, "one") == first
    assert "Other words." in definitions.block(["find_it"], reworded, "two")


def test_a_tool_that_is_gone_is_said_to_be_until_it_comes_back() -> None:
    definitions = ToolDefinitions(lambda tools: "".join(f"{json.dumps(one)}\n" for one in tools))
    names = ["find_it", "lost_it"]
    partly = definitions.block(names, BY_NAME, "one")
    assert "where find_it looks" in partly and partly.endswith("</functions>\nlost_it is no longer available.")
    assert definitions.block(["lost_it"], BY_NAME, "one") == "lost_it is no longer available."
    back = definitions.block(names, {**BY_NAME, "lost_it": tool("lost_it")}, "one")
    assert "where lost_it looks" in back and "no longer" not in back


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.prompt.tool_definitions.MAX_KEPT_CHARACTERS", 1000)
    definitions = ToolDefinitions(lambda tools: "".join(f"{json.dumps(one)}\n" for one in tools))
    first = definitions.block(["find_it"], BY_NAME, 0)
    for place in range(1, 20):
        definitions.block(["find_it"], BY_NAME, place)
    assert definitions.block(["find_it"], {}, 19) == first
    assert definitions.block(["find_it"], {}, 0) == "find_it is no longer available."
