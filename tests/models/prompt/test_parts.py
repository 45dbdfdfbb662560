"""Piecewise tokenization equals whole tokenization, costs only new text, and keeps generated ids where they were."""

import contextlib
import string
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from models.errors import PromptTooLong, TokenizerFailed
from models.prompt import chat_template, tokenize
from models.prompt.tokenize import PromptParts, encode
from tests.support import tiny_models, tiny_tokenizers
from tests.support.tiny_tokenizers import Flags

BACKEND: Any = tiny_models.tokenizer().backend_tokenizer
TOKENS: Any = tiny_models.tokenizer().added_tokens_decoder
ADDED = {str(token): number for number, token in TOKENS.items()}
TURN = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"


class Counting:
    """A backend that counts the characters it is asked to tokenize."""

    def __init__(self) -> None:
        self.num_characters = 0

    def encode_batch(self, texts: list[str], **options: bool) -> Any:
        """Passes the texts on."""
        self.num_characters += sum(map(len, texts))
        return BACKEND.encode_batch(texts, **options)

    def get_vocab(self, **options: bool) -> Any:
        """Passes the question on."""
        return BACKEND.get_vocab(**options)


def whole(text: str, backend: Any = BACKEND) -> list[int]:
    """Returns the ids that the tokenizer gives the whole text."""
    ids: Sequence[int] = encode(backend, text).ids
    return list(ids)


def whole_of(texts: Sequence[str], backend: Any) -> Iterator[tuple[str, list[int]]]:
    """Yields texts and their ids, but for those that the library gives up on."""
    for text in texts:
        with contextlib.suppress(TokenizerFailed):
            yield text, whole(text, backend)


def spelled(text: str, backend: Any = BACKEND) -> list[int]:
    """Returns the ids of a text's letters one by one: not what the tokenizer would say."""
    return [number for letter in text for number in whole(letter, backend)]


def pieces() -> PromptParts:
    """Returns pieces of the tiny models' tokenizer."""
    return PromptParts(BACKEND, TOKENS)


def shared_backend(shape: str, added: Mapping[str, Flags]) -> Any:
    """Returns a tokenizer with the given tokens added, the same one each time."""
    return _built(shape, tuple(added.items()))


@cache
def _built(shape: str, added: tuple[tuple[str, Flags], ...]) -> Any:
    return tiny_tokenizers.tokenizer(shape, dict(added))


def reply_to(tokenizer: PromptParts, prompt: str, reply: str, ids: Sequence[int], namespace: str = "") -> list[int]:
    """Has a reply remembered; returns the ids of its prompt."""
    tokenized = tokenizer.tokenize(prompt, namespace)
    tokenizer.remember_reply(tokenized.tail, reply, ids)
    return [int(number) for number in tokenized.ids]


# ------------------------------------------------------------------------------------ tokenizers of several shapes

CONTENTS = (
    *("<a>", "<a>b", "b<a", "<|x|>", "[X", "X]", "\n\n", " <s>", "<s> ", "aa", "a b"),
    *("\u2581\u2581", "e\u0301>"),
)
"""Texts of added tokens: prefixes of one another, overlapping, words, white space at either edge."""
ALPHABET = [*"<>absxX|[] \n\u2581e\u0301\x1c\x85日"]

FLAGS = st.builds(Flags, *[st.booleans()] * 5)
TEXTS = st.lists(st.one_of(st.sampled_from(CONTENTS), st.sampled_from(ALPHABET)), max_size=14).map("".join)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(tiny_tokenizers.SHAPES)),
    st.dictionaries(st.sampled_from(CONTENTS), FLAGS, min_size=1, max_size=5),
    st.lists(TEXTS, min_size=1, max_size=6),
)
@example("bytes", {"<|x|>": Flags(special=True), "<a>": Flags(special=True, rstrip=True)}, ["<|x|>a<a> \n b"])
@example("bytes", {"<a>": Flags(special=True, lstrip=True), "aa": Flags(single_word=True)}, ["a aa <a> aa<a>"])
@example("bytes", {"<a>": Flags(special=True, rstrip=True), "\n\n": Flags(special=True)}, ["<a> \n\n\n\n a"])
@example("bytes", {"<a>": Flags(special=True, lstrip=True), "\n\n": Flags()}, ["b\n\n<a>b"])
@example("bytes", {"<a>": Flags(special=True), "<a>b": Flags()}, ["<a>a<a>b"])
@example("bytes", {"<a>": Flags(special=True), "b<a": Flags(), "<|x|>": Flags(special=True)}, ["ab<a>a<|x|>"])
@example(
    "bytes", {"<a>": Flags(), "<a>b": Flags(special=True), "a b": Flags(special=True, single_word=True)}, ["a b日"]
)
@example("composed", {"<a>": Flags(lstrip=True), "<a>b": Flags(lstrip=True, rstrip=True)}, ["><a>bb|be[X"])
def test_piecewise_is_whole_for_every_kind_of_added_token(
    shape: str, added: dict[str, Flags], texts: list[str]
) -> None:
    backend = tiny_tokenizers.tokenizer(shape, added)
    tokenizer = PromptParts(backend, backend.get_added_tokens_decoder())
    if tokenizer.fits():
        for text, ids in whole_of(texts, backend):
            assert tokenizer.tokenize(text).ids.tolist() == ids


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(tiny_tokenizers.SHAPES)),
    st.dictionaries(st.sampled_from(CONTENTS), FLAGS, min_size=1, max_size=4),
    TEXTS,
    TEXTS,
    st.lists(TEXTS, max_size=6),
)
@example(
    "bytes", {"<a>": Flags(special=True)}, "b<a>x", "ab<a>ab", ["<a>ab<a>", "b<a>xab", "b<a>xab<a>aba", "a<a>xab"]
)
def test_a_reply_changes_no_text_but_itself_in_its_place(
    shape: str, added: dict[str, Flags], prompt: str, reply: str, texts: list[str]
) -> None:
    backend = tiny_tokenizers.tokenizer(shape, added)
    tokenizer = PromptParts(backend, backend.get_added_tokens_decoder())
    if not tokenizer.fits():
        return
    ids = [number for part in _at_added(reply, added) for number in _odd_ids(part, added, backend)]
    reply_to(tokenizer, prompt, reply, ids)
    others = [*texts, *(reply + text for text in texts), *(prompt + text for text in texts), reply]
    for text, expected in whole_of(others, backend):
        if not text.startswith(prompt + reply[:1]) or not reply:
            assert tokenizer.tokenize(text).ids.tolist() == expected


def _at_added(text: str, added: dict[str, Flags]) -> list[str]:
    for content in sorted(added, key=len, reverse=True):
        if content in text:
            before, _, after = text.partition(content)
            return [*_at_added(before, added), content, *_at_added(after, added)]
    return [text] if text else []


def _odd_ids(part: str, added: dict[str, Flags], backend: Any) -> list[int]:
    return whole(part, backend) if part in added else spelled(part, backend)


@pytest.mark.parametrize("shape", sorted(tiny_tokenizers.SHAPES))
def test_the_shapes_are_tokenized_piecewise(shape: str) -> None:
    """What the properties above say holds for something: none of the usual shapes is given up."""
    backend = tiny_tokenizers.tokenizer(
        shape, {"<|x|>": Flags(special=True), "<a>": Flags(special=True, rstrip=True)}
    )
    assert PromptParts(backend, backend.get_added_tokens_decoder()).fits()


# --------------------------------------------------------------------------------------------------- long texts


@example("metaspace_always", "<<<<<<<<<<<ab<<<<<<<<<<<<")  # slices of 24 characters that share no two tokens
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(tiny_tokenizers.SHAPES)), st.lists(st.sampled_from(ALPHABET), max_size=60).map("".join))
def test_a_long_text_in_parts_is_the_whole_where_its_slices_agree(shape: str, text: str) -> None:
    backend, joint, agreed = shared_backend(shape, {"<|x|>": Flags(special=True)}), tokenize._joint, list[bool]()

    def noted(rows: Any, following: Any, place: int) -> tuple[int, int]:
        found = joint(rows, following, place)
        agreed.append(found != (place, 0))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "SLICE_CHARACTERS", 24)
        patch.setattr(tokenize, "OVERLAP_CHARACTERS", 12)
        patch.setattr(tokenize, "_joint", noted)
        tokenizer = PromptParts(backend, backend.get_added_tokens_decoder())
        for opening in ("", "<|x|>"):
            agreed.clear()
            tokenized = tokenizer.tokenize(opening + text)
            if all(agreed):
                assert tokenized.ids.tolist() == whole(opening + text, backend)
            assert all(a <= b for a, b in zip(tokenized.ends, tokenized.ends[1:], strict=False))


def across(*tokens: str) -> Any:
    """Returns a tokenizer without words, that has such tokens besides letters."""
    letters = [*string.ascii_letters, *string.punctuation, *"1 \n\u0436é日語"]
    scores = [("<unk>", 0.0), *((letter, -5.0) for letter in letters), *((token, -6.0) for token in tokens)]
    return Tokenizer(models.Unigram(scores, unk_id=0))


def changed(normalizer: Any) -> Any:
    """Returns a tokenizer of bytes that first changes a text."""
    backend: Any = tiny_tokenizers.tokenizer("bytes", {})
    backend.normalizer = normalizer
    return backend


def marking() -> Any:
    """Returns a tokenizer whose words begin at punctuation, and that marks the first behind an added token."""
    backend: Any = tiny_tokenizers.tokenizer("metaspace_always", {})
    words = [pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.Punctuation()]
    backend.pre_tokenizer = pre_tokenizers.Sequence(words)
    return backend


@pytest.mark.parametrize(
    ("backend", "sample"),
    [
        (across("\n\u0436"), "\u0436\n\u0436"),
        (across("b c"), "ab cd"),
        (across("\n<cd"), "x\n<cd"),
        (changed(normalizers.Strip()), "one two\nthree\n<b>\n"),
        (changed(normalizers.Replace("q ", "_")), "q r"),
        (marking(), "a.b;"),
    ],
    ids=["line", "space", "bracket", "stripped", "replaced", "marked"],
)
def test_no_text_is_cut_where_the_tokenizer_would_notice(
    backend: Any, sample: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "SLICE_CHARACTERS", 40)
    monkeypatch.setattr(tokenize, "OVERLAP_CHARACTERS", 10)
    backend.add_special_tokens(["<|x|>"])
    tokenizer = PromptParts(backend, backend.get_added_tokens_decoder())
    assert tokenizer.tokenize(sample * 50).ids.tolist() == whole(sample * 50, backend)


@pytest.mark.parametrize(
    "sample",
    [
        "some words and\nmore ",
        "<table><tr><td>one</td></tr></table>\n",
        '{"a":1,"bc":[2,33,"d e"]}',
        "QUJD+REVGR0hJ/SktMTU5P",
        "<|inner|>x<|in|>",
        "1",
    ],
    ids=["words", "markup", "json", "base64", "added", "digit"],
)
@pytest.mark.parametrize("shape", sorted(tiny_tokenizers.SHAPES))
def test_a_long_text_is_tokenized_in_slices(shape: str, sample: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slice is short, so that nothing else stands still for long, and together they are the whole."""
    backend = shared_backend(shape, {"<|x|>": Flags(special=True), "<|inner|>": Flags()})
    monkeypatch.setattr(tokenize, "SLICE_CHARACTERS", 100)
    monkeypatch.setattr(tokenize, "OVERLAP_CHARACTERS", 20)
    monkeypatch.setattr(tokenize, "encode", counted_in(lengths := list[int]()))
    text = sample * 50
    assert PromptParts(backend, {}, at_borders=False).tokenize(text).ids.tolist() == whole(text, backend)
    assert len(lengths) <= 1 + 2 * len(text) / 100 and max(lengths) <= 100


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(tiny_tokenizers.SHAPES)),
    st.dictionaries(st.sampled_from(CONTENTS), FLAGS, max_size=3),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from([*ALPHABET, "1", "\t", *CONTENTS]), st.integers(1, 60)), max_size=8),
)
@example("bytes", {"<|x|>": Flags(special=True)}, True, [("a", 300)])
@example("bytes", {"<|x|>": Flags(special=True)}, True, [("1", 28), ("\t", 1)] * 9)
@example("bytes", {"<|x|>": Flags(special=True), "aa": Flags(rstrip=True)}, True, [("a b", 99)])
@example("replaced", {"<|x|>": Flags(special=True)}, True, [(" ", 300)])
@example("unigram", {}, False, [("1 ", 99), ("\n", 200)])
def test_no_call_gets_more_than_it_may_whatever_the_text(
    shape: str, added: dict[str, Flags], at_borders: bool, runs: list[tuple[str, int]]
) -> None:
    backend = shared_backend(shape, added)
    tokenizer = PromptParts(backend, backend.get_added_tokens_decoder(), at_borders=at_borders)
    text, lengths = "".join(some * times for some, times in runs), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "SLICE_CHARACTERS", 32)
        patch.setattr(tokenize, "OVERLAP_CHARACTERS", 8)
        patch.setattr(tokenize, "encode", counted_in(lengths))
        try:
            ends = tokenizer.tokenize(text, None).ends.tolist()
        except TokenizerFailed:
            return
    assert max(lengths, default=0) <= 32 + max(map(len, ("", *added)))
    assert ends == sorted(ends)


def test_slices_that_never_agree_are_put_together_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "SLICE_CHARACTERS", 60)
    monkeypatch.setattr(tokenize, "OVERLAP_CHARACTERS", 20)
    backend: Any = tiny_tokenizers.tokenizer("bytes", {})
    backend.post_processor, backend.decoder = processors.ByteLevel(trim_offsets=True), decoders.ByteLevel()
    text, encode_whole = "in  the é\n\n  end日 " * 20, tokenize.encode
    starts: Any = iter(range(1000))

    def encoded(backend: Any, some: str) -> Any:
        """Gives the tokens of each slice other numbers, so that it agrees with none."""
        encoding, number = encode_whole(backend, some), next(starts)
        return Mock(ids=[1000 * number + token for token in encoding.ids], offsets=encoding.offsets)

    monkeypatch.setattr(tokenize, "encode", encoded)
    ids = PromptParts(backend, {}, at_borders=False).tokenize(text).ids % 1000
    assert backend.decode(ids.tolist(), skip_special_tokens=False) == text and next(starts) > 5


def test_one_long_word_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, tokenizer = list[int](), pieces()
    monkeypatch.setattr(tokenize, "encode", counted_in(lengths))
    with pytest.raises(PromptTooLong):
        tokenizer.tokenize("b" * 4_000_000, max_tokens=10)
    assert sum(lengths) < 100_000


def counted_in(lengths: list[int]) -> Any:
    """Returns an `encode` that says how long its texts are."""

    def counted(backend: Any, text: str, **options: bool) -> Any:
        lengths.append(len(text))
        return encode(backend, text, **options)

    return counted


def test_tokenizing_counts_all_pieces() -> None:
    num_tokens = len(whole(TURN * 9))
    assert len(pieces().tokenize(TURN * 9, max_tokens=num_tokens).ids) == num_tokens
    with pytest.raises(PromptTooLong) as caught:
        pieces().tokenize(TURN * 9, max_tokens=num_tokens - 1)
    assert (caught.value.num_tokens, caught.value.max_tokens) == (num_tokens, num_tokens - 1)


# -------------------------------------------------------------------------------------------- memory and replies


def test_a_longer_conversation_tokenizes_only_what_is_new() -> None:
    backend = Counting()
    tokenizer = PromptParts(backend, TOKENS)
    tokenizer.tokenize(TURN * 50)
    backend.num_characters = 0
    tokenizer.tokenize(TURN * 50 + "something new<|im_end|>")
    assert backend.num_characters == len(f"{tokenizer._borders.opener}assistant\nsomething new")


def test_a_reply_is_remembered_for_its_own_namespace() -> None:
    tokenizer = pieces()
    reply_to(tokenizer, TURN, "in the", spelled("in the"), "mine")
    assert tokenizer.tokenize(f"{TURN}in the", "mine").ids.tolist()[-6:] == spelled("in the")
    assert tokenizer.tokenize(f"{TURN}in the", "another").ids.tolist() == whole(f"{TURN}in the")


def test_a_reply_with_a_marker_is_remembered_on_both_sides_of_it() -> None:
    tokenizer = pieces()
    ids = [*spelled("in"), ADDED["<think>"], *spelled("at")]
    prompt_ids = reply_to(tokenizer, TURN, "in<think>at", ids)
    assert tokenizer.tokenize(f"{TURN}in<think>at<|im_end|>").ids.tolist() == [*prompt_ids, *ids, ADDED["<|im_end|>"]]


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "MAX_REMEMBERED_BYTES", 4000)
    tokenizer = pieces()
    for number in range(200):
        text = f"<|im_start|>{number} some words<|im_end|>"
        assert tokenizer.tokenize(text).ids.tolist() == whole(text)
    assert 0 < tokenizer._memory.size <= 4000
    assert tokenizer._memory.size == sum(piece.num_bytes for piece, _ in tokenizer._memory._kept.values())


@pytest.mark.parametrize("num_words", [1, 400])
def test_what_the_memory_counts_is_what_it_takes(num_words: int) -> None:
    tokenizer = pieces()
    text = "".join(f"<|im_start|>{number}{' word' * num_words}" for number in range(2000 // num_words * 2 + 50))
    tracemalloc.start()
    try:
        tokenizer.tokenize(text)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.9 * taken <= tokenizer._memory.size <= 1.3 * taken


def test_a_tokenizer_that_gives_up_is_not_used_and_ends_no_thread() -> None:
    class PanicException(BaseException):
        """What a panic of the library looks like."""

    class Panicking(Counting):
        def encode_batch(self, texts: list[str], **options: bool) -> Any:
            """Gives up on a border between two samples."""
            if len(texts[0]) > 60:
                raise PanicException
            return super().encode_batch(texts, **options)

    assert not PromptParts(Panicking(), TOKENS).fits()
    with pytest.raises(TokenizerFailed):
        encode(Panicking(), "a" * 61)


@pytest.mark.parametrize(
    "contents",
    [
        [f"<{number}>" for number in range(70_001)],
        ["a" * 10_000],
        ["".join(chr(1000 + place) for place in range(length)) for length in range(1, 500)],
    ],
)
def test_too_many_added_tokens_to_cut_at_are_left_to_the_tokenizer(contents: list[str]) -> None:
    added = {number: AddedToken(text, normalized=False, special=True) for number, text in enumerate(contents)}
    found = chat_template._parts_of(BACKEND, added, "")
    assert found is not None and not found.fits()
    assert found.tokenize("some text").ids.tolist() == BACKEND.encode("some text", add_special_tokens=False).ids


def test_a_tokenizer_that_minds_where_a_piece_stands_does_not_fit() -> None:
    class Positional(Counting):
        def encode_batch(self, texts: list[str], **options: bool) -> Any:
            """Treats a long text differently, as nothing that cuts at added tokens does."""
            return super().encode_batch([f" {text}" if len(text) > 60 else text for text in texts], **options)

    assert pieces().fits()
    assert not PromptParts(Positional(), TOKENS).fits()
    assert not PromptParts(BACKEND, {}).fits()
