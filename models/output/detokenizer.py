"""Tokens to text in whole characters.

Most tokenizers encode tokens as bytes: by an alphabet of 256 letters, or by plain text with a mark for a space and
`<0xE2>` for a byte; a UTF-8 decoder holds back incomplete characters. Others decode the last tokens with and without
the new one.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from models.mlx_lm_import import TokenizerWrapper

_MAX_HELD_TOKENS: Final = 8
"""A character has at most four bytes; a longer tail never becomes one."""

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK: Final = "\u2581"


_PRINTABLE: Final = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_BYTES_BY_LETTER: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(sorted({*range(256)}.difference(_PRINTABLE)))
}
"""Printable bytes as they are, others from U+0100 on (Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019, section 2.2).
"""


class Detokenizer:
    """The text of a model's tokens. Any thread: only a memo grows."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, visible_texts: Iterable[str] = (), eos_token_ids: Iterable[int] = ()
    ) -> None:
        """Special tokens have no text, unless `visible_texts` consist of them: see `markers`."""
        visible = {
            token_id for text in visible_texts for token_id in tokenizer.encode(text, add_special_tokens=False)
        }
        added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.tokenizer = tokenizer
        self.silent_ids = frozenset((added | {*tokenizer.all_special_ids}) - visible) | frozenset(eos_token_ids)
        self._encoding = _byte_encoding(tokenizer)
        self.bytes_of: Callable[[int], bytes] = cache(self._encode)
        """A token's bytes; none for an unknown id. Requires `encodes_bytes`."""

    @property
    def encodes_bytes(self) -> bool:
        """Every token has bytes of its own, whatever precedes it."""
        return self._encoding is not None

    def piece(self, token_id: int) -> bytes:
        """A token's bytes, special or not; none for an unknown id."""
        return self.bytes_of(token_id) if self.encodes_bytes else self.text([token_id]).encode()

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special or not, with U+FFFD for bytes that are no character; none of a picture's ids."""
        words = [token_id for token_id in token_ids if token_id >= 0]
        if self.encodes_bytes:
            return b"".join(map(self.bytes_of, words)).decode(errors="replace")
        return str(self.tokenizer.decode(words, clean_up_tokenization_spaces=False))

    def _encode(self, token_id: int) -> bytes:
        token: str | None = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._encoding == "ByteLevel":
            # Added tokens are not written in the alphabet; one with a letter outside the alphabet is used unchanged.
            is_in_alphabet = all(letter in _BYTES_BY_LETTER for letter in token)
            return bytes(_BYTES_BY_LETTER[letter] for letter in token) if is_in_alphabet else token.encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace(_SPACE_MARK, " ").encode()


def markers(wrapper: TokenizerWrapper) -> tuple[str, ...]:
    """Texts that structure a model's output."""
    texts = (wrapper.think_start, wrapper.think_end, wrapper.tool_call_start, wrapper.tool_call_end)
    return tuple(text for text in (*texts, *wrapper.structural_markers) if text)


def _byte_encoding(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """ "ByteLevel", "SentencePiece", or None where only the tokenizer knows."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    parts = _decoder_parts(json.loads(backend.decoder.__getstate__()))
    if parts == {"ByteLevel"}:
        return "ByteLevel"
    if parts == {"Metaspace"} or {"Replace", "ByteFallback"} <= parts <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return "SentencePiece"
    return None


def _decoder_parts(decoder: dict[str, Any]) -> set[str]:
    if decoder["type"] == "Sequence":
        return {kind for part in decoder["decoders"] for kind in _decoder_parts(part)}
    makes_spaces = decoder.get("pattern") == {"String": _SPACE_MARK} and decoder.get("content") == " "
    return {decoder["type"]} if decoder["type"] != "Replace" or makes_spaces else {"other"}


class StreamDecoder:
    """One sequence's text: all pushes and `finish`, joined."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that a token completes: perhaps none, never part of a character."""
        if token_id in self._detokenizer.silent_ids:
            return ""
        if self._detokenizer.encodes_bytes:
            return self._utf8.decode(self._detokenizer.bytes_of(token_id))
        self._held.append(token_id)
        return self._release(is_final=False)

    def finish(self) -> str:
        """The text held back; an incomplete character becomes U+FFFD."""
        if self._detokenizer.encodes_bytes:
            return self._utf8.decode(b"", final=True)
        return self._release(is_final=True)

    def _release(self, *, is_final: bool) -> str:
        decode = self._detokenizer.text
        text = decode(self._context + self._held)[len(decode(self._context)) :]
        if text.endswith("\ufffd") and len(self._held) < _MAX_HELD_TOKENS and not is_final:
            return ""
        if self._held:
            self._context, self._held = self._held, []
        return text


MAX_KEPT = 256


def token_search(piece: Callable[[int], bytes], vocab_size: int) -> Callable[[str], tuple[int, ...]]:
    """A search for the tokens, ascending, with all of a text. Any thread; the first search is slow."""
    pieces = cache(lambda: list(map(piece, range(vocab_size))))

    @lru_cache(MAX_KEPT)
    def containing(text: str) -> tuple[int, ...]:
        wanted = text.encode()
        return tuple(index for index, text_bytes in enumerate(pieces()) if wanted in text_bytes)

    return containing
