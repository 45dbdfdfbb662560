"""A rendered prompt equals the tokenizer's own, and its restore points hold for every other continuation."""

import importlib
import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cache.layers import guard_mlx_lm
from cache.snapshots import RestorePoint, RestorePointKind
from models.errors import PromptTooLong
from models.prompt import chat_template, tokenize
from models.prompt.chat_template import ChatRenderer, ChatTemplateError, RenderedPrompt
from models.prompt.tokenize import Abandoned, abandoned_when
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


def test_another_conversation_can_also_part_after_the_header_of_its_first_message(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer)
    first, second = (renderer.render([SYSTEM, user(text)]) for text in ("What is the weather?", "Hello"))
    point = offset(first, RestorePointKind.BRANCH)
    assert point == offset(second, RestorePointKind.BRANCH) == shared_tokens(first, second)
    assert point > offset(first, RestorePointKind.SYSTEM_END)


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


def test_the_next_turn_shares_the_header_of_an_answer_whose_thought_it_drops() -> None:
    fast = make_tokenizer()
    fast.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    renderer = ChatRenderer(fast)
    first = renderer.render([user("Hello")], template_kwargs={"enable_thinking": False})
    turn = renderer.render([user("Hello"), assistant("there"), user("What")])
    assert offset(first, RestorePointKind.PROMPT_END) == shared_tokens(first, turn)
    plain = renderer.render([user("Hello")])
    assert offset(plain, RestorePointKind.PROMPT_END) < len(plain.tokens) - 1


def test_a_run_of_user_messages_can_be_parted_at_its_start_and_before_its_last(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer)
    history = [user("Hello"), assistant("there")]
    first = renderer.render([*history, user("time: 9:16"), user("What is it?")])
    second = renderer.render([*history, user("What is it?"), assistant("a"), user("time: 9:17"), user("You")])
    points = [p.offset for p in first.restore_points if p.kind is RestorePointKind.USER_START]
    assert len(points) == 2
    assert shared_tokens(first, second) - HEADER_TOKENS < points[0] <= shared_tokens(first, second) < points[1]


def test_without_system_and_tools_there_is_no_system_end(tokenizer: Any) -> None:
    assert RestorePointKind.SYSTEM_END not in kinds(ChatRenderer(tokenizer).render([user("Hello")]))


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


def test_the_template_reads_the_arguments_of_the_request(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer)
    plain = renderer.render([user("Hello")])
    quick = renderer.render([user("Hello")], template_kwargs={"enable_thinking": False})
    assert len(quick.tokens) > len(plain.tokens)


def test_a_template_that_refuses_says_why_in_its_own_words(tokenizer: Any) -> None:
    with pytest.raises(ChatTemplateError, match="no such role"):
        ChatRenderer(tokenizer).render([{"role": "wizard", "content": "x"}])


def test_a_model_without_a_template_takes_no_conversation() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatRenderer(make_tokenizer(None)).render([user("Hello")])


def test_a_template_that_refuses_the_changed_conversation_costs_only_the_point() -> None:
    renderer = ChatRenderer(make_tokenizer(PLAIN))
    with pytest.raises(ChatTemplateError, match="alternate"):
        renderer.render([assistant("there"), user("Hello")])
    prompt = renderer.render([user("Hello"), assistant("there"), user("What")])
    assert kinds(prompt) == {RestorePointKind.USER_START, RestorePointKind.PROMPT_END}


def test_a_template_without_added_tokens_still_has_points_that_hold() -> None:
    renderer = ChatRenderer(make_tokenizer(PLAIN))
    history = [user("Hello " * 30), assistant("there")]
    first, second = renderer.render([*history, user("What")]), renderer.render([*history, user("\n\nYou")])
    assert 0 < offset(first, RestorePointKind.USER_START) <= shared_tokens(first, second)


def test_reading_tools_is_a_property_of_the_template() -> None:
    assert ChatRenderer(make_tokenizer()).reads_tools
    assert not ChatRenderer(make_tokenizer(PLAIN)).reads_tools
    assert not ChatRenderer(make_tokenizer(None)).reads_tools


def test_a_file_that_asks_for_truncation_does_not_cut_prompts() -> None:
    fast = make_tokenizer()
    fast.backend_tokenizer.enable_truncation(4)
    assert len(ChatRenderer(fast).encode("Hello there " * 9).tokens) > 4


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


def test_the_wrapper_of_mlx_lm_renders_the_same() -> None:
    guard_mlx_lm()
    tokenizer_utils = importlib.import_module("mlx_lm.tokenizer_utils")
    wrapped = tokenizer_utils.TokenizerWrapper(make_tokenizer())
    messages = [SYSTEM, user(json.dumps({"a": 1}))]
    ours = ChatRenderer(wrapped).render(messages)
    assert ours.tokens.tolist() == wrapped.apply_chat_template(messages, add_generation_prompt=True)
    assert RestorePointKind.SYSTEM_END in kinds(ours)


def test_a_reply_sent_back_keeps_the_tokens_it_was_generated_with() -> None:
    tokenizer = tiny_models.tokenizer()
    renderer = ChatRenderer(tokenizer)
    conversation: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    prompt = renderer.render(conversation)
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert tokenizer.encode("the", add_special_tokens=False) != ids
    renderer.remember_reply(prompt, "the", ids)
    following = renderer.render(
        [*conversation, {"role": "assistant", "content": "the"}, {"role": "user", "content": "x"}]
    )
    known = len(prompt.tokens) + len(ids)
    assert following.tokens[:known].tolist() == [*prompt.tokens.tolist(), *ids]


def test_half_a_character_that_a_template_writes_is_replaced() -> None:
    prompt = ChatRenderer(make_tokenizer(r"{{ '\ud83d' }}{{ messages[0].content }}")).render([user("a\udc00")])
    assert prompt.text == "\ufffda\ufffd"


def test_added_tokens_that_strip_white_space_are_cut_as_the_tokenizer_cuts_them() -> None:
    tokenizer = make_tokenizer()
    stripping = [AddedToken(text, special=True, rstrip=True, normalized=False) for text in ("<|user|>", "<|end|>")]
    tokenizer.add_tokens(stripping, special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}<|user|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
    rendered = ChatRenderer(tokenizer).render([user(" some words\n"), user("\n more")])
    assert rendered.tokens.tolist() == tokenizer.encode(rendered.text, add_special_tokens=False)


def test_a_reply_changes_no_other_conversation() -> None:
    tokenizer = tiny_models.tokenizer()
    renderer = ChatRenderer(tokenizer)
    prompt = renderer.render([user("hello")])
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    marks = [tokenizer.convert_tokens_to_ids(mark) for mark in ("<think>", "</think>")]
    renderer.remember_reply(prompt, "<think>the</think>the", [marks[0], *spelled, marks[1], *spelled])
    for text in ("see <think>the</think>", "</think>the"):
        other = renderer.render([user(text)])
        assert other.tokens.tolist() == tokenizer.encode(other.text, add_special_tokens=False)


def test_a_text_of_any_length_is_tokenized_with_and_without_its_frame() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", tokenizer.convert_tokens_to_ids("</s>"))]
    )
    renderer, text = ChatRenderer(tokenizer, max_tokens=5), "<|im_start|>user\nWhat is the weather in Paris?"
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert renderer.tokenize(text) == plain and len(plain) > 5
    assert renderer.tokenize(text, add_special=True) == [tokenizer.convert_tokens_to_ids("</s>"), *plain]


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


def test_names_of_special_tokens_can_be_tokenized_as_text(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer)
    [marker] = renderer.tokenize("<|im_start|>")
    if isinstance(tokenizer, SlowTokenizer):
        return
    spelled = renderer.tokenize("<|im_start|>", parse_special=False)
    assert marker not in spelled and tokenizer.decode(spelled) == "<|im_start|>"
    assert renderer.tokenize("<|im_start|>") == [marker]
