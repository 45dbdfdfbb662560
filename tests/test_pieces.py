"""Piecewise tokenization equals whole tokenization, costs only new text, and keeps generated ids."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import pieces as pieces_module
from models.pieces import Pieces
from tests import tiny_models

BACKEND: Any = tiny_models.tokenizer().backend_tokenizer
ADDED = {str(token): number for number, token in tiny_models.tokenizer().added_tokens_decoder.items()}
TURN = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"


class Counting:
    """A backend that counts the characters it is asked to tokenize."""

    def __init__(self) -> None:
        self.num_characters = 0

    def encode(self, text: str, **options: bool) -> Any:
        """Passes the text on."""
        self.num_characters += len(text)
        return BACKEND.encode(text, **options)


def whole(text: str) -> list[int]:
    """Returns the ids that the tokenizer gives the whole text."""
    return list(BACKEND.encode(text, add_special_tokens=False).ids)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(sorted(ADDED)), st.text(max_size=12)), max_size=8))
def test_piecewise_is_whole(parts: list[str]) -> None:
    text = "".join(parts)
    tokenized = Pieces(BACKEND, ADDED).tokenize(text)
    assert tokenized.ids.tolist() == whole(text)
    assert len(tokenized.ends) == len(tokenized.ids)
    assert all(a <= b for a, b in zip(tokenized.ends, tokenized.ends[1:], strict=False))


def test_the_ends_bound_the_text_that_the_tokens_came_from() -> None:
    tokenized = Pieces(BACKEND, ADDED).tokenize(TURN + "ab cd")
    for count, end in enumerate(tokenized.ends, start=1):
        assert (TURN + "ab cd").startswith(BACKEND.decode(tokenized.ids[:count].tolist(), skip_special_tokens=False))
        assert len(BACKEND.decode(tokenized.ids[:count].tolist(), skip_special_tokens=False)) <= end


def test_a_longer_conversation_tokenizes_only_what_is_new() -> None:
    backend = Counting()
    tokenizer = Pieces(backend, ADDED)
    tokenizer.tokenize(TURN * 50)
    backend.num_characters = 0
    tokenizer.tokenize(TURN * 50 + "something new<|im_end|>")
    assert backend.num_characters == len("assistant\nsomething new<|im_end|>") - len("<|im_end|>")


def test_a_reply_keeps_the_ids_it_was_generated_with() -> None:
    tokenizer = Pieces(BACKEND, ADDED)
    prompt_ids = tokenizer.tokenize(TURN).ids
    spelled = [number for letter in "in the" for number in whole(letter)]
    assert spelled != whole("in the"), "the reply must not be what the tokenizer would say"
    tokenizer.remember_reply(TURN, prompt_ids, "in the", spelled)
    following = tokenizer.tokenize(f"{TURN}in the<|im_end|>\n").ids.tolist()
    assert following == [*prompt_ids.tolist(), *spelled, *whole("<|im_end|>\n")]


def test_a_reply_is_remembered_for_its_own_namespace() -> None:
    tokenizer = Pieces(BACKEND, ADDED)
    spelled = [number for letter in "in the" for number in whole(letter)]
    tokenizer.remember_reply(TURN, tokenizer.tokenize(TURN).ids, "in the", spelled, "mine")
    assert tokenizer.tokenize(f"{TURN}in the", "mine").ids.tolist()[-len(spelled) :] == spelled
    assert tokenizer.tokenize(f"{TURN}in the", "another").ids.tolist() == whole(f"{TURN}in the")


def test_a_reply_with_a_marker_is_remembered_on_both_sides_of_it() -> None:
    tokenizer = Pieces(BACKEND, ADDED)
    prompt_ids = tokenizer.tokenize(TURN).ids
    ids = [*whole("i"), *whole("n"), ADDED["<think>"], *whole("a"), *whole("t")]
    tokenizer.remember_reply(TURN, prompt_ids, "in<think>at", ids)
    assert tokenizer.tokenize(f"{TURN}in<think>at<|im_end|>").ids.tolist() == [
        *prompt_ids.tolist(),
        *ids,
        ADDED["<|im_end|>"],
    ]


def test_a_reply_whose_text_and_ids_disagree_is_not_remembered() -> None:
    tokenizer = Pieces(BACKEND, ADDED)
    prompt_ids = tokenizer.tokenize(TURN).ids
    tokenizer.remember_reply(TURN, prompt_ids, "in the", [ADDED["<think>"], *whole("in the")])
    assert tokenizer.tokenize(f"{TURN}in the").ids.tolist() == whole(f"{TURN}in the")


def test_another_prompt_does_not_take_the_remembered_ids() -> None:
    tokenizer = Pieces(BACKEND, ADDED)
    wrong = np.array(whole("<|im_start|>another\n"), np.int32)
    tokenizer.remember_reply(TURN, wrong, "in", [*whole("i"), *whole("n")])
    assert tokenizer.tokenize(f"{TURN}in").ids.tolist() == whole(f"{TURN}in")


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "MAX_REMEMBERED_BYTES", 4000)
    tokenizer = Pieces(BACKEND, ADDED)
    for number in range(200):
        text = f"<|im_start|>{number} some words<|im_end|>"
        assert tokenizer.tokenize(text).ids.tolist() == whole(text)
    assert tokenizer._num_bytes <= 4000
    assert tokenizer._num_bytes == sum(pieces_module._cost(text, piece) for text, piece in tokenizer._memory.items())


def test_a_tokenizer_that_minds_where_a_piece_stands_does_not_fit() -> None:
    class Positional(Counting):
        def encode(self, text: str, **options: bool) -> Any:
            """Treats a text that starts with an added token differently, as some do with the first word."""
            return super().encode(f" {text}" if text.startswith("<|") and len(text) > 20 else text, **options)

    assert Pieces(BACKEND, ADDED).fits()
    assert not Pieces(Positional(), ADDED).fits()
    assert not Pieces(BACKEND, {}).fits()
