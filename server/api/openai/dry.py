"""DRY's sequence breakers: texts that no repetition reaches across, as tokens of one model."""

from collections.abc import Sequence

from server.api.context import ServedModel

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
"""Those of llama.cpp and koboldcpp."""


def breaker_tokens(texts: Sequence[str] | None, model: ServedModel) -> tuple[int, ...]:
    """Returns the tokens that hold one of `texts`, or of the usual ones for None, in ascending order.

    For a text that no single token holds it is the last token of that text.
    """
    wanted = DEFAULT_BREAKERS if texts is None else texts
    return tuple(sorted({token for text in wanted if text for token in _tokens_of(text, model)}))


def _tokens_of(text: str, model: ServedModel) -> Sequence[int]:
    last = model.renderer.tokenize(text)[-1:]
    return model.token_search.containing(text) or [token for token in last if token < model.vocab_size]
