"""Tokens as text, streamed or in lists; markers and stop strings in it, and where a thought begins and ends."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models.output.call_formats import GLM
from models.output.call_reader import CallWatch
from models.output.detokenizer import MAX_KEPT, Detokenizer, StreamDecoder, token_search
from models.output.pieces import (
    KNOWN_MARKERS,
    MarkerSearch,
    OutputParser,
    Piece,
    Reasoning,
    ReasoningFormat,
    ReasoningParser,
    ReasoningWatch,
    Text,
    Thinking,
    find_reasoning_format,
)
from tests.support import tiny_models

TEXTS = st.text(st.sampled_from("aé 中🙂\n<x"), max_size=30)


@functools.cache
def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Llama-2-like: a mark for the space, bytes for what has no token, and a decoder that drops the first space."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["<unk>", "<s>", *byte_tokens, "\u2581", "a", "x", "<", "\u2581a", "\n"]
    backend = Tokenizer(
        models.BPE(
            vocab={letter: i for i, letter in enumerate(letters)},
            merges=[("\u2581", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


@functools.cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece: whether a token brings a space depends on the token before it."""
    words = ["[UNK]", "hello", "world", "##s", "!", "[SEP]"]
    backend = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, sep_token="[SEP]")


def stream(decoder: StreamDecoder, token_ids: list[int]) -> list[str]:
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.finish()]


@given(TEXTS)
def test_byte_level_pieces_are_the_text_in_whole_characters(text: str) -> None:
    tokenizer = tiny_models.tokenizer()
    pieces = stream(StreamDecoder(Detokenizer(tokenizer)), tokenizer.encode(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=20))
def test_any_bytes_become_what_the_tokenizer_makes_of_them_as_a_whole(token_ids: list[int]) -> None:
    tokenizer = tiny_models.tokenizer()
    assert "".join(stream(StreamDecoder(Detokenizer(tokenizer)), token_ids)) == tokenizer.decode(token_ids)


@given(TEXTS)
def test_sentencepiece_keeps_the_leading_space_that_its_decoder_drops(text: str) -> None:
    tokenizer = sentencepiece_tokenizer()
    pieces = stream(StreamDecoder(Detokenizer(tokenizer)), tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_a_tokenizer_that_must_be_asked_gives_the_same_text_token_by_token(token_ids: list[int]) -> None:
    tokenizer = word_tokenizer()
    assert "".join(stream(StreamDecoder(Detokenizer(tokenizer)), token_ids)) == tokenizer.decode(token_ids)


def test_special_tokens_are_silent_and_markers_are_not() -> None:
    tokenizer = tiny_models.tokenizer()
    token_ids = tokenizer.encode("<think>a</think> b<|im_end|><tool_call>")
    assert "".join(stream(StreamDecoder(Detokenizer(tokenizer)), token_ids)) == "<think>a</think> b<tool_call>"
    visible = Detokenizer(tokenizer, ["<|im_start|>"])
    assert "".join(stream(StreamDecoder(visible), tokenizer.encode("<|im_start|>a<|im_end|>"))) == "<|im_start|>a"


def test_an_end_token_is_silent_even_if_it_is_not_special_or_called_visible() -> None:
    tokenizer = tiny_models.tokenizer()
    end = tokenizer.convert_tokens_to_ids("</think>")
    detokenizer = Detokenizer(tokenizer, ["</think>"], eos_token_ids=[end])
    assert "".join(stream(StreamDecoder(detokenizer), [end, *tokenizer.encode("a")])) == "a"


PIECES = [b"a", b"\n", b" b\n\n", b'"', b"", b"\xc3", "é:".encode()]


def test_tokens_are_found_by_what_they_hold() -> None:
    asked: list[int] = []

    def piece(token_id: int) -> bytes:
        asked.append(token_id)
        return PIECES[token_id]

    containing = token_search(piece, len(PIECES))
    assert [containing(text) for text in ("\n", "\n\n", "é", ":", '"', "x")] == [
        *((1, 2), (2,), (6,), (6,), (3,), ())
    ]
    assert containing("\n") == (1, 2)
    assert asked == list(range(len(PIECES)))


def test_what_is_kept_of_searches_is_bounded() -> None:
    containing = token_search(lambda token_id: b"%d" % token_id, 1000)
    for number in range(3 * MAX_KEPT):
        assert number in containing(str(number))
    assert containing.cache_info().currsize == MAX_KEPT  # type: ignore[attr-defined]


@pytest.mark.parametrize("tokenizer", [tiny_models.tokenizer(), sentencepiece_tokenizer(), word_tokenizer()])
def test_an_id_beyond_the_tokenizers_has_no_text(tokenizer: Any) -> None:
    texts = Detokenizer(tokenizer)
    assert (texts.piece(10_000_000), texts.text([10_000_000])) == (b"", "")


def run_matcher(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = MarkerSearch(stops)
    emitted = ""
    for piece in pieces:
        text, stop, _ = matcher.push(piece)
        emitted += text
        if stop is not None:
            return emitted, stop
    return emitted + matcher.flush(), None


def find_whole(stops: list[str], text: str) -> tuple[str, str | None]:
    """The same by looking at all of the text: the stop that ends first, the longer of two that end together."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


STOPS = st.lists(st.text("ab", min_size=1, max_size=3) | st.text("ab", min_size=1, max_size=6), max_size=4)


@settings(max_examples=500, deadline=None)
@example(["b", "ab"], ["a", "b"])
@example(["abab", "ba"], ["aba", "b"])
@given(STOPS, st.lists(st.text("abc", max_size=5), max_size=8))
def test_any_cut_of_a_text_gives_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    assert run_matcher(stops, pieces) == find_whole(stops, "".join(pieces))


@given(STOPS, st.text("abc", max_size=12))
def test_no_more_is_held_back_than_could_begin_a_stop(stops: list[str], text: str) -> None:
    matcher = MarkerSearch(stops)
    emitted, stop, _ = matcher.push(text)
    if stop is None:
        held = text[len(emitted) :]
        assert not held or any(other.startswith(held) for other in stops)


CALL_FORMAT = replace(GLM, open="<call>", close="</call>")
TOOLS = [{"function": {"name": name}} for name in ("f", "g")]
THINKS = ReasoningFormat("<think>", "</think>")


def complete_at(text: str, size: int, *, thinks: bool = False, is_open: bool = False) -> int | None:
    """Returns how many characters were read when a call was complete, told in pieces; None if none was."""
    thoughts = ReasoningWatch(Thinking(THINKS, is_open)) if thinks else None
    watch = CallWatch(CALL_FORMAT, TOOLS)
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        watch.accept(piece if thoughts is None else thoughts.accept(piece))
        if watch.is_complete:
            return start + len(piece)
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_a_call_is_complete_with_its_end_marker(size: int) -> None:
    call = "Let me see.</call> <call>f<arg_key>a</arg_key><arg_value>no </call> yet</arg_value></call>"
    found = complete_at(f"{call}\n<call>g</call>", size)
    assert found is not None and len(call) <= found < len(call) + size
    assert complete_at(call[:-1], size) is None
    assert complete_at("no call at all </call></call> <call>h</call>", size) is None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_call_in_a_thought_is_none(size: int, is_open: bool) -> None:
    thought = f"{'' if is_open else '<think>'}I could say <call>f</call>.</think>"
    assert complete_at(thought, size, thinks=True, is_open=is_open) is None
    found = complete_at(f"{thought}<call>f</call>.......", size, thinks=True, is_open=is_open)
    assert found is not None and len(thought) + 14 <= found < len(thought) + 14 + size


THINK = ReasoningFormat("<think>", "</think>", closing_ids=(90, 91))

CASES = [
    ("Hello.", False, "", "Hello."),
    ("", False, "", ""),
    ("", True, "", ""),
    (" \n ", False, "", " \n "),
    ("<think>\nHm, so.\n</think>\n\nHello.\n", False, "Hm, so.", "Hello.\n"),
    ("\n<think>a</think>b", False, "a", "b"),
    ("Hm.\n\nSo.\n</think>\n\n  Hello.", True, "Hm.\n\nSo.", "Hello."),
    ("\n\n</think>\n\nHello.", True, "", "Hello."),
    ("Hm, so", True, "Hm, so", "Hm, so"),
    ("Hm, so \n", True, "Hm, so \n", "Hm, so"),
    ("a </thin b", True, "a </thin b", "a </thin b"),
    ("a </thin", True, "a </thin", "a </thin"),
    ("<think>never closed", False, "never closed", "never closed"),
    ("<thin", False, "", "<thin"),
    ("say <think>no</think>", False, "", "say <think>no</think>"),
    ("say </think>", False, "", "say </think>"),
    ("a</think>b <think>c</think>", True, "a", "b <think>c</think>"),
    ("<think>a <think> b</think>c", False, "a <think> b", "c"),
]


def run(texts: Sequence[str], *, is_open: bool, thought: ReasoningFormat = THINK) -> tuple[str, str]:
    """All that was thought, and all that was said behind it."""
    parser = ReasoningParser(thought, OutputParser(), OutputParser(), is_open=is_open)
    pieces: list[Piece] = [piece for text in texts for piece in parser.feed(text)]
    pieces += parser.finish(is_complete=True)
    said = [piece for piece in pieces if isinstance(piece, Text)]
    thoughts = [piece for piece in pieces if isinstance(piece, Reasoning)]
    assert pieces == [*thoughts, *said]
    assert all(piece.text for piece in said) and all(piece.text for piece in thoughts)
    return "".join(piece.text for piece in thoughts), "".join(piece.text for piece in said)


@pytest.mark.parametrize(("text", "is_open", "thought", "answer"), CASES)
def test_a_thought_is_told_from_the_answer_at_every_cut(text: str, is_open: bool, thought: str, answer: str) -> None:
    assert run(list(text), is_open=is_open) == (thought, answer)
    for cut in range(len(text) + 1):
        assert run([text[:cut], text[cut:]], is_open=is_open) == (thought, answer)


@given(st.text(alphabet="<think>/ \na", max_size=40), st.booleans(), st.lists(st.integers(0, 40)))
def test_cuts_change_nothing_and_no_letter_is_lost(text: str, is_open: bool, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    thought, answer = run([text[start:stop] for start, stop in itertools.pairwise(edges)], is_open=is_open)
    assert (thought, answer) == run([text], is_open=is_open)
    if thought.rstrip() == answer and "</think>" not in text:
        answer = ""  # a thought that never closes is the answer too
    rest = iter(text)
    assert all(letter in rest for letter in thought + answer), "the pieces are not in the text, in order"
    num_lost = len("".join(text.split())) - len("".join((thought + answer).split()))
    assert num_lost in (0, len("<think>"), len("</think>"), len("<think></think>"))


@pytest.mark.parametrize(("start", "end"), KNOWN_MARKERS)
def test_every_known_pair_of_markers_is_found_by_tokens_and_by_template(start: str, end: str) -> None:
    vocabulary = {"<|channel>" if start.startswith("<|channel>") else start, end}
    for found in (find_reasoning_format(vocabulary, ""), find_reasoning_format(set(), f"... {end} ...")):
        assert found is not None
        assert (found.start, found.end) == (start, end)
        assert run([f"{start}\na\n{end}b"], is_open=False, thought=found) == ("a", "b")
    assert find_reasoning_format({start}, "") is None


@pytest.mark.parametrize(
    ("prompt", "is_open"), [("a<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_a_prompt_opens_the_thought_with_its_end(prompt: str, is_open: bool) -> None:
    assert THINK.is_opened_by(prompt) is is_open


def watch(
    tokens: Sequence[str], *, is_open: bool = False, limit: int | None = None, thought: ReasoningFormat = THINK
) -> tuple[int, list[int]]:
    """The tokens counted, and those that were forced; each token is its text."""
    watched, forced = ReasoningWatch(Thinking(thought, is_open, limit)), list[int]()
    for text in tokens:
        closing = watched.forced()[:1]
        forced += closing
        watched.accept(text)
    watched.finish()
    return watched.num_tokens, forced


@pytest.mark.parametrize(
    ("tokens", "is_open", "count"),
    [
        (["<think>", "\n", "a", "b", "</think>", "c"], False, 3),
        (["a", "b", "</think>", "c", "</think>"], True, 2),
        (["a", "", "b"], True, 3),
        (["say", "<think>", "a"], False, 0),
        (["a", "</", "think", ">", "b"], True, 1),
        (["a", "</", "think", "ing", "b"], True, 5),
        (["a", "</", "x</", "think>", "b"], True, 2),
        (["a", "</", "think"], True, 3),
        (["<", "think", ">", "a", "</think>"], False, 1),
    ],
)
def test_the_tokens_of_a_thought_are_counted(tokens: list[str], is_open: bool, count: int) -> None:
    assert watch(tokens, is_open=is_open) == (count, [])


@pytest.mark.parametrize(
    ("tokens", "is_open", "limit", "expected"),
    [
        (list("abcdefg"), True, 3, (3, [90, 91])),
        (list("abcdefg"), True, 0, (0, [90, 91])),
        (["<think>", *"abcdefg"], False, 2, (2, [90, 91])),
        (list("abcdefg"), False, 2, (0, [])),
        (["a", "b", "</think>", "c", "d"], True, 3, (2, [])),
        (["a", "b", "</think>", "c", "d"], True, 2, (2, [90, 91])),
        (["a", "<", "<", "c", "d"], True, 2, (2, [90, 91])),
    ],
)
def test_a_thought_is_closed_at_its_limit(
    tokens: list[str], is_open: bool, limit: int, expected: tuple[int, list[int]]
) -> None:
    assert watch(tokens, is_open=is_open, limit=limit) == expected
