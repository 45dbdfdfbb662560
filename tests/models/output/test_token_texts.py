"""Tokens as text, single and in lists, whatever the tokenizer."""

from typing import Any

import pytest

from models.output.detokenizer import Detokenizer
from tests.models.output.test_detokenizer import sentencepiece_tokenizer, word_tokenizer
from tests.support import tiny_models


@pytest.mark.parametrize("tokenizer", [tiny_models.tokenizer(), sentencepiece_tokenizer()])
def test_pieces_together_are_the_text(tokenizer: Any) -> None:
    texts, text = Detokenizer(tokenizer), " aé 中🙂\n<x"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert texts.text(ids) == b"".join(map(texts.piece, ids)).decode() == text


def test_special_tokens_have_a_text_here() -> None:
    tokenizer = tiny_models.tokenizer()
    texts = Detokenizer(tokenizer, eos_token_ids=[tokenizer.eos_token_id])
    assert texts.piece(tokenizer.eos_token_id).decode() == tokenizer.eos_token
    assert texts.text([tokenizer.eos_token_id]) == tokenizer.eos_token
    assert Detokenizer(sentencepiece_tokenizer()).text([1]) == "<s>"


def test_half_a_character_is_bytes_and_in_a_text_replaced() -> None:
    tokenizer = tiny_models.tokenizer()
    texts = Detokenizer(tokenizer)
    first = tokenizer.encode("é", add_special_tokens=False)[0]
    assert texts.piece(first) == "é".encode()[:1]
    assert texts.text([first]) == "\ufffd"


def test_a_tokenizer_that_encodes_no_bytes_is_asked_itself() -> None:
    tokenizer = word_tokenizer()
    texts = Detokenizer(tokenizer)
    assert texts.text([1, 2, 3]) == tokenizer.decode([1, 2, 3]) == "hello worlds"
    assert [texts.piece(token) for token in (1, 5)] == [b"hello", b"[SEP]"]


@pytest.mark.parametrize("tokenizer", [tiny_models.tokenizer(), sentencepiece_tokenizer(), word_tokenizer()])
def test_an_id_beyond_the_tokenizers_has_no_text(tokenizer: Any) -> None:
    texts = Detokenizer(tokenizer)
    assert (texts.piece(10_000_000), texts.text([10_000_000])) == (b"", "")
