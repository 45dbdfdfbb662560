"""Streaming text: what comes out piece by piece is the whole text."""

import functools

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models.output.detokenizer import Detokenizer, StreamDecoder
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


def test_both_byte_encodings_are_recognised_and_others_are_not() -> None:
    assert Detokenizer(tiny_models.tokenizer()).encodes_bytes
    assert Detokenizer(sentencepiece_tokenizer()).encodes_bytes
    assert not Detokenizer(word_tokenizer()).encodes_bytes


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


def test_a_special_token_does_not_tear_a_character() -> None:
    tokenizer = tiny_models.tokenizer()
    first, second = tokenizer.encode("é")
    assert tokenizer.eos_token_id is not None
    assert "".join(stream(StreamDecoder(Detokenizer(tokenizer)), [first, tokenizer.eos_token_id, second])) == "é"


def test_half_a_character_at_the_end_is_marked_as_such() -> None:
    first, _ = tiny_models.tokenizer().encode("é")
    assert stream(StreamDecoder(Detokenizer(tiny_models.tokenizer())), [first]) == ["", "\ufffd"]


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert stream(StreamDecoder(Detokenizer(tiny_models.tokenizer())), [tiny_models.VOCAB + 5]) == ["", ""]
