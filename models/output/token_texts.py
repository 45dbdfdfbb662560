"""What single tokens, and lists of them, are as text: every one, special tokens too."""

from collections.abc import Sequence

from models.output.detokenizer import Detokenizer


class TokenTexts:
    """The texts of one model's tokens. For any thread."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        """`detokenizer` is borrowed."""
        self._detokenizer = detokenizer

    def piece(self, token_id: int) -> bytes:
        """Returns the bytes of one token, which may be a part of a character; none for an id without a token."""
        if self._detokenizer.encodes_bytes:
            return self._detokenizer.bytes_of(token_id)
        return self._decode([token_id]).encode()

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, with U+FFFD for what is no character."""
        if self._detokenizer.encodes_bytes:
            return b"".join(map(self._detokenizer.bytes_of, token_ids)).decode(errors="replace")
        return self._decode(list(token_ids))

    def _decode(self, token_ids: list[int]) -> str:
        tokenizer = self._detokenizer.tokenizer
        return str(tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
